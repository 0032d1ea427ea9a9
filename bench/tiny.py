"""In: numbers of parameters. Out: microseconds of the host that a whole tail takes.

    python -m bench.tiny --parameters 8 15 30 --calls 400

Small models (networks of policies, PINNs) have so few elements that a step costs what
Python and torch take around the arithmetic. Parameters of 32 x 32 in float32; a tail is
clip by the total norm, AdamW, an average of the weights where asked for, `zero_grad`.
Three ways take turns over copies of the same parameters: torch's `foreach`, torch's
`fused`, `fuseopt.tail`. One line of JSON for each: the medians and the least, of the
thread's own time with one thread, which other work on the machine does not fill.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import fuseopt

#: Calls before the first that is timed.
FIRST = 20
CLIP, DECAY = 1.0, 0.99
WAYS = ("foreach", "fused", "fuseopt")


class Side:
    """Parameters, an optimizer and averages of one way's own. `elements`: of a row."""

    def __init__(self, way: str, n: int, averaged: bool, elements: int = 32) -> None:
        torch.manual_seed(0)
        shape = (elements, elements)
        self.params = [torch.nn.Parameter(torch.randn(shape)) for _ in range(n)]
        self.averages = [p.detach().clone() for p in self.params] if averaged else []
        flags = {} if way == "fuseopt" else {way: True}
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-3, **flags)
        self.call: Callable[[], Any] = self.apart
        if way == "fuseopt":
            ema = [(self.averages, DECAY)] if averaged else []
            self.call = fuseopt.tail(
                self.optimizer, clip_grad_norm=CLIP, ema=ema, zero_grad=True
            )

    def apart(self) -> None:
        """Each part for itself, as trainers call them."""
        torch.nn.utils.clip_grad_norm_(self.params, CLIP, foreach=True)
        self.optimizer.step()
        if self.averages:
            with torch.no_grad():
                torch._foreach_lerp_(self.averages, self.params, 1 - DECAY)
        self.optimizer.zero_grad()

    def timed(self, grads: Sequence[torch.Tensor]) -> float:
        """Microseconds of this thread that a call with new gradients takes."""
        for p, grad in zip(self.params, grads, strict=True):
            p.grad = grad.clone()
        begin = time.thread_time()
        self.call()
        return 1e6 * (time.thread_time() - begin)


def measured(n: int, averaged: bool, calls: int) -> dict[str, Any]:
    """The figures of one number of parameters."""
    torch._dynamo.reset()
    sides = {way: Side(way, n, averaged) for way in WAYS}
    grads = [torch.randn_like(p) for p in sides["foreach"].params]
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(FIRST + calls):
        for way, side in sides.items():
            took = side.timed(grads)
            if turn >= FIRST:
                found[way].append(took)
    return {
        "parameters": n,
        "averaged": averaged,
        "median_us": {k: round(statistics.median(x), 1) for k, x in found.items()},
        "least_us": {k: round(min(x), 1) for k, x in found.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each number of parameters, without and with an average."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", nargs="+", type=int, default=[8, 15, 30])
    parser.add_argument("--calls", type=int, default=400)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for n in given.parameters:
        for averaged in (False, True):
            print(json.dumps(measured(n, averaged, given.calls)), flush=True)


if __name__ == "__main__":
    main()

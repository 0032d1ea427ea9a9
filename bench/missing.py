"""In: optimizers, numbers of parameters. Out: milliseconds a call while gradients come
and go.

    python -m bench.missing --optimizers AdamW SGD --parameters 64 300

Parameters of 64 x 64 in float32. In every other call another random third of the
gradients is None. Eager's step (foreach, a loop for Lion and LAMB) and the compiled one
are called in turns, over copies of the same parameters; "tail" is AdamW behind a clip
by the total norm. One line of JSON for each pair: the medians of each, and the least,
of the thread's own time with one thread, which other work on the machine does not fill.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import fuseopt
from tests.papers import LAMB, Lion

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, foreach=True),
    "SGD": lambda params: torch.optim.SGD(params, 1e-3, momentum=0.9, foreach=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, foreach=True),
    "LAMB": lambda params: LAMB(params, lr=1e-3),
    "Lion": lambda params: Lion(params, lr=1e-3),
    "tail": lambda params: torch.optim.AdamW(params, foreach=True),
}
#: Calls before the first that is timed: state is made, kinds of lanes are traced.
FIRST = 12


def timed(call: Callable[[], Any]) -> float:
    """Milliseconds of this thread that a call takes."""
    begin = time.thread_time()
    call()
    return 1e3 * (time.thread_time() - begin)


def of(name: str, params: Any, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """What is called in eager."""
    if name != "tail":
        return optimizer.step

    def clipped() -> None:
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()

    return clipped


def compiled(name: str, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """What is called of fuseopt."""
    if name == "tail":
        return fuseopt.tail(optimizer, clip_grad_norm=1.0)
    return fuseopt.compile(optimizer, eager_if_faster=False).step


def measured(name: str, n: int, calls: int) -> dict[str, Any]:
    """The figures of one optimizer over so many parameters."""
    torch.manual_seed(0)
    contents = [torch.randn(64, 64) for _ in range(n)]
    grads = [torch.randn(64, 64) for _ in range(n)]
    sides = []
    for _ in range(2):
        params = [torch.nn.Parameter(t.clone()) for t in contents]
        sides.append((params, OPTIMIZERS[name](params)))
    calls_of = [of(name, *sides[0]), compiled(name, sides[1][1])]
    rng = random.Random(0)
    found: dict[str, list[float]] = {
        f"{who}_{what}": [] for who in ("eager", "fuseopt") for what in ("all", "some")
    }
    for turn in range(FIRST + 2 * calls):
        what = "all" if turn % 2 else "some"
        there = [what == "all" or rng.random() > 1 / 3 for _ in grads]
        for who, (params, _), call in zip(
            ("eager", "fuseopt"), sides, calls_of, strict=True
        ):
            for p, grad, has in zip(params, grads, there, strict=True):
                p.grad = grad.clone() if has else None
            took = timed(call)
            if turn >= FIRST:
                found[f"{who}_{what}"].append(took)
    medians = {k: round(statistics.median(x), 3) for k, x in found.items()}
    least = {k: round(min(x), 3) for k, x in found.items()}
    return {"optimizer": name, "parameters": n, "median": medians, "least": least}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each optimizer and number of parameters."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--optimizers", nargs="+", default=[*OPTIMIZERS])
    parser.add_argument("--parameters", nargs="+", type=int, default=[64, 300, 1000])
    parser.add_argument("--calls", type=int, default=200)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in given.optimizers:
        for n in given.parameters:
            print(json.dumps(measured(name, n, given.calls)), flush=True)


if __name__ == "__main__":
    main()

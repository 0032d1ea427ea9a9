"""In: sets of matrices. Out: milliseconds of a step of Muon: eager, batched by hand,
compiled.

    python -m bench.products --models detection gpt --optimizers torch loop --threads 1

`torch` is torch.optim.Muon (its products are in bfloat16), `loop` the Muon of the tests
in float32. `by_hand` is the same arithmetic over `torch.stack` of the matrices of one
shape, by foreach, `bmm` and `baddbmm`. All three take turns. One line of JSON each.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fuseopt
from bench.interleave import Turns
from tests.papers.matrices import ITERATIONS, A, B, C, LoopMuon

#: The matrices of models: convolutions of a small detector as matrices, a GPT of four
#: layers at three widths.
MODELS: dict[str, list[tuple[int, int]]] = {
    "detection": [(16, 16)] * 40 + [(32, 64)] * 40 + [(64, 32)] * 46,
    "gpt": [(64, 64)] * 16 + [(64, 256)] * 16 + [(256, 64)] * 16,
    "gpt128": [(128, 128)] * 16 + [(128, 512)] * 16 + [(512, 128)] * 16,
    "gpt512": [(512, 512)] * 4 + [(512, 2048)] * 2 + [(2048, 512)] * 2,
}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "torch": lambda params: torch.optim.Muon(params, lr=1e-3),
    "loop": lambda params: LoopMuon(params, torch.float32),
}


class ByHand:
    """Muon over stacks of matrices of one shape, without a compiler."""

    def __init__(self, params: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.buffers = {p: torch.zeros_like(p) for p in params}
        self.groups: dict[torch.Size, list[nn.Parameter]] = {}
        for p in params:
            self.groups.setdefault(p.shape, []).append(p)

    @torch.no_grad()
    def step(self) -> None:
        """One step; the rate is 1e-3, the momentum 0.95."""
        for shape, params in self.groups.items():
            grads: list[Any] = [p.grad for p in params]
            buffers = [self.buffers[p] for p in params]
            torch._foreach_lerp_(buffers, grads, 0.05)
            updates = torch._foreach_lerp(grads, buffers, 0.95)
            x = torch.stack(list(updates)).to(self.dtype)
            x = x.mT if shape[0] > shape[1] else x
            x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
            for _ in range(ITERATIONS):
                gram = torch.bmm(x, x.mT)
                update = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
                x = torch.baddbmm(x, update, x, beta=A)
            x = x.mT if shape[0] > shape[1] else x
            results: list[Tensor] = list(x.to(params[0].dtype).unbind())
            torch._foreach_mul_(list(params), 1 - 1e-4)
            torch._foreach_add_(list(params), results, alpha=-1e-3)


def measured(
    model: str, optimizer: str, rounds: int, numerics: str = "eager"
) -> dict[str, Any]:
    """The figures of one optimizer over the matrices of one model."""
    torch.manual_seed(0)
    contents = [torch.randn(shape) / 50 for shape in MODELS[model]]
    sides: list[list[nn.Parameter]] = []
    for _ in range(3):
        params = [nn.Parameter(t.clone()) for t in contents]
        for p, t in zip(params, contents, strict=True):
            p.grad = t.flip(0)
        sides.append(params)
    make = OPTIMIZERS[optimizer]
    plain, compiled = make(sides[0]), make(sides[1])
    hand = ByHand(sides[2], torch.bfloat16 if optimizer == "torch" else torch.float32)
    fuseopt.compile(compiled, eager_if_faster=False, numerics=numerics)
    begin = time.perf_counter()
    compiled.step()
    first = time.perf_counter() - begin
    report = fuseopt.reports()[-1]
    plain.step()
    turns = Turns(
        {
            "eager": functools.partial(plain.step),
            "by_hand": hand.step,
            "fuseopt": functools.partial(compiled.step),
        }
    )
    for _ in range(rounds):
        turns.round()
    return {
        "model": model,
        "optimizer": optimizer,
        "numerics": numerics,
        "matrices": len(contents),
        "threads": torch.get_num_threads(),
        "first_step_s": round(first, 2),
        "calls": sum(b.calls for b in report.batches) + len(report.externs),
        "ms": {
            name: {k: round(1e3 * x[k], 2) for k in ("p50", "p10")}
            for name, x in turns.figures().items()
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each model and optimizer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--optimizers", nargs="+", default=[*OPTIMIZERS])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--numerics", choices=["eager", "fast"], default="eager")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    for optimizer in given.optimizers:
        for model in given.models:
            figures = measured(model, optimizer, given.rounds, given.numerics)
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()

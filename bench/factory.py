"""Optimizers of timm's factory in 24 groups: a compiled step beside eager's, in turns.

    python -m bench.factory [NAME ...]

In: names of timm's registry, all of `NAMES` if none is given. Out: a line for each: the
least that 20 steps took in eager and compiled, their ratio, and whether the step was
given back to eager, with what was said. Needs timm (`make .venv/stamp-timm`).
"""

from __future__ import annotations

import copy
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from tests.wild.without_torchvision import stand_ins

#: What people train with most, by name in the registry.
NAMES = """
    sgd momentum adam adamw nadam nadamw radam rmsprop rmsproptf lamb lars lion adan
    adafactor adafactorbv adabelief adamp sgdp madgrad laprop novograd adopt mars muon
    kron
""".split()
#: Calls until a race is over, and steps that are timed.
BEFORE, STEPS = 40, 20


def pair(name: str) -> list[torch.optim.Optimizer]:
    """Twice the same optimizer, of two copies of a small ViT with layer decay."""
    import timm
    from timm.optim import create_optimizer_v2

    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", depth=10)
    made = []
    for twin in (model, copy.deepcopy(model)):
        draw = torch.Generator().manual_seed(1)
        for p in twin.parameters():
            p.grad = 1e-3 * torch.randn(p.shape, generator=draw)
        made.append(
            create_optimizer_v2(
                twin, name, lr=1e-4, weight_decay=0.05, layer_decay=0.75
            )
        )
    return made


def seconds(step: Callable[[], Any]) -> float:
    """How long one step takes."""
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def measure(name: str) -> str:
    """A line about one optimizer."""
    eager, ours = pair(name)
    begin = time.perf_counter()
    given = {"eager_if_faster": True}  # as users have it, and other figures do not
    step = torch.compile(ours.step, backend="fuseopt", options=given)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step()
        first = time.perf_counter() - begin
        eager.step()
        for _ in range(BEFORE):
            step()
            eager.step()
    turns = [(seconds(eager.step), seconds(step)) for _ in range(STEPS)]
    plain, mine = (1e3 * min(column) for column in zip(*turns, strict=True))
    said = [str(w.message).partition("\n")[0] for w in told]
    raced = [line for line in said if "it is faster there" in line]
    groups = len(ours.param_groups)
    return (
        f"{name:12} {groups:3} groups  first {first:6.1f} s  eager {plain:7.2f} ms  "
        f"compiled {mine:7.2f}  {plain / mine:5.2f}x  {(raced or [''])[0]}"
    )


def main() -> None:
    """Measure what the command line asks for."""
    with stand_ins():
        for name in sys.argv[1:] or NAMES:
            print(measure(name), flush=True)


if __name__ == "__main__":
    main()

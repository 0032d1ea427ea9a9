"""Optimizers of timm's factory in 24 groups: a compiled step beside eager's, in turns.

    python -m bench.factory [NAME ...]

In: names of timm's registry, all of `NAMES` if none is given. Out: a line for each: the
least that 20 steps took in eager and compiled, their ratio, and whether the step was
given back to eager, and why. Needs timm (`make .venv/stamp-timm`).
"""

from __future__ import annotations

import copy
import sys
import warnings

import torch

from bench.interleave import interleave, seconds_of
from bench.models import build
from fuseopt.compiler.session import session
from fuseopt.isolate.race import ROUNDS, WARM
from tests.wild.without_torchvision import stand_ins

#: What people train with most, by name in the registry.
NAMES = """
    sgd momentum adam adamw nadam nadamw radam rmsprop rmsproptf lamb lars lion adan
    adafactor adafactorbv adabelief adamp sgdp madgrad laprop novograd adopt mars muon
    kron
""".split()
#: Calls until a race is over, though the first ones compile; steps that are timed.
BEFORE, STEPS = WARM + 4 * ROUNDS + 5, 20


def pair(name: str) -> list[torch.optim.Optimizer]:
    """Twice the same optimizer, of two copies of a small ViT with layer decay."""
    from timm.optim import create_optimizer_v2

    torch.manual_seed(0)
    model = build("timm:vit_tiny_patch16_224", depth=10)
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


def measure(name: str) -> str:
    """A line about one optimizer."""
    eager, ours = pair(name)
    given = {"eager_if_faster": True}  # as users have it, and other figures do not
    step = torch.compile(ours.step, backend="fuseopt", options=given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # why it runs in eager is asked below
        first = seconds_of(step)
        eager.step()
        taken = interleave({"eager": eager.step, "compiled": step}, BEFORE + STEPS)
    plain, mine = (1e3 * min(taken[way][BEFORE:]) for way in ("eager", "compiled"))
    return (
        f"{name:12} {len(ours.param_groups):3} groups  first {first:6.1f} s  "
        f"eager {plain:7.2f} ms  compiled {mine:7.2f}  {plain / mine:5.2f}x  "
        f"{session.eager.get(ours, '')}"
    )


def main() -> None:
    """Measure what the command line asks for."""
    with stand_ins():
        for name in sys.argv[1:] or NAMES:
            print(measure(name), flush=True)


if __name__ == "__main__":
    main()

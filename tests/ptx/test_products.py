"""Products of matrices between the kernels of a GPU, in one captured graph.

The kernels are PTX. A product is a call of torch on the simulated device, made between
two launches, or replayed with them.
"""

from __future__ import annotations

import functools
import itertools
import re

import pytest
import torch

from fuseopt.runtime.probes import Probes
from tests.runtime.test_products_on_a_device import MIXED, Polynomial, products

from .kernels import Log
from .twins import PtxTwins

#: Forty steps: gradients move, stay, lie at odd addresses; another rate.
STEPS = 40
EVENTS = ("moved", "stay", "odd", "rate", "stay")
#: Products of each matrix in a step, and matrices of three shapes.
EACH, SHAPES = 15, 3
#: Launches of a step: what is before all products, and what is after them.
LAUNCHES = 2


def twins_of(dtype: torch.dtype = torch.float32) -> PtxTwins:
    # bfloat16 of 16 x 16 has other bits in a batch, on a CPU
    scale = 2 if dtype == torch.bfloat16 else 1
    shapes = [(scale * m, scale * n) for m, n in MIXED]
    return PtxTwins(functools.partial(Polynomial, dtype=dtype), shapes, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forty_steps_of_products(ptx: Log, dtype: torch.dtype) -> None:
    """Eager's bits. All products of a shape are one call, and a replay makes none."""
    ptx.seed = 11
    twins, sim = twins_of(dtype), torch.get_device_module("sim")
    course = [*itertools.islice(itertools.cycle(EVENTS), STEPS)]
    assert not twins.run(course[:2])
    with sim.counting() as captured:
        assert not twins.run(course[2:3])
    assert (captured.captures, captured.replays) == (1, 1)
    assert products(captured) == EACH * SHAPES
    with sim.counting() as later:
        assert not twins.run(course[3:])
    assert (later.captures, later.replays) == (0, STEPS - 3)
    assert products(later) == later.launches == 0
    assert not ptx.faults
    assert len(ptx.launches) == LAUNCHES * STEPS
    assert sum(b.calls for b in twins.report.batches) == EACH * SHAPES
    assert {b.copied for b in twins.report.batches} == {0}


@pytest.mark.slow
def test_products_that_stay_alone(ptx: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each matrix has a branch of the graph."""
    monkeypatch.setattr(Probes, "_answer", lambda *_: "")
    twins = twins_of()
    assert not twins.run(EVENTS)
    assert not ptx.faults
    assert len(ptx.launches) == LAUNCHES * len(EVENTS)
    assert f"{len(MIXED)} branches" in str(twins.report)


#: A pattern in the kernels' text, and what stands there instead.
WRONG = {
    "what products read lies one number later": (r"(tl\.store\(a2)\b", r"\1 + 1"),
    "what they made is read one number later": (r"(x1 = tl\.load\(a1)\b", r"\1 + 1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_around_products(ptx: Log, name: str) -> None:
    """Each is caught, by a fault or by its numbers."""
    changed: list[int] = []

    def change(text: str) -> str:
        text, count = re.subn(*WRONG[name], text)
        changed.append(count)
        return text

    ptx.change_source = change
    found = twins_of().run(EVENTS[:3])
    assert sum(changed)
    assert found or ptx.faults

"""Bytes and sectors that kernels move: each number once, sixteen bytes at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import optim
from torch.optim import Optimizer

from tests.papers import Lion

from .kernels import Log
from .machine import Traffic
from .twins import PtxTwins

SHAPES = ((4096,), (64, 96), (2048,))
COUNT = 4096 + 64 * 96 + 2048
SECTOR = 32
#: How to make each, its dtype, bytes an element.
STEPS: dict[str, tuple[Callable[[list[Any]], Optimizer], torch.dtype, int]] = {
    "AdamW": (lambda p: optim.AdamW(p, foreach=True), torch.float32, 28),
    "AdamW-bf16": (lambda p: optim.AdamW(p, foreach=True), torch.bfloat16, 14),
    "momentum": (
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
        torch.float32,
        20,
    ),
    "SGD": (lambda p: optim.SGD(p, lr=0.1, foreach=True), torch.float32, 12),
    "Lion": (Lion, torch.float32, 20),
}


def moved(log: Log, name: str, course: tuple[str, ...]) -> Traffic:
    """What the last of some steps moved of tensors."""
    make, dtype, _ = STEPS[name]
    twins = PtxTwins(make, shapes=SHAPES, dtype=dtype)
    assert not twins.run(course)
    assert not log.faults
    return log.launches[-1].traffic()


@pytest.mark.parametrize(
    "name",
    [
        "AdamW",
        *(pytest.param(x, marks=pytest.mark.slow) for x in STEPS if x != "AdamW"),
    ],
)
def test_each_number_is_moved_once(ptx: Log, name: str) -> None:
    traffic = moved(ptx, name, ("moved", "moved"))
    assert traffic.loaded + traffic.stored == STEPS[name][2] * COUNT
    # each sector that a warp touches is needed whole
    assert SECTOR * (traffic.loads + traffic.stores) == STEPS[name][2] * COUNT
    # what the tables cost: less than a hundredth of it for each thousand elements
    tables = ptx.launches[-1].traffic(tables=True)
    assert SECTOR * (tables.loads + tables.stores) < 0.1 * STEPS[name][2] * COUNT


def test_gradients_at_odd_addresses_cost_a_sector_an_access(ptx: Log) -> None:
    """They are read element by element: 128 bytes of a warp lie in five sectors."""
    even = moved(ptx, "SGD", ("moved", "moved"))
    torch._dynamo.reset()
    odd = moved(ptx, "SGD", ("moved", "odd"))
    assert (odd.loaded, odd.stored) == (even.loaded, even.stored)
    lanes = 4096 + 2048  # the first and the third
    assert odd.loads - even.loads == lanes * 4 // 128
    assert odd.stores == even.stores


def test_a_lane_that_is_missing_moves_nothing(ptx: Log) -> None:
    traffic = moved(ptx, "SGD", ("moved", "moved", "missing"))
    assert traffic.loaded + traffic.stored == 12 * (COUNT - 64 * 96)

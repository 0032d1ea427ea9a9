"""Whose memory is seen through which views: what may belong to a lane, and what not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fuseopt
from fuseopt.ir.graph import Buffer
from fuseopt.replicate.whole_views import owners_of_views
from tests.papers.matrices import EVERY

COMMON = -1


def view(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int = 0,
    dtype: str = "f32",
    kind: str = "temp",
) -> Buffer:
    return Buffer("x", dtype, shape, stride, offset, 7, kind, -1, "cpu")


MATRIX = view((4, 6), (6, 1))
SAME = {
    "transposed": view((6, 4), (1, 6)),
    "of heads": view((2, 2, 6), (12, 6, 1)),
}
OTHERS = {
    "a stack of one": view((1, 4, 6), (24, 6, 1)),
    "flat": view((24,), (1,)),
    "a part": view((4, 3), (6, 1)),
    "another part": view((4, 6), (6, 1), 24),
    "another dtype": view((4, 6), (6, 1), dtype="i32"),
    "of the caller": view((6, 4), (1, 6), kind="view"),
}


@pytest.mark.parametrize("how", SAME)
def test_another_view_of_a_matrix_has_its_owner(how: str) -> None:
    buffers = [SAME[how], MATRIX]
    assert [*owners_of_views(buffers, [COMMON, 2], COMMON)] == [(0, 2)]
    assert [*owners_of_views(buffers[::-1], [COMMON, 2], COMMON)] == [(0, 2)]


@pytest.mark.parametrize("how", OTHERS)
def test_what_may_be_common_stays_so(how: str) -> None:
    assert [*owners_of_views([MATRIX, OTHERS[how]], [2, COMMON], COMMON)] == []


def test_what_two_lanes_see_belongs_to_neither() -> None:
    buffers = [MATRIX, SAME["transposed"], SAME["of heads"]]
    assert [*owners_of_views(buffers, [2, 3, COMMON], COMMON)] == []
    assert [*owners_of_views(buffers, [COMMON] * 3, COMMON)] == []


@pytest.mark.parametrize("name", ["loop", "normuon", "heads"])
def test_optimizers_that_turn_matrices_are_led(name: str) -> None:
    params = [nn.Parameter(torch.ones(s)) for s in [(4, 6)] * 10 + [(6, 4)] * 10]
    optimizer = EVERY[name](params, dtype=torch.float32)
    fuseopt.compile(optimizer, eager_if_faster=False)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert fuseopt.reports()[-1].traced.startswith("2 of 20 lanes")

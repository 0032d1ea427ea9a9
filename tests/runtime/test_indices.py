"""Lanes whose indices need more than a kernel's 31 bits are refused, not wrapped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fuseopt.errors import EagerOnly
from fuseopt.runtime.triton.table import MOST_INDICES, _check_indices

FLAT = -1


def check(numel: int, geometry: list[int] | None, reduction: str = "") -> None:
    place = FLAT if geometry is None else 0
    table: Any = SimpleNamespace(
        strided=[place], start=[0, numel], geometry=geometry or []
    )
    variant: Any = SimpleNamespace(reduction=reduction)
    _check_indices(variant, table)


def test_a_flat_run_may_be_of_any_length() -> None:
    check(2**34, None)


def test_a_lane_with_geometry_may_not() -> None:
    check(MOST_INDICES - 1, [1, 8, 1])
    with pytest.raises(EagerOnly, match="is no flat run of memory"):
        check(MOST_INDICES, [1, 8, 1])


@pytest.mark.parametrize("kept", [True, False])
def test_of_rows_each_count_matters_and_not_their_product(kept: bool) -> None:
    few, many = 8, MOST_INDICES
    check(2**34, [0, 2**17, 2**17], "dims")
    with pytest.raises(EagerOnly):
        check(2**34, [0, many, few] if kept else [0, few, many], "dims")

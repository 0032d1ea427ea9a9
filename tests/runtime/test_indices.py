"""Rows and columns whose indices need more than a kernel's 31 bits are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fuseopt.codegen.triton.variant import FEW
from fuseopt.errors import EagerOnly
from fuseopt.runtime.triton.table import _check_folds


def check(results: int, elements: int, reduction: str = "dims") -> None:
    table: Any = SimpleNamespace(strided=[0], geometry=[0, results, elements])
    variant: Any = SimpleNamespace(reduction=reduction)
    _check_folds(variant, table)


def test_each_count_matters_and_not_their_product() -> None:
    check(2**17, 2**17)
    check(FEW - 1, FEW - 1)
    for few, many in ((8, FEW), (2**17, 2**40)):
        with pytest.raises(EagerOnly, match="rows or columns"):
            check(few, many)
        with pytest.raises(EagerOnly, match="rows or columns"):
            check(many, few)


def test_other_lanes_may_have_any_length() -> None:
    """Their kernels divide indices in 64 bits from 2**31 elements on."""
    check(2**40, 2**20, reduction="full")
    check(2**40, 2**20, reduction="")

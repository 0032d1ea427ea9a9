"""Optimizers written as loops from their papers: the bits of eager, in one launch."""

from __future__ import annotations

from typing import Any

import pytest
from torch.optim import Optimizer

import fuseopt
from tests.papers import ELEMENTWISE, INEXACT, REDUCING
from tests.zoo import Pair, race


def name_of(case: Any) -> str:
    return case.__name__ if isinstance(case, type) else ""


def one_launch_each() -> None:
    for report in fuseopt.reports():
        assert report.launches == 1
        assert report.externs == []
        assert not report.fallback


@pytest.mark.family(20)
@pytest.mark.parametrize(("kind", "second"), ELEMENTWISE, ids=name_of)
def test_elementwise_optimizers_are_one_launch(
    kind: type[Optimizer], second: dict[str, Any]
) -> None:
    race(Pair(kind, second, fallback="error"))
    one_launch_each()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "second", "bound"), INEXACT, ids=name_of)
def test_optimizers_with_a_function_of_a_library(
    kind: type[Optimizer], second: dict[str, Any], bound: float
) -> None:
    race(Pair(kind, second, fallback="error"), bound)
    one_launch_each()


@pytest.mark.family(6)
@pytest.mark.parametrize(("kind", "second"), REDUCING, ids=name_of)
def test_optimizers_that_reduce(kind: type[Optimizer], second: dict[str, Any]) -> None:
    race(Pair(kind, second, fallback="error"))
    # one for the elements and what their norms give, one for what needs that
    for report in fuseopt.reports():
        assert (report.launches, report.externs) == (2, []), str(report)
        assert not report.fallback

"""Eager adds up in the order in which elements lie in memory: tensors that lie in
another one than those beside them, and parameters that do so from some step on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fuseopt
from tests.numerics.test_regressions import Each
from tests.papers.reducing import LAMB
from tests.steps import differences, make_params, same_bits, set_grads, turned

SHAPES = [(33, 17), (6, 4), (5, 3, 8)]


def of_both(x: Tensor, y: Tensor) -> None:
    x.mul_(y.sum() / x.sum())


def of_rows(x: Tensor, y: Tensor) -> None:
    x.mul_(y.sum(0) / x.sum(0))


def of_norms(x: Tensor, y: Tensor) -> None:
    r = x / 2
    r.add_(y, alpha=0.05)
    x.mul_(y.norm() / r.norm())


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("update", [of_both, of_rows, of_norms])
def test_two_sums_go_each_in_an_order_of_its_own(
    update: Callable[[Tensor, Tensor], None], few: bool
) -> None:
    """Of one shape, in one lane. Each other of many lanes has but one order."""
    places = [0] if few else range(12)
    seen = 0
    for seed in range(4):
        torch.manual_seed(seed)
        xs = [torch.rand(SHAPES[k % 3]) for k in places]
        ys = [
            turned(torch.rand_like(x)) if k % 2 == 0 else torch.rand_like(x)
            for k, x in enumerate(xs)
        ]
        expected = [x.clone() for x in xs]
        straight = [x.clone() for x in xs]

        def step(xs: list[Tensor], ys: list[Tensor]) -> None:
            for x, y in zip(xs, ys, strict=True):
                update(x, y)

        step(expected, ys)
        step(straight, [y.contiguous() for y in ys])
        torch.compile(step, backend="fuseopt")(xs, ys)
        assert all(map(same_bits, xs, expected))
        seen += sum(
            not same_bits(x, y) for x, y in zip(straight, expected, strict=True)
        )
    assert seen, "the order makes no difference here"


def doubled(p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
    r = p * 2
    state["norm"] = r.norm()
    p.sub_(p.grad * group["lr"])


def begun_later(p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Two tensors of the state are new at each step, and lie as the parameter does."""
    state["before"], state["rows"] = p.clone(), p.sum(0)
    p.sub_(p.grad * group["lr"])


@pytest.mark.family(18)
@pytest.mark.parametrize("lanes", [1, 3, 24])
@pytest.mark.parametrize("way", ["own", "bound"])
@pytest.mark.parametrize("build", [doubled, begun_later, "LAMB"])
def test_parameters_that_lie_otherwise_later(build: Any, way: str, lanes: int) -> None:
    """As after `p.data = p.data.to(memory_format=...)`: sums in another order."""

    def make(params: list[Any]) -> torch.optim.Optimizer:
        return LAMB(params, 0.01) if build == "LAMB" else Each(params, build, lr=0.1)

    theirs, mine = (
        make_params([SHAPES[k % 3] for k in range(lanes)]) for _ in range(2)
    )
    plain, fast = make(theirs), make(mine)
    step: Any = fast.step
    if way == "own":
        fuseopt.compile(fast)
        step = fast.step
    else:
        step = torch.compile(step, backend="fuseopt")
    for seed in range(8):
        set_grads(theirs, mine, seed)
        if seed in (2, 5):
            for params in (theirs, mine):
                for p in params[:: 2 if seed == 2 else 1]:
                    p.data = turned(p.data)
        plain.step()
        step()
        assert differences(theirs, plain, mine, fast) == []
        for p, q in zip(theirs, mine, strict=True):
            for name, x in plain.state[p].items():
                if isinstance(x, Tensor):
                    assert x.stride() == fast.state[q][name].stride()

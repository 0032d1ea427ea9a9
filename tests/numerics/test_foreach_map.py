"""Steps that are written with `foreach_map`, beside their eager selves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import fuseopt
from tests.numerics.test_products import Pair

maps = pytest.importorskip("torch._higher_order_ops.foreach_map")


class Mapped(Optimizer):
    """One call of `body(p, g, m, lr)` for all tensors, with a momentum."""

    body: Callable[..., Any]

    def __init__(self, params: Iterable[Tensor], dtype: Any = None) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.state[p]["m"] = torch.zeros_like(p)
            lists = (
                params,
                [p.grad for p in params],
                [self.state[p]["m"] for p in params],
            )
            self.mapped(group["lr"], *lists)

    def mapped(
        self, lr: float, ps: list[Tensor], gs: list[Tensor], ms: list[Tensor]
    ) -> None:
        raise NotImplementedError


class Plain(Mapped):
    def mapped(self, lr: float, ps: Any, gs: Any, ms: Any) -> None:
        torch._foreach_copy_(ms, maps.foreach_map(lambda m, g: 0.9 * m + g, ms, gs))
        torch._foreach_copy_(ps, maps.foreach_map(lambda p, m: p - 0.1 * m, ps, ms))


class Numbers(Mapped):
    """The rate is a number of the map, and changes."""

    def mapped(self, lr: float, ps: Any, gs: Any, ms: Any) -> None:
        rates = [lr * (i + 1) for i in range(len(ps))]
        new = maps.foreach_map(lambda p, g, r: p - r * g.sign(), ps, gs, rates)
        torch._foreach_copy_(ps, new)


class Functions(Mapped):
    """A function of torch, lists that are maps' results, and one that is unused."""

    def mapped(self, lr: float, ps: Any, gs: Any, ms: Any) -> None:
        scaled = maps.foreach_map(torch.mul, gs, gs)
        maps.foreach_map(torch.neg, gs)
        roots = maps.foreach_map(lambda x: x.sqrt() + 1e-3, scaled)
        torch._foreach_copy_(ms, maps.foreach_map(torch.div, gs, roots))
        torch._foreach_sub_(ps, ms, alpha=0.01)


class Products(Mapped):
    """A product in a map is a row of a batch."""

    def mapped(self, lr: float, ps: Any, gs: Any, ms: Any) -> None:
        def turned(p: Tensor, g: Tensor) -> Tensor:
            x = g * 0.1
            return p - (x @ x.mT) @ x

        torch._foreach_copy_(ps, maps.foreach_map(turned, ps, gs))


@pytest.mark.parametrize("make", [Plain, Numbers, Functions, Products])
def test_a_map_is_the_list_of_its_calls(make: Any) -> None:
    pair = Pair(make, [(16, 24)] * 4)
    for turn in range(4):
        for optimizer in (pair.plain, pair.compiled):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + turn // 2)
        pair.run(1)
    report = pair.report
    assert report.externs == []
    if make is Products:
        assert [b.rows for b in report.batches] == [4, 4]
    else:
        assert report.launches == 1
    assert not any(r.fallback for r in fuseopt.reports()[pair.seen :])

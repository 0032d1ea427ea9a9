"""Foreach calls of mixed lists, in groups of one device and dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import symbolic_trace
from torch.utils._python_dispatch import TorchDispatchMode

import fuseopt
from fuseopt.capture.fx import lists

MIXED = [torch.float32, torch.bfloat16, torch.float32, torch.float64, torch.bfloat16]


class Foreach(TorchDispatchMode):
    """Notes the dtypes of the lists of each foreach call."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[set[torch.dtype]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if "_foreach_" in str(func):
            self.dtypes.append({x.dtype for x in args[0]})
        return func(*args, **(kwargs or {}))


def tensors() -> list[Tensor]:
    return [torch.arange(3.0 + i).to(d) for i, d in enumerate(MIXED)]


def test_results_come_in_the_order_of_the_lists() -> None:
    numbers = [2.0, 3.0, 4.0, 5.0, 6.0]
    with Foreach() as seen:
        got = lists.by_group(torch._foreach_mul, (tensors(), numbers), {})
    assert list(map(len, seen.dtypes)) == [1, 1, 1]
    want = [t * n for t, n in zip(tensors(), numbers, strict=True)]
    assert all(map(torch.equal, got, want))
    assert [t.dtype for t in got] == MIXED


def test_in_place_and_with_keywords() -> None:
    mine, others = tensors(), tensors()
    lists.by_group(torch._foreach_add_, (mine, others), {"alpha": 0.5})
    assert all(map(torch.equal, mine, (t + 0.5 * t for t in others)))


def test_one_dtype_is_one_call() -> None:
    same = [torch.ones(2), torch.ones(3)]
    with Foreach() as seen:
        lists.by_group(torch._foreach_sqrt, (same,), {})
    assert len(seen.dtypes) == 1


def step(a: Tensor, b: Tensor) -> Any:
    made = torch._foreach_mul([a, b], [2.0, 3.0])
    torch._foreach_add_(made, [a, b], alpha=2.0)
    return made


def test_a_graph_of_a_gpu_calls_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = symbolic_trace(step)
    assert lists.grouped(gm) is gm, "on the CPU the bits are the same"
    monkeypatch.setattr(lists, "_on_gpu", lambda args: True)
    a, b = torch.ones(2), torch.ones(3, dtype=torch.bfloat16)
    with Foreach() as seen:
        got = lists.grouped(gm)(a, b)
    assert list(map(len, seen.dtypes)) == [1, 1, 1, 1]
    assert all(map(torch.equal, got, gm(a, b)))


def test_verify_groups_as_an_optimizer_does() -> None:
    params = [torch.nn.Parameter(t) for t in tensors()]
    optimizer = torch.optim.AdamW(params, foreach=True)
    fuseopt.compile(optimizer, verify=True)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    with Foreach() as seen:
        optimizer.step()
    assert seen.dtypes
    assert {len(x) for x in seen.dtypes} == {1}

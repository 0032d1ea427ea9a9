"""Steps that write numbers to groups and states: what such a call costs in Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import fuseopt
from tests.frames import lines
from tests.steps import make_params, set_grads


class _Counting(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "step": 0, "past": 0.0})

    def factor(self, group: dict[str, Any], state: dict[str, Any]) -> Any:
        raise NotImplementedError

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            group["past"] = 1.0 - 0.9 ** group["step"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                    state["step"] = 0
                factor = self.factor(group, state)
                state["mean"].lerp_(p.grad, 0.1)
                p.sub_(state["mean"], alpha=group["lr"] * factor)


class OfGroup(_Counting):
    def factor(self, group: dict[str, Any], state: dict[str, Any]) -> Any:
        return group["past"]


class OfLanes(_Counting):
    def factor(self, group: dict[str, Any], state: dict[str, Any]) -> Any:
        state["step"] += 1
        return 1.0 - 0.9 ** state["step"]


class Last(_Counting):
    """Each lane has two numbers, one of which the other was before."""

    def factor(self, group: dict[str, Any], state: dict[str, Any]) -> Any:
        state["last"] = state["step"]
        state["step"] += 2
        return 1.0 / (state["step"] - state["last"])


KINDS: dict[str, tuple[Callable[[Any], Optimizer], int, int]] = {
    # lines of a call at most, and of each lane
    "group": (OfGroup, 943, 0),
    "lanes": (OfLanes, 1018, 5),
    "last": (Last, 1031, 5),
}


def steps(kind: str, n: int) -> tuple[Any, Any, list[Any], list[Any]]:
    params, others = make_params([(3, 4)] * n), make_params([(3, 4)] * n)
    mine, ref = KINDS[kind][0](params), KINDS[kind][0](others)
    fuseopt.compile(mine, fallback="error")
    for seed in range(12):
        set_grads(params, others, seed)
        mine.step()
        ref.step()
    set_grads(params, others, 12)
    return mine, ref, params, others


def states(optimizer: Optimizer, params: list[Any]) -> list[Any]:
    found = []
    for p in params:
        state = optimizer.state[p]
        found.append([p.tolist(), {k: getattr(v, "tolist", lambda v=v: v)()
                                   for k, v in state.items()}])  # fmt: skip
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_is_no_look_at_all_of_it(kind: str) -> None:
    _, most, each = KINDS[kind]
    counted: list[Counter[Any]] = []
    for n in (20, 60):
        mine, ref, params, others = steps(kind, n)
        counted.append(lines(mine.step))
        ref.step()
        assert states(mine, params) == states(ref, others)
        for a, b in zip(mine.param_groups, ref.param_groups, strict=True):
            assert {**a, "params": 0} == {**b, "params": 0}
        torch._dynamo.reset()
    few, many = counted
    assert few.total() <= most + 20 * each
    assert many.total() - few.total() <= 40 * each


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_user_stores_between_counts(kind: str) -> None:
    """In the group, in single states, a key more, and one less."""
    mine, ref, params, others = steps(kind, 20)
    changes: list[Callable[[Any, Any], None]] = [
        lambda o, p: o.param_groups[0].update(step=40),
        lambda o, p: o.state[p[3]].update(step=7),
        lambda o, p: o.param_groups[0].update(other=1.5),
        lambda o, p: o.param_groups[0].pop("other"),
        lambda o, p: o.param_groups[0].update(lr=0.05),
        lambda o, p: o.state[p[2]].update(mean=torch.ones_like(p[2])),
    ]
    for seed, change in enumerate(changes):
        change(mine, params)
        change(ref, others)
        for _ in range(2):
            set_grads(params, others, 20 + seed)
            mine.step()
            ref.step()
            assert states(mine, params) == states(ref, others)
            assert mine.param_groups[0]["step"] == ref.param_groups[0]["step"]

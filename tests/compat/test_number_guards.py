"""What a trace asks of numbers is guarded once, however many lanes ask it."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.source import LocalSource
from torch._guards import TracingContext, tracing

import fuseopt
from fuseopt.compat import hooks
from tests.frames import entered
from tests.steps import set_grads


class Branching(torch.optim.Optimizer):
    """For each parameter it asks the same of the same numbers."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if group["weight_decay"] * group["lr"] != 0:
                    p.mul_(1 - group["weight_decay"] * group["lr"])
                if group["lr"] > 0.05:
                    p.add_(p.grad, alpha=-group["lr"])
                else:
                    p.add_(p.grad, alpha=-2 * group["lr"])


def comparisons(lanes: int) -> int:
    """How many numbers guards compare in a steady tail of so many lanes; with eager's
    bits.
    """
    ours = [torch.nn.Parameter(torch.ones(3)) for _ in range(lanes)]
    theirs = [torch.nn.Parameter(torch.ones(3)) for _ in range(lanes)]
    mine, eager = Branching(ours), Branching(theirs)
    tail = fuseopt.tail(mine, fallback="error")
    for k, rate in enumerate([0.1, 0.1, 0.09, 0.01, 0.02, 0.2]):
        for optimizer in (mine, eager):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.param_groups[0]["weight_decay"] = 0.5 * (k > 3)
        set_grads(ours, theirs, k)
        tail()
        eager.step()
        assert all(map(torch.equal, ours, theirs)), rate
    set_grads(ours, theirs, 9)
    names = [code.co_filename for code in entered(tail)]
    return names.count("<a branch of a step>")


def test_a_number_of_all_lanes_is_compared_once() -> None:
    few, many = comparisons(4), comparisons(24)
    assert 0 < few == many


def test_a_guard_that_was_taken_back_is_there_again() -> None:
    with tracing(TracingContext(None)):  # type: ignore[arg-type]
        known = TracingContext.get().guards_context.dynamo_guards
        guard = hooks.guard_here(LocalSource("x"), lambda builder, guard: None)
        hooks.guard_again(guard)
        assert [*known] == [guard]
        known.inner.clear()
        hooks.guard_again(guard)
        assert [*known] == [guard]
    hooks.guard_again(None)

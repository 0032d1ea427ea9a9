"""An interrupt in the middle of Dynamo's own bookkeeping: the next trace is whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.callback import callback_handler
from torch.optim import SGD, Optimizer

import fuseopt
from fuseopt.compat.tracing import traces_step


class Reads(Optimizer):
    """Its step reads a number, which ends the graph unless Dynamo is told before."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros(())
                state["step"] += 1
                p.add_(p.grad, alpha=-0.1 / state["step"].item())


def given(make: Any) -> tuple[Optimizer, list[Any]]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(5)) for _ in range(3)]
    for p in params:
        p.grad = torch.ones_like(p)
    return make(params), params


def interrupted() -> None:
    """Compile a step, and be interrupted when Dynamo counts that it has ended."""
    opt, _ = given(lambda ps: SGD(ps, lr=0.1))
    fuseopt.compile(opt)

    def cut(_: Any) -> None:
        callback_handler.remove_end_callback(cut)
        raise KeyboardInterrupt

    callback_handler.end_callbacks.insert(0, cut)
    with pytest.raises(KeyboardInterrupt):
        opt.step()
    assert cut not in callback_handler.end_callbacks


def test_dynamo_can_be_reset() -> None:
    interrupted()
    torch._dynamo.reset()
    assert not traces_step()


def test_the_next_step_is_traced_as_any_other() -> None:
    interrupted()
    plain, theirs = given(Reads)
    opt, mine = given(Reads)
    fuseopt.compile(opt)
    for _ in range(3):
        plain.step()
        opt.step()
    assert all(map(torch.equal, mine, theirs))
    report = fuseopt.reports()[-1]
    assert not report.fallback
    assert report.launches == 1
    assert not traces_step()

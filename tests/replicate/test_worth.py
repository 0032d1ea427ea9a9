"""A step is led only where fewer models are traced than there are lanes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import fuseopt
from fuseopt.inputs.keys import LanesDiffer
from fuseopt.replicate.traces import Trace
from tests.steps import make_params, same_bits, set_grads

N = 18


class Drifts(Optimizer):
    """A step with a branch on an integer of the state, which differs between lanes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["n"] = state.get("n", 0) + 1
                if state["n"] % 3 == 2:
                    p.mul_(0.5)
                p.add_(p.grad, alpha=-group["lr"] / state["n"])


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [2, 5, 7])
def test_counters_that_drift_apart(kinds: int) -> None:
    theirs, mine = make_params([(3, 4)] * N), make_params([(3, 4)] * N)
    plain, opt = Drifts(theirs), fuseopt.compile(Drifts(mine))
    for turn in range(10):
        set_grads(theirs, mine, turn)
        if turn > 1:
            for k in range(kinds):
                plain.state[theirs[k]]["n"] += k * turn
                opt.state[mine[k]]["n"] += k * turn
        plain.step()
        opt.step()
        assert all(map(same_bits, mine, theirs)), turn
        for p, q in zip(theirs, mine, strict=True):
            assert plain.state[p] == opt.state[q]
    for report in fuseopt.reports():
        models, _, of = report.traced.partition(" of ")
        if of.startswith(f"{N} lanes"):
            assert int(models) <= N


def test_more_models_than_lanes_are_not_traced() -> None:
    lanes: Any = SimpleNamespace(params=[None] * 2)
    trace: Any = SimpleNamespace(active=(0, 1))
    Trace.check_worth(trace, lanes)
    trace.active = (0, 1, 2)
    with pytest.raises(LanesDiffer, match="3 models were to be traced for 2 lanes"):
        Trace.check_worth(trace, lanes)

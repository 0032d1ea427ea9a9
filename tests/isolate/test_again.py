"""A step that is cut where it makes its state is traced again with that state."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import fuseopt
from fuseopt.isolate.isolated import AGAIN
from tests.counts import Counts
from tests.steps import make_params, same_bits, set_grads


class KeepsItsBeginning(Optimizer):
    """As Prodigy does: what a parameter was, or one zero for all of it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "first" not in state:
                    if p.any():
                        state["first"] = p.clone()
                    else:
                        state["first"] = torch.zeros((), dtype=p.dtype)
                p.sub_(p.grad + 0.01 * (p - state["first"]), alpha=group["lr"])


class BranchesAlways(KeepsItsBeginning):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if p.any():
                    state["calls"] = state.get("calls", 0) + 1
                p.sub_(p.grad, alpha=group["lr"] / (1 + state["calls"]))


def run(kind: Any, steps: int, after: Any = lambda: None) -> None:
    shapes = [(3, 4), (5,), (2, 2)]
    theirs, mine = make_params(shapes), make_params(shapes)
    plain, opt = kind(theirs), fuseopt.compile(kind(mine))
    for seed in range(steps):
        set_grads(theirs, mine, seed)
        plain.step()
        opt.step()
        for p, q in zip(theirs, mine, strict=True):
            assert same_bits(q, p)
            assert plain.state[p].keys() == opt.state[q].keys()
        after()


@pytest.mark.filterwarnings("ignore:fuseopt. Dynamo breaks the graph")
def test_a_branch_that_makes_state_is_left_behind() -> None:
    run(KeepsItsBeginning, 4)
    assert [(r.launches, r.externs) for r in fuseopt.reports()] == [(1, [])]


def test_a_branch_that_stays_is_tried_no_more(counts: Counts) -> None:
    traces: list[int] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(BranchesAlways, 8, lambda: traces.append(counts.traces))
    assert sum("Dynamo breaks the graph" in str(w.message) for w in said) == 1
    assert traces[0] < traces[AGAIN] == traces[-1]

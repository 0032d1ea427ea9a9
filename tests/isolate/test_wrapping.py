"""Optimizers that wrap another one and do not call `Optimizer.__init__`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.optim import AdamW, Optimizer

import fuseopt
from fuseopt.errors import UnsupportedInput
from tests.steps import differences, make_params, set_grads

SHAPES = [(3, 4), (5,), (2, 3), (7,)]


class Wrapped(Optimizer):
    """Averages slow weights over an AdamW, whose groups and state it shares."""

    def __init__(self, params: Any) -> None:
        self.inner = AdamW(params, lr=0.1)
        self.defaults = self.inner.defaults
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)
        self.inner.step()
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.99)

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def state_dict(self) -> Any:
        return self.inner.state_dict()


@pytest.mark.filterwarnings("ignore:fuseopt. a tail runs in pieces:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:fuseopt. Wrapped shares its state:RuntimeWarning")
@pytest.mark.parametrize("lanes", [4, 18])
@pytest.mark.parametrize("way", ["compile", "backend", "tail"])
def test_no_hooks_are_needed(way: str, lanes: int) -> None:
    shapes = (SHAPES * lanes)[:lanes]
    theirs, mine = make_params(shapes), make_params(shapes)
    plain, opt = Wrapped(theirs), Wrapped(mine)
    step: Any = opt.step
    if way == "compile":
        step = fuseopt.compile(opt, eager_if_faster=False).step
    elif way == "backend":
        step = torch.compile(opt.step, backend="fuseopt")
    elif way == "tail":
        step = fuseopt.tail([opt])
    for turn in range(5):
        set_grads(theirs, mine, turn)
        plain.step()
        step()
        assert not differences(theirs, plain, mine, opt)
        if turn == 2:
            kept = [copy.deepcopy(x.state_dict()) for x in (plain, opt)]
            plain.load_state_dict(kept[0])
            opt.load_state_dict(kept[1])


def test_packed_state_needs_them() -> None:
    with pytest.raises(
        UnsupportedInput, match="Wrapped cannot be packed: its __init__"
    ):
        fuseopt.compile(Wrapped(make_params(SHAPES)), storage=fuseopt.Storage("8bit"))

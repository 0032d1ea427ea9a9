"""A step of packed state that an interrupt cuts off: nothing hollow is left behind."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt.offload import MasterOptimizer
from tests import ROOT
from tests.storage.reference import Params, give_grads, params_of

ROOMS = tuple(str(ROOT / "fuseopt" / room) + "/" for room in ("storage", "offload"))


class CutOff:
    """Raises KeyboardInterrupt at a line of these rooms, counted from the first."""

    def __init__(self, at: int) -> None:
        self.left = at

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(ROOMS):
            return None
        line = linecache.getline(code.co_filename, frame.f_lineno).strip()
        # a context is not left yet where a `with` reports its end; and no handler of a
        # signal runs at a line without a call
        if event == "line" and not line.startswith(("with ", "try:", "finally:")):
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.trace


def lines_of(step: Callable[[], object]) -> int:
    """The lines of these rooms that a call runs."""
    counted = CutOff(1 << 30)
    sys.settrace(counted.trace)
    try:
        step()
    finally:
        sys.settrace(None)
    return (1 << 30) - counted.left


def packed(params: Params) -> Any:
    return fuseopt.compile(torch.optim.AdamW(params), storage="bf16-stochastic")


def fp32(params: Params) -> Any:
    return MasterOptimizer(params, torch.optim.AdamW, storage="bf16")


def split(params: Params) -> Any:
    return MasterOptimizer(params, torch.optim.SGD, master="split", lr=0.1)


@pytest.mark.parametrize("make", [packed, fp32, split])
def test_an_interrupt_leaves_no_tensor_without_memory(make: Any) -> None:
    dtype = torch.float32 if make is packed else torch.bfloat16
    params = params_of(18, dtype=dtype)
    optimizer = make(params)
    for step in range(4):
        give_grads(step, params)
        optimizer.step()
    give_grads(4, params)
    n = lines_of(optimizer.step)
    assert n > 20
    keys = {id(p): [*state] for p, state in optimizer.state.items()}
    for at in range(1, n + 1):
        give_grads(4 + at, params)
        cut_off = CutOff(at)
        sys.settrace(cut_off.trace)
        try:
            optimizer.step()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        shown = optimizer.param_groups[0]["params"]
        assert all(p is q for p, q in zip(shown, params, strict=True))
        for p, state in optimizer.state.items():
            assert [*state] == keys[id(p)], f"line {at}"
            for t in state.values():
                if isinstance(t, torch.Tensor) and t.numel():
                    assert t.untyped_storage().nbytes(), f"line {at}"
        optimizer.state_dict()
    give_grads(1, params)
    optimizer.step()

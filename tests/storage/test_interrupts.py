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
from fuseopt.storage.packing import full_precision, packed_in
from tests import ROOT
from tests.storage.reference import Params, give_grads, params_of

ROOMS = (
    *(str(ROOT / "fuseopt" / room) + "/" for room in ("storage", "offload")),
    str(ROOT / "fuseopt" / "tails" / "led_packed.py"),
)


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


def blocks(params: Params) -> Any:
    make = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    return fuseopt.compile(make, storage=fuseopt.Storage("8bit/64", least=0))


class Tailed:
    """An optimizer with packed state, stepped by its tail."""

    def __init__(self, params: Params) -> None:
        self.optimizer = blocks(params)
        self.step = fuseopt.tail(self.optimizer, clip_grad_norm=1.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def fp32(params: Params) -> Any:
    return MasterOptimizer(params, torch.optim.AdamW, storage="bf16")


def split(params: Params) -> Any:
    return MasterOptimizer(params, torch.optim.SGD, master="split", lr=0.1)


def dtype_of(make: Any) -> torch.dtype:
    return torch.bfloat16 if make in (fp32, split) else torch.float32


@pytest.mark.parametrize("make", [packed, blocks, Tailed, fp32, split])
def test_an_interrupt_leaves_no_tensor_without_memory(make: Any) -> None:
    dtype = dtype_of(make)
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


def cut_off(call: Callable[[], object], at: int) -> None:
    """Call it, cut off at a line."""
    trace = CutOff(at)
    sys.settrace(trace.trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)


@pytest.mark.slow
@pytest.mark.parametrize("make", [packed, blocks])
def test_an_interrupt_of_the_first_step_leaves_whole_state(make: Any) -> None:
    """Each tensor is there once, in float32 or packed with all its parts."""

    def begun() -> Any:
        params = params_of(4)
        give_grads(0, params)
        return make(params)

    optimizer = begun()
    n = lines_of(optimizer.step)
    assert n > 20
    for at in range(1, n + 1, 3):
        optimizer = begun()
        cut_off(optimizer.step, at)
        check_whole_state(optimizer)
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()  # what was not packed is packed now
        check_whole_state(optimizer)
        assert all(any("@" in key for key in x) for x in optimizer.state.values())


@pytest.mark.parametrize("make", [packed, blocks])
def test_an_interrupt_while_state_is_loaded(make: Any) -> None:
    """The former state, the new one, or none of a parameter; never a part of one."""
    params = params_of(4)
    optimizer = make(params)
    give_grads(0, params)
    optimizer.step()
    saved = optimizer.state_dict()
    n = lines_of(lambda: optimizer.load_state_dict(saved))
    for at in range(1, n + 1):
        cut_off(lambda: optimizer.load_state_dict(saved), at)
        optimizer.load_state_dict(saved)
        check_whole_state(optimizer)
        found = optimizer.state_dict()["state"]
        assert [[*x] for x in found.values()] == [[*x] for x in saved["state"].values()]


@pytest.mark.parametrize("make", [packed, blocks])
def test_an_interrupt_while_storage_is_switched_off(make: Any) -> None:
    def begun() -> Any:
        params = params_of(4)
        optimizer = make(params)
        give_grads(0, params)
        optimizer.step()
        return optimizer

    optimizer = begun()
    n = lines_of(lambda: fuseopt.compile(optimizer))
    for at in range(1, n + 1, 2):
        optimizer = begun()
        cut_off(lambda made=optimizer: fuseopt.compile(made), at)
        check_whole_state(optimizer)
        fuseopt.compile(optimizer)
        check_whole_state(optimizer)
        assert not any("@" in key for x in optimizer.state.values() for key in x)


def check_whole_state(optimizer: Any) -> None:
    """Has each parameter with state each tensor once, with contents?"""
    for state in optimizer.state.values():
        wide = full_precision(state)  # raises where a part is missing
        assert len({*wide}) == len(wide)
        for target in packed_in(state):
            assert target not in state
        for t in state.values():
            if isinstance(t, torch.Tensor) and t.numel():
                assert t.untyped_storage().nbytes()

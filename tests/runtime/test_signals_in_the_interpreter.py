"""What a handler of a signal raises within a kernel of Triton's interpreter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch

import fuseopt
from tests import ROOT
from tests.caller_states import alike, held

pytest.importorskip("triton")


class TimeIsUp(Exception):
    """What the handler raises."""


class SignalInKernel:
    """A signal comes at the line number `place` of generated kernels."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.count = 0
        self.where = ""

    def __enter__(self) -> SignalInKernel:
        sys.settrace(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _see(self, frame: Any, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if "/triton/runtime/interpreter" not in name and "/fuseopt" not in name:
            return None
        self.count += event == "call"
        if self.count == self.place and event == "call":
            self.where = f"{frame.f_code.co_qualname} ({name}:{frame.f_lineno})"
            sys.settrace(None)
            signal.raise_signal(signal.SIGUSR1)
        return self._see


def each_place() -> None:
    """Raise at some places of the fifth step of AdamW, before, in and after kernels."""

    def handle(*_: Any) -> None:
        raise TimeIsUp

    signal.signal(signal.SIGUSR1, handle)

    def made() -> tuple[list[Any], Any]:
        drawn = torch.Generator().manual_seed(3)
        params = [torch.nn.Parameter(torch.randn(4, generator=drawn)) for _ in range(3)]
        return params, torch.optim.AdamW(params, lr=0.1)

    def step(params: list[Any], optimizer: Any, turn: int) -> None:
        drawn = torch.Generator().manual_seed(turn)
        for p in params:
            p.grad = torch.randn(4, generator=drawn)
        optimizer.step()

    def trained() -> tuple[list[Any], Any]:
        params, optimizer = made()
        fuseopt.compile(optimizer, target="triton", eager_if_faster=False)
        for turn in range(4):
            step(params, optimizer, turn)
        return params, optimizer

    params, optimizer = trained()
    assert not fuseopt.reports()[-1].fallback
    assert fuseopt.reports()[-1].kernels[0].target == "triton"
    before = held(optimizer)
    with SignalInKernel(0) as counted:
        step(params, optimizer, 4)
    after = held(optimizer)
    for share in range(1, 12):
        params, optimizer = trained()
        assert alike(held(optimizer), before)
        raised = False
        with SignalInKernel(share * counted.count // 12) as at:
            try:
                step(params, optimizer, 4)
            except TimeIsUp:
                raised = True
        if not at.where:
            assert share > 6, (at.count, counted.count)
            return
        assert raised, at.where
        now = held(optimizer)
        assert alike(now, before) or alike(now, after), at.where
        if alike(now, before):
            step(params, optimizer, 4)
            assert alike(held(optimizer), after)


@pytest.mark.slow
def test_a_signal_in_a_kernel_leaves_a_step_whole() -> None:
    code = f"import {__name__} as test; test.each_place()"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr

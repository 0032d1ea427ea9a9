"""The fixture `ptx`: "sim", whose kernels are those of a GPU."""

from __future__ import annotations

import dataclasses
from types import ModuleType

import pytest

from fuseopt.codegen.target import Source
from fuseopt.codegen.triton.kernel import TritonTarget
from fuseopt.ir.graph import Kernel
from fuseopt.runtime.triton.registry import DEVICES

from .kernels import Log, device

#: As for a torch built with it: its own powers.
CUDA = (13, 0)


@pytest.fixture
def ptx(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Log:
    """All launches of the test, which a test may change before it compiles."""
    pytest.importorskip("triton")
    log = Log()
    render = TritonTarget.render

    def rendered(target: TritonTarget, kernel: Kernel) -> Source:
        target.cuda = CUDA
        source = render(target, kernel)
        return dataclasses.replace(source, text=log.change_source(source.text))

    monkeypatch.setattr(TritonTarget, "render", rendered)
    monkeypatch.setitem(DEVICES, "sim", device(log))
    return log

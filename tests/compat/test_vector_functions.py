"""Vector functions are eager's; on processors without such, steps run in eager."""

from __future__ import annotations

import ctypes
import platform
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt.codegen.optable import symbols
from fuseopt.compat import VECTORS, has_vendor, sleef
from fuseopt.compat.libraries import torch_library
from tests.steps import make_params

FUNCTIONS = ("exp", "sigmoid", "log", "tanh", "expm1", "erf", "sin")


class Applied(torch.optim.Optimizer):
    """Writes a function of each gradient into its parameter."""

    def __init__(self, params: Any, name: str) -> None:
        super().__init__(params, {})
        self.name = name

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(getattr(torch, self.name)(p.grad))


@pytest.mark.filterwarnings("ignore:fuseopt:RuntimeWarning")
@pytest.mark.parametrize("name", [*FUNCTIONS, "square"])
def test_other_processors_run_them_in_eager(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert "riscv64" in VECTORS.probe_again()
    VECTORS.there = False
    try:
        params = make_params([(85,), (9,), (1,)])
        for n, p in enumerate(params):
            p.grad = torch.rand(p.shape, generator=torch.Generator().manual_seed(n))
        optimizer = fuseopt.compile(Applied(params, name), eager_if_faster=False)
        optimizer.step()
        for p in params:
            assert p.grad is not None
            assert torch.equal(p, getattr(torch, name)(p.grad))
        found = fuseopt.reports()[-1].fallback
        assert ("lacks vector-library" in found) == (name in FUNCTIONS), found
    finally:
        monkeypatch.undo()
        assert VECTORS.probe_again() == ""


def test_torch_exports_them_all() -> None:
    """Kernels would else call those of C's library, with other bits."""
    if not VECTORS.available():
        pytest.skip(VECTORS.missing())
    for vendor in {has_vendor(), False}:
        names = symbols(vendor, sleef)
        library = torch_library("libtorch_cpu", ctypes.CDLL)
        lacking = [x for x in names if x and not hasattr(library, x)]
        assert lacking == []
        # without MKL, erf of float32 is an ATen call
        assert names.count("") == (not vendor)

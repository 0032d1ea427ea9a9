"""Optimizers of packages that multiply and decompose matrices, with their defaults.

20 steps with missing gradients, and with matrices of zeros or NaN. Where eager raises,
the compiled step raises the same.
"""

from __future__ import annotations

import importlib
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fuseopt
from tests.numerics.test_products import SLOW, STEPS, Shapes
from tests.steps import differences

#: Some of these steps run in eager, in part or whole, which a warning reports.
pytestmark = pytest.mark.filterwarnings("ignore:fuseopt:RuntimeWarning")

NAMES = (
    "SOAP Shampoo ScalableShampoo Kron Muon AdaMuon NorMuon SPlus Conda SCION".split()
)
#: These take groups with a mark.
GROUPED = ("Muon", "AdaMuon", "NorMuon")
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SETS: dict[str, Shapes] = {
    "one": [(24, 16)],
    "whole": [(12, 20)] * 2 + [(20, 12)] * 2 + [(16, 16)] * 2,
    "led": [(12, 20)] * 8 + [(20, 12)] * 8 + [(16, 16)] * 8,
    "odd": [(1, 9)] * 2 + [(9, 1)] * 2 + [(1, 1)] * 2 + [(6, 4)] * 2,
    "many": [(8, 12)] * 20 + [(12, 8)] * 20 + [(8, 8)] * 12 + [(6, 4), (4, 6)] * 6,
}


class Pair:
    """An optimizer of pytorch_optimizer with its defaults, compiled, and its twin."""

    def __init__(self, name: str, shapes: Shapes, dtype: torch.dtype) -> None:
        package = importlib.import_module("pytorch_optimizer")
        self.sides: list[tuple[list[nn.Parameter], Any]] = []
        for _ in range(2):
            generator = torch.Generator().manual_seed(1)
            params = [
                nn.Parameter((0.1 * torch.randn(s, generator=generator)).to(dtype))
                for s in shapes
            ]
            given: Any = params
            if name in GROUPED:
                given = [{"params": params, "use_muon": True}]
            self.sides.append((params, getattr(package, name)(given)))
        self.seen = len(fuseopt.reports())
        fuseopt.compile(self.sides[1][1], eager_if_faster=False)

    def gradients(self, turn: int) -> None:
        for params, _ in self.sides:
            generator = torch.Generator().manual_seed(turn)
            for i, p in enumerate(params):
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
                if turn in (7, 13) and i % 3 == 1:
                    p.grad.zero_()
                if turn in (9, 10) and i % 4 == 2:
                    p.grad = None
                if turn == STEPS - 3 and i == 0:
                    p.grad[0, 0] = float("nan")

    def raised(self, turn: int) -> list[str]:
        """The errors of both steps, with equal random numbers."""
        found: list[str] = []
        for _, optimizer in self.sides:
            random.seed(turn)
            np.random.seed(turn)
            torch.manual_seed(turn)
            try:
                optimizer.step()
            except (RuntimeError, ValueError) as error:
                found.append(f"{type(error).__name__}: {error}")
            else:
                found.append("")
        return found

    def check(self) -> None:
        (one, plain), (two, compiled) = self.sides
        assert differences(one, plain, two, compiled) == []


@pytest.mark.parametrize(
    ("name", "dtype", "which"),
    [
        pytest.param(name, dtype, which, id=f"{name}-{str(dtype)[6:]}-{which}",
                     marks=() if name == "SOAP" and which == "one" else SLOW)
        for name in NAMES for dtype in DTYPES for which in SETS
        # a matrix of one row or column is none for these two
        if not (name in ("SCION", "Conda") and which == "odd")
    ],
)  # fmt: skip
def test_twenty_steps_of_a_package(name: str, dtype: torch.dtype, which: str) -> None:
    pair = Pair(name, SETS[which], dtype)
    for turn in range(STEPS):
        pair.gradients(turn)
        plain, compiled = pair.raised(turn)
        assert plain == compiled
        if plain:
            assert turn == STEPS - 3
            return
        pair.check()


def test_a_kernel_that_torch_lacks() -> None:
    """SOAP catches the error of `eigh`; a trace with fake tensors never raises it."""
    pair = Pair("SOAP", SETS["one"], torch.bfloat16)
    pair.gradients(0)
    assert pair.raised(0) == ["", ""]
    pair.check()
    report = fuseopt.reports()[-1]
    assert "not implemented for 'BFloat16'" in report.fallback


def test_decompositions_of_a_package_share_their_calls() -> None:
    """The bases of SOAP, which its step returns, are one call of QR for a shape."""
    pair = Pair("SOAP", SETS["whole"], torch.float32)
    for turn in range(12):
        pair.gradients(turn)
        assert pair.raised(turn) == ["", ""]
        pair.check()
    new = [r for r in fuseopt.reports()[pair.seen :] if not r.fallback]
    assert {b.op for r in new for b in r.batches} >= {"linalg_qr", "_linalg_eigh"}
    assert not any("qr" in name for r in new for name, _ in r.externs)

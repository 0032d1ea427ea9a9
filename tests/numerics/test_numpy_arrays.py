"""Arithmetic on arrays of numpy's in a step: numpy's bits, which torch's are not."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.beside import WAYS, Run, beside

MODULE = """
import numpy as np
import torch

class Drawn(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {{"lr": 0.1}})
        self.w = np.linspace(0.3, 0.9, 33, dtype=np.float32)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                a = p.grad.numpy()
                r = {read}
                self.state[p]["r"] = r
                p.add_(p.grad, alpha=-group["lr"] * r)

def build(n):
    drawn = torch.Generator().manual_seed(3)
    ps = [torch.nn.Parameter(torch.randn(33, 7, generator=drawn)) for _ in range(n)]
    return ps, Drawn(ps)
"""
READS = {
    "sum": "float(a.sum())",
    "mean": "float(a.mean())",
    "std": "float(a.std())",
    "norm": "float(np.linalg.norm(a))",
    "dot": "float(a.reshape(-1) @ a.reshape(-1))",
    "exp": "float(np.exp(a)[0, 0])",
    "power": "float((abs(a) ** 1.7)[0, 1])",
    "absolute": "float((abs(a) ** 1.7).sum())",
    "absolute of kept": "float((abs(self.w) ** 1.7).sum())",
    "absolute of turned": "float((abs(a.T) ** 1.7).sum())",
    "tanh": "float(np.tanh(a)[2, 1])",
    "product": "float((a * 0.3)[0, 0])",
    "wide": "float((a * np.float64(0.3))[0, 0])",
    "cumsum": "float(np.cumsum(a)[-1])",
    "element": "float(a[3, 2])",
    "shape": "1.0 / a.shape[0]",
    "kept": "float(self.w.sum())",
    "kept element": "float(self.w[3])",
    "item": "abs(self.w.reshape(3, 11)[1, 2].item())",
}


@pytest.mark.family(120)
@pytest.mark.parametrize("lanes", [3, 18])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", READS)
def test_arithmetic_on_arrays(name: str, way: str, lanes: int, tmp_path: Path) -> None:
    path = tmp_path / "arrays.py"
    path.write_text(MODULE.format(read=READS[name]), encoding="utf-8")

    def build(module: ModuleType) -> Run:
        ps, opt = module.build(lanes)
        return Run(module, ps, opt, lambda turn: None)

    beside(path, build, WAYS[way], 3)

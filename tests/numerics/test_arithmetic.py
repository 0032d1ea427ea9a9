"""Arithmetic of Python's numbers in a step keeps its order, and gives Python's bits."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.beside import PATHS, WAYS, Run, beside

#: Of the count n, which is an integer of a lane, of m, which is large, and of the rate.
FORMULAS = (
    *("float(n) - 1e16 + 1e16", "n + 1e16 - 1e16", "lr + 1e16 - 1e16", "(lr + 1) - 1"),
    *(
        "0.5 * m - 2.0**59 + 1",
        "m + 1.0 - m",
        "float(m) + 1 - 1",
        "n * 0.3 - 0.1 + 0.3",
    ),
    *("0.1 + n * 0.7 + 0.2", "lr - 0.1 + 0.3", "3 * lr * 0.1", "lr * 0.1 * 7 * 1.1"),
    *("n / 3 * 7", "0.1 * n * lr * 3", "lr * 3 / 3", "n * 0.3 / 0.3", "-(-lr)"),
    *(
        "lr + lr - lr",
        "lr + (-0.0) * lr",
        "(lr * lr) * 0.1 * 10",
        "lr * lr * lr",
        "-lr",
    ),
    *("(n + 1) ** 2 / (n + 1)", "float((n * 7) // 7)", "n % 3 + n", "abs(lr - 0.05)"),
    *(
        "(n - n) + 0.5",
        "lr * 0 + 0.25",
        "lr - lr + 0.5",
        "0 * lr",
        "lr + 0",
        "0.0 + lr",
    ),
    *(
        "1.0 * lr",
        "lr * -1.0 * -1.0",
        "(lr + 0.1) + 0.2",
        "0.1 + 0.2 + lr",
        "lr + n - lr",
    ),
    *("2 * lr * 0.5", "lr * 1e-300 * 1e300", "lr * 1e300 * 1e-300", "n * lr - lr * n"),
)
#: What divides by the rate, or makes an integer of it.
FINITE = ("lr / lr", "1 / (1 / lr)", "lr * lr / lr", "lr // 0.03", "int(lr * 100) / 7")
RATES = (0.1, 0.07, 0.013, 0.31, 0.0501)
ODD = (0.1, 0.3, float("inf"), float("nan"), -0.0)

FRAME = '''\
"""Formulas."""
import torch
from torch.optim import Optimizer

class Formulas(Optimizer):
    def __init__(self, params):
        super().__init__(params, dict(lr=0.1))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            lr = group["lr"]
            for p in group["params"]:
                s = self.state[p]
                if not s:
                    s["n"], s["m"] = 0, 2**60
                s["n"] += 1
                s["m"] += 1
                n, m = s["n"], s["m"]
{lines}
                p.add_(p.grad, alpha=s["f0"])

def build():
    drawn = torch.Generator().manual_seed(1)
    params = [
        torch.nn.Parameter(torch.randn(3, generator=drawn, dtype=torch.float64))
        for _ in range({lanes})
    ]
    return params, Formulas(params)
'''


@pytest.mark.family(8)
@pytest.mark.parametrize("way", PATHS)
@pytest.mark.parametrize("rates", [RATES, ODD], ids=["plain", "odd"])
@pytest.mark.parametrize("lanes", [3, 18])
def test_bits_of_python(lanes: int, rates: object, way: str, tmp_path: Path) -> None:
    formulas = FORMULAS if rates is ODD else FORMULAS + FINITE
    lines = [f"                s['f{i}'] = {x}" for i, x in enumerate(formulas)]
    path = tmp_path / "formulas.py"
    path.write_text(FRAME.format(lines="\n".join(lines), lanes=lanes))

    def build(module: ModuleType) -> Run:
        params, opt = module.build()

        def before(turn: int) -> None:
            opt.param_groups[0]["lr"] = rates[turn]  # type: ignore[index]

        return Run(module, params, opt, before)

    assert beside(path, build, WAYS[way], len(RATES)) in ("led", "whole")

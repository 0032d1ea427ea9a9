"""What a step computes in Python from numbers that move is what Python computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.beside import PATHS, WAYS, load
from tests.numerics.expressions import EXPRESSIONS

TURNS = 6
STEP = """
import bisect, collections, copy, decimal, fractions, functools, heapq, itertools
import math, operator, statistics
import torch


class Stores(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})
        self.n, self.x = 2, 0.5

    @torch.no_grad()
    def step(self):
        self.n += 1
        self.x += 1.0
        self.last = EXPRESSION
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=0.1)
"""


def stored(kind: Any, compiled: Any, lanes: int) -> list[Any]:
    """What each call has stored, as text and with types; then the parameters."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(3)) for _ in range(lanes)]
    opt = kind(params)
    step = compiled(opt)
    found: list[Any] = []
    for _ in range(TURNS):
        for p in params:
            p.grad = torch.ones(3)
        step()
        types = None
        if isinstance(opt.last, (list, tuple, dict, set)):
            types = [type(x) for x in opt.last]
        found.append((repr(opt.last), type(opt.last), types))
    return found + [p.tolist() for p in params]


@pytest.mark.family(24)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lanes", [4, 18])
@pytest.mark.parametrize("way", PATHS)
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression(expression: str, way: str, lanes: int, tmp_path: Path) -> None:
    path = tmp_path / "stores.py"
    path.write_text(STEP.replace("EXPRESSION", expression))
    module: Any = load(path)
    want = stored(module.Stores, lambda opt: opt.step, lanes)
    assert stored(module.Stores, WAYS[way], lanes) == want

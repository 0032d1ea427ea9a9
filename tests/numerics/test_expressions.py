"""What a step computes in Python from numbers that move is what Python computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.beside import WAYS, load
from tests.numerics.expressions import EXPRESSIONS

TURNS = 6
HEAD = """
import bisect, collections, copy, decimal, fractions, functools, heapq, itertools
import math, operator, statistics
import torch


class Stores(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"n": 2, "x": 0.5, "last": None})
        self.n, self.x, self.last = 2, 0.5, None

    @torch.no_grad()
    def step(self):
"""
STEPS = {
    "attribute": """
        self.n += 1
        self.x += 1.0
        self.last = EXPRESSION
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=0.1)
""",
    "group": """
        for group in self.param_groups:
            group["n"] += 1
            group["x"] += 1.0
            group["last"] = EXPRESSION
            for p in group["params"]:
                p.sub_(p.grad, alpha=0.1)
""",
    "state": """
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["n"], state["x"] = 2, 0.5
                state["n"] += 1
                state["x"] += 1.0
                state["last"] = EXPRESSION
                p.sub_(p.grad, alpha=0.1)
""",
}
#: How the expressions read their numbers.
READS = {"attribute": "self.{}", "group": "group['{}']", "state": "state['{}']"}


def described(value: Any) -> Any:
    types = None
    if isinstance(value, (list, tuple, dict, set)):
        types = [type(x) for x in value]
    return repr(value), type(value), types


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
        values = [opt.state[p].get("last") for p in params]
        values += [opt.last, opt.param_groups[0]["last"]]
        found.append([described(x) for x in values])
    return found + [p.tolist() for p in params]


@pytest.mark.family(48)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lanes", [4, 18])
@pytest.mark.parametrize(
    ("place", "way"),
    [
        ("attribute", "compile"),
        ("attribute", "inside"),
        ("group", "inside"),
        ("state", "compile"),
    ],
)
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression(
    expression: str, place: str, way: str, lanes: int, tmp_path: Path
) -> None:
    if place != "attribute":
        for name in ("n", "x"):
            read = READS[place].format(name)
            expression = expression.replace(f"self.{name}", read)
    path = tmp_path / "stores.py"
    path.write_text(HEAD + STEPS[place].replace("EXPRESSION", expression))
    module: Any = load(path)
    want = stored(module.Stores, lambda opt: opt.step, lanes)
    assert stored(module.Stores, WAYS[way], lanes) == want

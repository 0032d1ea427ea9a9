"""Indices of tensors: forms in which Python gives one, and what is done with it.

torch makes tensors of lists in an index, and no mode intercepts these. A capture
records their contents, or the step runs in eager.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.beside import WAYS, Run, beside

SOURCE = """
import numpy as np
import torch
from torch.optim import Optimizer


class Indexed(Optimizer):
    def __init__(self, params):
        super().__init__(params, {{"lr": 0.1}})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                g, s, lr = p.grad, self.state[p], group["lr"]
                n = s["n"] = s.get("n", 0) + 1
                {line}
                p.sub_(g, alpha=lr / n)
"""
#: (index, does a fused step take it?)
FORMS = [
    ("[0, 2]", True),
    ("[2, 0, 2]", True),
    ("[-1]", True),
    ("[]", True),
    ("[0, 2], 1", True),
    ("[0, 2], 1:3", True),
    ("([0, 2], [1, 3])", True),
    ("..., [0, 3]", True),
    ("None, [0, 2]", True),
    ("slice(0, 2), [1, 2]", True),
    ("(0, 1)", True),
    ("[n % 3]", True),
    ("[n % 3, 0]", True),
    ("n % 3, [1, n % 4]", True),
    ("torch.tensor([2, 0])", True),
    ("torch.tensor([n % 3])", True),
    ("np.array([0, 2])", True),
    ("torch.arange(2)", True),
    ("g.argmax(1)[:2]", True),
    ("g[:, 0].argsort()", True),
    ("[True, False, True]", False),
    ("[[0, 1], [1, 2]]", False),
    ("([[0], [2]], [0, 1])", False),
    ("[0, 1], [[0], [1]]", False),
    ("range(2)", False),
]
USES = [
    "s['kept'] = p[{0}].clone()",
    "p[{0}] = 0.5",
    "p[{0}] = n",
    "p[{0}] = lr",
    "p[{0}] = True",
    "p[{0}] += 1",
    "p[{0}] *= lr",
    "p[{0}] = p[{0}] * 2",
    "p[{0}] -= g[{0}] * n",
    "p[{0}] = torch.tensor(2.5)",
    "p[{0}] = g.sum()",
]


def judge(line: str, path: Path, lanes: int) -> str:
    path.write_text(SOURCE.format(line=line))

    def build(module: object) -> Run:
        drawn = torch.Generator().manual_seed(0)
        ps = [
            torch.nn.Parameter(torch.randn(3, 4, generator=drawn)) for _ in range(lanes)
        ]
        opt = module.Indexed(ps)  # type: ignore[attr-defined]
        return Run(module, ps, opt, lambda turn: None)  # type: ignore[arg-type]

    return beside(path, build, WAYS["compile"], 3)


@pytest.mark.family(60)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("form", "fused"), FORMS)
def test_every_use_of_an_index(
    form: str, fused: bool, use: str, tmp_path: Path
) -> None:
    found = judge(use.format(form), tmp_path / "indexed.py", 2)
    assert found.startswith("eager") != fused, found


@pytest.mark.parametrize("form", ["[0, 2]", "[n % 3, 0]", "[True, False, True]"])
def test_a_list_that_many_lanes_read(form: str, tmp_path: Path) -> None:
    """Where few lanes lead, the list is each lane's."""
    judge(f"p[{form}] *= 0.5", tmp_path / "indexed.py", 18)


def test_memory_without_contents_may_be_read(tmp_path: Path) -> None:
    """torch.empty has whatever bits, and a step may fill it."""
    line = "x = torch.empty_like(p); x.copy_(g); p.sub_(x); torch.empty(3).zero_()"
    assert judge(line, tmp_path / "indexed.py", 2) in ("led", "whole")

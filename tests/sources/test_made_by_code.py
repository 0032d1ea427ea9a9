"""Attributes and numbers that a user's code makes: that code runs as often as in eager.

Dynamo traces a property twice where a step tests for it, and its guard runs it at each
call. It makes a number of a class without the operators that the class defines.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fuseopt.compat.attributes import WRITES
from tests.beside import WAYS, Run, beside

SOURCE = """
import functools
import torch
from torch.optim import Optimizer


class Count(int):
    {count}


class Helper:
    {helper}


class Made(Optimizer):
    {members}

    def __init__(self, params):
        super().__init__(params, {{"lr": 0.1}})
        self.n, self.x = 1, Helper()

    @torch.no_grad()
    def step(self, closure=None):
        self.n = self.n + 1
        for group in self.param_groups:
            for p in group["params"]:
                s = self.state[p]
                rate = {read}
                p.add_(p.grad, alpha=-group["lr"] * rate / self.n)
"""
#: Each counts how often it runs.
COUNTED = "self.__dict__['ran'] = self.__dict__.get('ran', 0) + 1"
PROPERTY = f"@property\n    def rate(self): {COUNTED}; return 1 / self.ran"
STORED = """def rate(self):
        self.ran = getattr(self, "ran", 0) + 1
        return 1 / self.ran
    rate = property(rate)"""
GETATTR = f"""def __getattr__(self, name):
        if name != "rate": raise AttributeError(name)
        {COUNTED}
        return 1 / self.__dict__["ran"]"""
GETATTRIBUTE = f"""def __getattribute__(self, name):
        if name != "rate": return super().__getattribute__(name)
        {COUNTED}
        return 1 / self.ran"""
DESCRIPTOR = f"""class Rate:
        def __get__(_, self, kind=None):
            {COUNTED}
            return 1 / self.ran
    rate = Rate()"""
SETATTR = f"""def __setattr__(self, name, value):
        {COUNTED}
        super().__setattr__(name, value)"""
DELATTR = f"""def __delattr__(self, name):
        {COUNTED}
        super().__delattr__(name)"""
READS = {
    "read": "{x}.rate",
    "default": "getattr({x}, 'rate', 1.0)",
    "tested": "({x}.rate if hasattr({x}, 'rate') else 1.0)",
    "missing": "getattr({x}, 'other', 1.0)",
}
MEMBERS = {
    "property": PROPERTY,
    "stored": STORED,
    "getattr": GETATTR,
    "getattribute": GETATTRIBUTE,
    "descriptor": DESCRIPTOR,
}


def judge(path: Path, way: str, lanes: int = 3, **parts: str) -> str:
    given = {"count": "pass", "helper": "pass", "members": "pass", "read": "1.0"}
    path.write_text(SOURCE.format(**{**given, **parts}))

    def build(module: object) -> Run:
        drawn = torch.Generator().manual_seed(0)
        ps = [torch.nn.Parameter(torch.randn(5, generator=drawn)) for _ in range(lanes)]
        opt = module.Made(ps)  # type: ignore[attr-defined]
        return Run(module, ps, opt, lambda turn: None)  # type: ignore[arg-type]

    return beside(path, build, WAYS[way], 4)


@pytest.mark.family(16)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("kind", MEMBERS)
@pytest.mark.parametrize("place", ["members", "helper"])
def test_attributes_that_code_makes(
    place: str, kind: str, read: str, way: str, tmp_path: Path
) -> None:
    expression = READS[read].format(x="self" if place == "members" else "self.x")
    parts = {place: MEMBERS[kind], "read": expression}
    judge(tmp_path / "made.py", way, **parts)


@pytest.mark.parametrize("hook", [SETATTR, DELATTR])
def test_hooks_of_an_optimizer_s_attributes(hook: str, tmp_path: Path) -> None:
    """They run in eager, and leave no capability switched off for others."""
    read = "(setattr(self, 'q', 1.0), self.q, delattr(self, 'q'))[1]"
    found = judge(tmp_path / "made.py", "backend", members=hook, read=read)
    assert "which Dynamo does not follow" in found
    assert WRITES.available()
    assert judge(tmp_path / "plain.py", "compile") == "whole"


#: What runs where `t` is set; `put` sets it.
SETTERS = {
    "property": """@property
    def t(self): return self.kept
    @t.setter
    def t(self, value): self.kept = min(value, 3)""",
    "counting property": f"""@property
    def t(self): return self.kept
    @t.setter
    def t(self, value):
        self.kept = min(value, 3)
        {COUNTED}""",
    "descriptor": """class T:
        def __get__(_, self, kind=None): return self.kept
        def __set__(_, self, value): self.kept = min(value, 3)
    t = T()""",
    "slot": '__slots__ = ("t",)',
    "default of the class": "t = 0",
}
PUT = """
    def put(self):
        self.t = getattr(self, "k", 0) + 1
        self.k = self.t
        return 1 / self.t"""


@pytest.mark.family(10)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", ["members", "helper"])
@pytest.mark.parametrize("kind", SETTERS)
def test_setters(kind: str, place: str, way: str, tmp_path: Path) -> None:
    """They leave no capability switched off for others."""
    read = "self.put()" if place == "members" else "self.x.put()"
    judge(tmp_path / "made.py", way, read=read, **{place: SETTERS[kind] + PUT})
    assert WRITES.available()


@pytest.mark.parametrize(
    "made", ["s.__setitem__('n', Count(s.get('n', 0) + 1))", "Count(2)"]
)
@pytest.mark.parametrize(
    "count",
    [
        "def __rtruediv__(self, x): return x / (int(self) + 1)",
        "def __rmul__(self, x): return x * (int(self) + 1)",
        "def __float__(self): return int(self) + 0.5",
        "def __bool__(self): return int(self) % 2 == 0",
        "def __lt__(self, x): return int(self) % 2 == 0",
    ],
)
@pytest.mark.parametrize("way", ["compile", "inside"])
@pytest.mark.family(5)
def test_numbers_with_operators_that_a_step_makes(
    way: str, count: str, made: str, tmp_path: Path
) -> None:
    number = f"({made}, s.get('n') or Count(3))[1]"
    read = f"(lambda n: 1.0 / n + 2.0 * n + float(n) + bool(n) + (n < 3))({number})"
    found = judge(tmp_path / "made.py", way, count=count, read=read)
    assert found.startswith("eager"), found

"""Traps: optimizers whose lanes look alike and are not. Nothing differs from eager.

Each class of the folder `traps` is stepped beside a plain twin while a user changes one
lane, a table, the memory of a tensor. A step may be led, traced whole or run in eager;
it may be refused before it has written anything. It may not differ, whatever Dynamo
alone makes of it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.beside import WAYS, Run, beside, dynamo

HOME = Path(__file__).parent / "traps"
MODULES = (
    *("around", "asking", "attributes", "between", "calls", "choices", "elsewhere"),
    *("lists", "memory", "numbers", "tables"),
)


def traps() -> Iterator[str]:
    """Names of all traps: module.Class."""
    for name in MODULES:
        module = importlib.import_module(f"tests.uniformity.traps.{name}")
        for kind in vars(module).values():
            if getattr(kind, "__module__", "") == module.__name__:
                if hasattr(kind, "turns"):
                    yield f"{name}.{kind.__name__}"


TRAPS = sorted(traps())


def judge(trap: str, way: Any) -> str:
    """What became of a trap's steps. Raises Silent, Loud."""
    name, _, kind = trap.partition(".")

    def build(module: ModuleType) -> Run:
        cls = getattr(module, kind)
        ps = cls.params()
        opt = cls(ps)
        return Run(module, ps, opt, functools.partial(opt_before, opt, ps))

    def opt_before(opt: Any, ps: list[Any], turn: int) -> None:
        opt.before(turn, ps)

    known = importlib.import_module(f"tests.uniformity.traps.{name}")
    found = beside(HOME / f"{name}.py", build, way, getattr(known, kind).turns)
    if found == "dynamo" and way is not dynamo:
        assert judge(trap, dynamo) == "dynamo", "it raises what Dynamo alone does not"
    return found


@pytest.mark.family(360)
@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize(
    "way",
    [
        "compile",
        *(pytest.param(w, marks=pytest.mark.slow) for w in WAYS if w != "compile"),
    ],
)
def test_trap(trap: str, way: str) -> None:
    judge(trap, WAYS[way])


def test_there_are_many() -> None:
    assert len(TRAPS) >= 240

"""Each scenario is eager's with few parameters and with many, both ways in.

A scenario is a class in the modules of this room. A plain twin and a compiled one, each
of a module of its own, take the same steps; after each of them all that either holds
has the same bits, and both raised the same error or none. A fallback is reported.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import Optimizer

from tests.beside import WAYS, Loud, Run, Silent, load, outcome, plain, quiet
from tests.cases.base import Ring
from tests.frozen import Freezer, unlike

HOME = Path(__file__).parent
MODULES = (
    *("aliased", "around", "counted", "counters", "dropped", "grouped", "left"),
    *("made", "moved", "orders", "proofs", "replaced", "shared", "spent", "stated"),
    *("walks", "typed", "weak", "written"),
)
#: Few parameters and many: below 16 all are traced, from there on a few lead.
FEW, MANY = (4, 6), (18, 34)


def scenarios() -> Iterator[str]:
    """Names of all scenarios: module.Class."""
    for name in MODULES:
        module = importlib.import_module(f"tests.cases.{name}")
        for kind in vars(module).values():
            if getattr(kind, "__module__", "") == module.__name__:
                if hasattr(kind, "turns") and not vars(kind).get("abstract"):
                    yield f"{name}.{kind.__name__}"


SCENARIOS = sorted(scenarios())
WAYS_IN = ("compile", "backend")
#: A scenario is first run with few and with many, each way in; all sizes take turns.
CASES = [
    (name, lanes, WAYS_IN[(n // 4 + k) % 2])
    for n, name in enumerate(SCENARIOS)
    for k, lanes in enumerate((FEW[n % 2], MANY[n // 2 % 2]))
]
#: The other sizes, and these sizes the other way in.
OTHERS = [
    case
    for case in itertools.product(SCENARIOS, (*FEW, *MANY), WAYS_IN)
    if case not in CASES
]


class ScenarioRun(Run):
    """A run whose generators begin anew with each step."""

    turn = 0

    def take(self) -> Exception | None:
        module: Any = self.module
        random.seed(self.turn)
        np.random.seed(self.turn)
        torch.manual_seed(self.turn)
        with self.opt.around(self.turn):
            error = super().take()
        module.LEFT = Freezer(self.ps).value(self.opt.after())
        module.DRAWN = (
            torch.get_rng_state(),
            random.getstate(),
            str(np.random.get_state()),
        )
        self.turn += 1
        return error


def built(module: ModuleType, kind: str, lanes: int) -> ScenarioRun:
    cls = getattr(module, kind)
    ps = Ring(cls.params(lanes))
    opt = cls(list(ps))
    return ScenarioRun(module, ps, opt, lambda turn: opt.before(turn, ps))


def judge(name: str, lanes: int, way: Any) -> str:
    """What became of a scenario's steps. Raises Silent, Loud."""
    home, _, kind = name.partition(".")
    known = getattr(importlib.import_module(f"tests.cases.{home}"), kind)
    with quiet(), ExitStack() as after:
        after.callback(known.undo)
        runs = []
        for how in (plain, way):
            module = load(HOME / f"{home}.py")
            after.callback(sys.modules.pop, module.__name__)
            runs.append(built(module, kind, lanes))
            runs[-1].step = how(runs[-1].opt)
        twin, mine = runs
        for turn in range(known.turns):
            assert not mine.prepare(turn)
            assert not twin.prepare(turn)
            want, got = twin.take(), mine.take()
            if type(got) is not type(want):
                raise Loud(f"step {turn} raised {got!r}, in eager {want!r}") from got
            for what in unlike(mine.frozen(), twin.frozen()):
                raise Silent(f"after step {turn} ({outcome()}): {what}")
        return outcome()


@pytest.mark.family(90)
@pytest.mark.parametrize(("name", "lanes", "way"), CASES)
def test_scenario(name: str, lanes: int, way: str) -> None:
    assert "Dynamo gave no graph" not in judge(name, lanes, WAYS[way])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lanes", "way"), OTHERS)
def test_scenario_of_another_size_or_way(name: str, lanes: int, way: str) -> None:
    assert "Dynamo gave no graph" not in judge(name, lanes, WAYS[way])


def bent(opt: Optimizer, turn: int) -> Any:
    """A step that forgets one lane at one turn."""
    taken = iter(range(99))

    def step() -> None:
        p = opt.param_groups[0]["params"][-1]
        before = p.detach().clone()
        opt.step()
        if next(taken) == turn:
            p.data.copy_(before)

    return step


@pytest.mark.parametrize("way", WAYS_IN)
@pytest.mark.parametrize(
    ("name", "lanes"),
    [
        ("aliased.GroupInAttribute", 4),
        ("aliased.StateInAttribute", 18),
        ("left.OfClass", 4),
        ("left.KeptGenerator", 4),
        ("left.Finalizer", 4),
        ("left.ArrayOfState", 4),
        ("made.DrawBySize", 4),
        ("made.DrawByRate", 18),
        ("made.FullBySize", 4),
        ("made.LineTwice", 4),
        ("stated.StateRange", 4),
    ],
)
def test_what_was_wrong_once(name: str, lanes: int, way: str) -> None:
    judge(name, lanes, WAYS[way])


@pytest.mark.parametrize("turn", [0, 5])
def test_one_lane_that_differs_is_found(turn: int) -> None:
    with pytest.raises(Silent, match=f"after step {turn}"):
        judge("counters.CountFloat", 4, functools.partial(bent, turn=turn))


def test_there_are_many() -> None:
    assert len(SCENARIOS) >= 265

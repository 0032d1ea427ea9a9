"""Whatever Python hands a step: the number of each step is eager's, or eager runs.

A step reads one source (see table.py and holders.py): once a step, in each lane, beside
a tensor, or to keep it. Another run of it in eager has a source of its own, or begins
from the same state of what both share. After each step all that either holds is the
same, and so is the state of the source. Of clocks and the like each number lies between
what they said before the step and after it.
"""

from __future__ import annotations

import contextlib
import decimal
import gc
import math
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.beside import WAYS, Run, beside, load, quiet
from tests.frozen import Freezer
from tests.sources.modules import BODIES, SOURCES, text

TURNS = 4


#: When what a step reads moves: before each step, before those after the second, never.
#: The number of the step that is told to the source.
MOVES: dict[str, Callable[[int], int]] = {
    "each": lambda turn: turn,
    "later": lambda turn: turn if turn > 1 else 0,
    "never": lambda turn: 0,
}


class SourceRun(Run):
    """A run that notes what its source holds after each step."""

    turn = 0
    moves = "each"

    def take(self) -> Exception | None:
        module: Any = self.module
        module._begin(self.opt, MOVES[self.moves](self.turn))
        error = super().take()
        self.turn += 1
        if error is None:
            module.LEFT = Freezer(self.ps).value(module._left(self.opt))
        return error


def _built(
    module: Any, lanes: int, dtype: torch.dtype, moves: str = "each"
) -> SourceRun:
    ps, opt = module._build(lanes, dtype)
    module.LEFT = None

    def before(turn: int) -> None:
        if turn == 0 or MOVES[moves](turn):
            module._before(opt, turn)

    run = SourceRun(module, ps, opt, before)
    run.moves = moves
    return run


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """What is one in a process is as before after this."""
    generators = random.getstate(), np.random.get_state(), torch.get_rng_state()
    limits = sys.getrecursionlimit(), sys.getswitchinterval()
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    precision, environ = decimal.getcontext().prec, dict(os.environ)
    name, tau = threading.current_thread().name, math.tau
    try:
        yield
    finally:
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        torch.set_rng_state(generators[2])
        sys.setrecursionlimit(limits[0])
        sys.setswitchinterval(limits[1])
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        decimal.getcontext().prec = precision
        os.environ.clear()
        os.environ.update(environ)
        threading.current_thread().name = name
        math.tau = tau
        gc.enable()
        sys.modules.pop("fuseopt_test_x", None)


def judge(
    name: str, where: str, lanes: int, way: Any, folder: Path, moves: str = "each"
) -> str:
    """What became of the step. Raises Silent, Loud."""
    path = folder / f"{name.replace('-', '_')}_{where}.py"
    path.write_text(text(name, where))
    with kept():
        if SOURCES[name].live:
            return _alone(path, name, lanes, way)
        found = beside(
            path, lambda m: _built(m, lanes, torch.float32, moves), way, TURNS
        )
        assert "Dynamo gave no graph" not in found, "nobody says that it runs in eager"
        return found


def _alone(path: Path, name: str, lanes: int, way: Any) -> str:
    """A step that reads what no other run can read again."""
    with quiet():
        module: ModuleType = load(path)
        run = _built(module, lanes, torch.float64)
        run.step = way(run.opt)
        seen = set()
        for turn in range(TURNS):
            run.prepare(turn)
            for p in run.ps:
                p.grad = torch.full_like(p, -8.0)  # at a rate of 1/8, it adds r
                p.detach().zero_()
            low, _ = module._bounds(run.opt)
            error = run.take()
            _, high = module._bounds(run.opt)
            if error is not None:
                raise error
            for p in run.ps:
                r = p[0].item()
                assert SOURCES[name].fresh or low - 1e-6 <= r <= high + 1e-6, (
                    f"step {turn}: {r} is not within {low} and {high}"
                )
            if SOURCES[name].fresh:
                assert r not in seen, f"step {turn} has the number of another: {r}"
            seen.add(r)
        return "live"


#: A few of the kinds that were wrong once.
QUICK = ("object-random", "defaultdict-counts", "dict-missing", "module-getattr", "id")


@pytest.mark.parametrize("name", QUICK)
def test_a_source_that_was_wrong_once(name: str, tmp_path: Path) -> None:
    judge(name, "once", 18, WAYS["compile"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [4, 18])
@pytest.mark.parametrize("way", ["compile"])
@pytest.mark.parametrize("where", BODIES)
@pytest.mark.parametrize("name", SOURCES)
def test_source(name: str, where: str, way: str, lanes: int, tmp_path: Path) -> None:
    if where in ("tensor", "kept") and SOURCES[name].live:
        pytest.skip("no two runs of it are alike")
    judge(name, where, lanes, WAYS[way], tmp_path)


#: What the user moves between steps, and does not move by being read.
MOVED = [
    name
    for name, source in SOURCES.items()
    if not source.live and (source.before, source.begin) != ("pass", "pass")
]


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [4, 18])
@pytest.mark.parametrize("moves", ["later", "never"])
@pytest.mark.parametrize("name", MOVED)
def test_source_that_rests(name: str, moves: str, lanes: int, tmp_path: Path) -> None:
    judge(name, "once", lanes, WAYS["compile"], tmp_path, moves)


def test_there_are_many() -> None:
    assert len(SOURCES) >= 150
    assert len(MOVED) >= 40

"""Whatever hangs on an optimizer, before its first step or later, its steps have the
bits of eager; and what was compiled runs again once that is removed.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import fuseopt
from fuseopt.compiler.session import COMPILED
from tests import beside
from tests.frozen import frozen, unlike
from tests.hung import Plain, cases

CASES = cases()
#: The parameters are in two groups; of 16 and more, a few lead.
SIZES = (4, 6, 18, 34)
WAYS = ("compile", "backend")
NOTHING = types.ModuleType("nothing")
#: The steps before which it is hung, and how many later it is removed.
LATER, GONE, STEPS = 2, 3, 8
#: Few parameters and many, from the first step on or later; all sizes and both ways in
#: take turns.
TABLE = [
    (name, SIZES[k % 2 + many], WAYS[(k // 2 + (many + when) // 2) % 2], when)
    for k, name in enumerate(CASES)
    for many in (0, 2)
    for when in (LATER, 0)
    if when or not name.startswith(("state", "beside state"))
]


class Counts(Optimizer):
    """A step with a branch on an integer of the state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["n"], state["m"] = 0, torch.zeros_like(p)
                state["n"] += 1
                state["m"].lerp_(p.grad, 0.1)
                p.add_(state["m"], alpha=-group["lr"] / state["n"])


def build(kind: Any, size: int) -> beside.Run:
    drawn = torch.Generator().manual_seed(0)
    ps = [torch.nn.Parameter(torch.randn(3, 4, generator=drawn)) for _ in range(size)]
    groups = [{"params": ps[: size // 2]}, {"params": ps[size // 2 :]}]
    return beside.Run(NOTHING, ps, kind(groups), lambda turn: None)


def held(run: beside.Run) -> dict[str, Any]:
    return frozen(NOTHING, run.opt, run.ps)


def check(
    kind: Any, size: int, way: str, hang: Callable[[Any], Any], when: int
) -> beside.Run:
    """Step twice, plain and compiled, while something hangs on both."""
    twin, mine = build(kind, size), build(kind, size)
    twin.step, mine.step = twin.opt.step, beside.WAYS[way](mine.opt)
    compare(twin, mine, hang, when)
    return mine


def compare(
    twin: beside.Run, mine: beside.Run, hang: Callable[[Any], Any], when: int
) -> None:
    """Step both, plain and compiled, while something hangs on them."""
    undo: list[Callable[[], object]] = []
    for turn in range(STEPS):
        for run in (twin, mine):
            run.prepare(turn)
            if turn == when:
                undo.append(hang(run.opt))
            if turn == when + GONE:
                undo.pop(0)()
        before = held(mine)
        want, got = twin.take(), mine.take()
        assert type(got) is type(want), f"step {turn}: {got!r}, in eager {want!r}"
        if want is None:
            assert not [*unlike(held(mine), held(twin))], f"step {turn}"
            continue
        # nothing is written, or what eager's step writes before it raises
        wanted = held(twin) if [*unlike(held(mine), before)] else before
        assert not [*unlike(held(mine), wanted)], f"step {turn} has written"
        if [*unlike(held(twin), before)]:
            break  # eager's step is done in part


def runs_as_before(run: beside.Run) -> bool:
    """Is the step led, or traced on a shadow?"""
    step = run.opt.step if hasattr(run.opt.step, COMPILED) else run.step
    isolated = getattr(step, COMPILED)
    led, whole = isolated.leader, isolated.whole
    return led.wants(run.opt) or not (whole.refusal and whole.keeps_out(run.opt))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "way", "when"), TABLE)
def test_what_hangs_on_an_optimizer(name: str, size: int, way: str, when: int) -> None:
    with beside.quiet():
        check(torch.optim.AdamW, size, way, CASES[name], when)


QUICK = (
    "attribute: scheduler",
    "group: enum",
    "state: deque",
    "defaults: own dict",
    "params: tuple",
    "params: iterator",
    "group: ordered",
)


@pytest.mark.family(6)
@pytest.mark.parametrize("name", QUICK)
def test_it_runs_as_before_once_that_is_removed(name: str) -> None:
    with beside.quiet():
        run = check(torch.optim.AdamW, 4, "compile", CASES[name], LATER)
        assert runs_as_before(run)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.optim.AdamW, Counts])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [*QUICK, "list: object", "params: none within"])
def test_a_step_of_any_kind_runs_as_before(name: str, size: int, kind: Any) -> None:
    with beside.quiet():
        run = check(kind, size, "compile", CASES[name], LATER)
        assert runs_as_before(run)


@pytest.mark.parametrize("size", [4, pytest.param(18, marks=pytest.mark.slow)])
def test_what_comes_and_goes_is_compiled_twice(size: int) -> None:
    """Once with it, once without."""
    with beside.quiet():
        twin, mine = build(torch.optim.AdamW, size), build(torch.optim.AdamW, size)
        twin.step, mine.step = twin.opt.step, beside.apart(mine.opt)
        for turn in range(10):
            for run in (twin, mine):
                run.prepare(turn)
                if turn % 2:
                    run.opt.note = Plain()
                elif turn:
                    del run.opt.note
                run.step()
            assert not [*unlike(held(mine), held(twin))]
        traces = {r.traced for r in fuseopt.reports()}
        assert len(fuseopt.reports()) <= len(traces) + 1


def test_one_thing_after_another() -> None:
    """Each is hung while the last one still hangs."""
    names = [name for name in CASES if name.startswith("attribute: ")][:12]
    with beside.quiet():
        twin, mine = build(torch.optim.AdamW, 4), build(torch.optim.AdamW, 4)
        twin.step, mine.step = twin.opt.step, beside.apart(mine.opt)
        for turn, name in enumerate(names):
            for run in (twin, mine):
                run.prepare(turn)
                setattr(run.opt, f"hung_{turn}", CASES[name])
                if turn % 3 == 2:
                    delattr(run.opt, f"hung_{turn - 2}")
                CASES[name](run.opt)
                run.step()
            assert not [*unlike(held(mine), held(twin))], name

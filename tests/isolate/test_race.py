"""Where eager is faster than a compiled step, it runs, and the user is told."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt.compiler.report import KernelReport, Report
from fuseopt.config import Config
from fuseopt.isolate import race
from fuseopt.isolate.race import CLEAR_ROUNDS, ROUNDS, WARM, Race, may_race
from tests.steps import differences, make, make_params, set_grads

SMALL = Report(1, [KernelReport("kernel0", "cpp", "", 1, 1, 10, 120, 12.0)])


class Clock:
    """Of compiled and of eager calls, in turns of two: how long each takes."""

    def __init__(self, compiled: float, eager: float) -> None:
        self.now = 0.0
        self.takes = {"compiled": compiled, "eager": eager}
        self.ways: list[str] = []

    def call(self, way: str) -> Callable[[], str]:
        def call() -> str:
            self.now += self.takes[way]
            self.ways.append(way)
            return way

        return call


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], Clock]:
    def make(compiled: float, eager: float) -> Clock:
        clock = Clock(compiled, eager)
        monkeypatch.setattr(
            race, "time", SimpleNamespace(perf_counter=lambda: clock.now)
        )
        return clock

    return make


def run(raced: Race, clock: Clock, reports: list[Report]) -> None:
    compiled, eager = clock.call("compiled"), clock.call("eager")
    while not raced.over:
        raced.step(compiled, eager, reports, lambda: True)


def test_eager_wins_after_all_rounds(timed: Any) -> None:
    raced, clock = Race(), timed(1.0, 0.85)
    run(raced, clock, [SMALL])
    assert raced.lost
    # the first call has compiled something
    n = 1 + WARM + 4 * ROUNDS
    assert len(clock.ways) == n
    assert clock.ways.count("eager") == 2 * ROUNDS
    assert str(raced) == "1000.00 ms compiled, 850.00 in eager"


def test_a_draw_is_the_compiled_steps(timed: Any) -> None:
    raced = Race()
    run(raced, timed(1.0, 1.0), [SMALL])
    assert not raced.lost


def test_a_little_slower_than_eager_has_lost(timed: Any) -> None:
    raced = Race()
    run(raced, timed(1.0, 0.98), [SMALL])
    assert raced.lost


def test_a_clear_race_ends_after_few_rounds(timed: Any) -> None:
    raced, clock = Race(), timed(1.0, 2.0)
    run(raced, clock, [SMALL])
    assert not raced.lost
    assert clock.ways.count("eager") == 2 * CLEAR_ROUNDS


def test_one_slow_call_of_eager_does_not_decide_a_race(timed: Any) -> None:
    raced, clock = Race(), timed(1.0, 0.8)
    late = clock.call("eager")
    slow = [True, True]  # of a round, the first of which is not timed

    def eager() -> None:
        late()
        if slow:
            slow.pop()
            clock.now += 2.0

    for _ in range(1 + WARM + 4 * ROUNDS):
        if not raced.over:
            raced.step(clock.call("compiled"), eager, [SMALL], lambda: True)
    assert raced.lost


def test_a_call_that_compiles_begins_it_anew(timed: Any) -> None:
    raced, clock, reports = Race(), timed(1.0, 2.0), [SMALL]
    compiled, eager = clock.call("compiled"), clock.call("eager")

    def compiles() -> None:
        compiled()
        reports.append(SMALL)

    for _ in range(1 + WARM):
        raced.step(compiled, eager, reports, lambda: True)
    raced.step(compiles, eager, reports, lambda: True)
    clock.ways.clear()
    run(raced, clock, reports)
    assert clock.ways.index("eager") == WARM + 2


@pytest.mark.parametrize(
    ("change", "may"),
    [
        ({}, True),
        ({"config": Config(eager_if_faster=False)}, False),
        ({"config": Config(numerics="fast")}, False),
        ({"config": Config(verify=True)}, False),
        ({"fused": True}, False),
        ({"capturable": True}, False),
        ({"reports": []}, False),
        ({"reports": [Report(fallback="eager")]}, False),
        ({"reports": [SMALL, Report(fallback="eager")]}, True),
        ({"bytes": 1 << 40}, True),
        ({"externs": [("aten.mm", "a product")]}, True),
    ],
    ids=str,
)
def test_which_steps_are_raced(change: dict[str, Any], may: bool) -> None:
    opt = torch.optim.AdamW(make_params([(3,)] * 2))
    kernel = KernelReport(
        "kernel0", "cpp", "", 1, 1, 10, change.get("bytes", 120), 12.0
    )
    report = Report(1, [kernel], externs=change.get("externs", []))
    for name in ("fused", "capturable"):
        opt.param_groups[0][name] = change.get(name, False)
    config = change.get("config", Config())
    assert may_race(opt, config, change.get("reports", [report])) is may


def test_a_subclass_is_not_raced() -> None:
    class Own(torch.nn.Parameter):
        pass

    opt = torch.optim.SGD([Own(torch.zeros(3))])
    assert not may_race(opt, Config(), [SMALL])


# ---------------------------------------------------------------- a user's optimizer


class Pair:
    """An optimizer in eager and one that is raced; `clock` says who wins."""

    def __init__(
        self, kind: str, lanes: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shapes = [(3, 4), (5,)] * lanes
        self.theirs, self.mine = make_params(shapes), make_params(shapes)
        self.plain = make(kind, self.theirs, reference=True)
        self.opt = fuseopt.compile(make(kind, self.mine), eager_if_faster=True)
        self.seed = 0
        step = Race.step

        def timed(raced: Race, compiled: Any, eager: Any, *rest: Any) -> Any:
            def counted(way: str, call: Any) -> Any:
                return lambda: (clock.call(way)(), call())[1]

            ways = counted("compiled", compiled), counted("eager", eager)
            return step(raced, *ways, *rest)

        monkeypatch.setattr(Race, "step", timed)

    def step(self, n: int) -> None:
        for _ in range(n):
            self.seed += 1
            set_grads(self.theirs, self.mine, self.seed)
            self.plain.step()
            self.opt.step()
            assert differences(self.theirs, self.plain, self.mine, self.opt) == []

    def grow(self) -> None:
        for params, opt in ((self.theirs, self.plain), (self.mine, self.opt)):
            more = make_params([(6,)])
            opt.add_param_group({"params": more})
            params += more


ALL = 2 * (1 + WARM) + 4 * ROUNDS


@pytest.mark.family(4)
@pytest.mark.parametrize("lanes", [4, 20], ids=["whole", "led"])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_a_race_that_is_lost(
    kind: str, lanes: int, timed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = timed(3.0, 1.0)
    pair = Pair(kind, lanes, clock, monkeypatch)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        pair.step(ALL)
    why = "it is faster there: 3000.00 ms compiled, 1000.00 in eager"
    told = [str(w.message) for w in said if "fuseopt" in str(w.message)]
    assert told == [f"fuseopt: {kind}.step runs in eager: {why}."]
    assert fuseopt.reports()[-1].fallback == f"It runs in eager: {why}"
    assert clock.ways.count("eager") == 2 * ROUNDS
    calls = len(clock.ways)
    pair.step(2)
    assert len(clock.ways) == calls
    # another group: another race
    pair.grow()
    pair.step(2)
    assert clock.ways[calls:] == ["compiled"] * 2


def test_a_race_that_is_won(timed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = timed(1.0, 3.0)
    pair = Pair("AdamW", 20, clock, monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair.step(ALL)
    assert clock.ways.count("eager") == 2 * CLEAR_ROUNDS
    assert not any(r.fallback for r in fuseopt.reports())


@pytest.mark.parametrize(
    "given",
    [
        {"fullgraph": True},
        {"options": {"fallback": "error"}},
        {"options": {"target": "cpp"}},
        {"options": {"eager_if_faster": False}},
    ],
    ids=str,
)
def test_who_wants_no_eager_step_gets_none(
    given: dict[str, Any], timed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEOPT_EAGER_IF_FASTER", "1")
    clock = timed(3.0, 1.0)
    pair = Pair("SGD", 4, clock, monkeypatch)
    pair.opt = make("SGD", pair.mine)
    step = torch.compile(pair.opt.step, backend="fuseopt", **given)
    for seed in range(ALL):
        set_grads(pair.mine, pair.mine, seed)
        step()
    assert clock.ways == []

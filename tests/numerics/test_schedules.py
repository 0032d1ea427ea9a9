"""A schedule compiles nothing anew: one compilation for each way that a step goes.

Each case names the ways in which its step goes, one compilation for each: where it
makes its state in the first call, where Python branches on a number. The numbers, the
first ones included, make no difference.
"""

from __future__ import annotations

import contextlib
import copy
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim import lr_scheduler as lrs

import fuseopt
from tests import papers
from tests.numerics.test_plain import differences
from tests.papers.published import Periodic, ScheduleFree
from tests.steps import ELEVEN, eager_step, make_params, set_grads

Build = Callable[..., Optimizer]
STATE = "the first call makes the state"
USUAL = "as ever"
FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
}


class Decay:
    """A schedule of the weight decay, from the first value on."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.steps = 0
        self._set()

    def _set(self) -> None:
        for group in self.optimizer.param_groups:
            if "weight_decay" in group:
                group["weight_decay"] = 0.1 / (1 + self.steps)

    def step(self) -> None:
        self.steps += 1
        self._set()


class Everything:
    """All numbers of all groups move, each in a way of its own."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            for key, value in group.items():
                if isinstance(value, float) and 0 < value < 1:
                    group[key] = value * 0.99
                elif key in ("betas", "nus"):
                    group[key] = tuple(x * 0.99 for x in value)


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "warm-up from 0": lambda o: lrs.LambdaLR(o, lambda e: min(e / 4, 1.0)),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 9),
    "one cycle": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=2000),
    "weight decay": Decay,
    "everything": Everything,
}


@contextlib.contextmanager
def counted_traces() -> Iterator[list[str]]:
    """Names of the functions that Dynamo compiles."""
    import torch._dynamo.convert_frame as converter

    kept, traced = converter._compile, []

    def count(code: Any, *args: Any, **kwargs: Any) -> Any:
        traced.append(code.co_name)
        return kept(code, *args, **kwargs)

    converter._compile = count
    try:
        yield traced
    finally:
        converter._compile = kept


def compilations(
    build: Build,
    schedule: Callable[[Optimizer], Any],
    steps: int = 12,
    groups: int = 0,
    **options: Any,
) -> int:
    """How often a step is compiled, whose bits are eager's in each step.

    `groups`: so many, each of one parameter, with rates that grow from one to the next.
    """
    shapes = [(3 + i % 4,) for i in range(groups)] or [(33,), (4, 5)]
    given: list[Any] = [make_params(shapes), make_params(shapes)]
    theirs, mine = given
    if groups:
        given = [
            [{"params": [p], "lr": 0.001 * 1.05**i} for i, p in enumerate(ps)]
            for ps in given
        ]
    plain, compiled = (build(ps, **copy.deepcopy(options)) for ps in given)
    schedules = [schedule(o) for o in (plain, compiled)]
    fuseopt.compile(compiled, fallback="error")
    with counted_traces() as traced:
        for number in range(steps):
            set_grads(theirs, mine, number)
            eager_step(plain)
            compiled.step()
            assert differences(compiled, plain) == [], f"step {number}"
            for each in schedules:
                each.step()
    reports = fuseopt.reports()
    assert [r.fallback for r in reports] == [""] * len(reports)
    assert len(traced) == len(reports), traced
    return len(reports)


def moves_momentum(build: Build) -> bool:
    """Does OneCycleLR take it?"""
    options = build(make_params([(1,)])).defaults
    return "betas" in options or "momentum" in options


# ---------------------------------------------------------------- torch.optim


def of_torch(name: str) -> tuple[dict[str, Any], list[str]]:
    """Options under which each number of an optimizer takes part, and its ways."""
    options: dict[str, Any] = {"lr": 0.05}
    if name in ("SGD", "RMSprop"):
        options["momentum"] = 0.9
    if name != "Rprop":
        options["weight_decay"] = 0.01
    return options, [STATE, USUAL] if name == "SGD" else [USUAL]


@pytest.mark.family(90)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ELEVEN)
def test_torch_optimizers(name: str, schedule: str, form: str) -> None:
    build = getattr(torch.optim, name)
    options, ways = of_torch(name)
    if schedule == "one cycle" and not moves_momentum(build):
        pytest.skip("it has no momentum that the schedule could move")
    given = {**options, **FORMS[form]}
    if (name, schedule, form) == ("ASGD", "everything", "foreach"):
        ways = [*ways, "alpha, an exponent, moved: a constant until then"]
    assert compilations(build, SCHEDULES[schedule], **given) == len(ways)


@pytest.mark.family(3)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "NAdam"])
def test_a_rate_that_is_a_tensor(name: str) -> None:
    options, ways = of_torch(name)
    options["lr"] = torch.tensor(0.05)
    build = getattr(torch.optim, name)
    if name != "SGD":
        options |= {"foreach": True, "capturable": True}
    assert compilations(build, SCHEDULES["warm-up from 0"], **options) == len(ways)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_sixty_groups(name: str) -> None:
    options, ways = of_torch(name)
    build = getattr(torch.optim, name)
    schedule = SCHEDULES["warm-up from 0"]
    assert compilations(build, schedule, 6, groups=60, **options) == len(ways)


def test_a_decay_that_begins_is_another_way() -> None:
    """`if weight_decay != 0`: one compilation for each answer, whatever the number."""
    decays = [0.0, 0.0, 0.1, 0.2, 0.0, 0.3, 0.0, 1e-30, 0.0]

    class Switch(Decay):
        def _set(self) -> None:
            for group in self.optimizer.param_groups:
                group["weight_decay"] = decays[self.steps % len(decays)]

    ways = ["no decay", "decay"]
    assert compilations(torch.optim.AdamW, Switch, 9, lr=0.01) == len(ways)


# ---------------------------------------------------------------- written as loops

#: Ways besides the first call's and the usual one.
MORE: dict[str, list[str]] = {
    "PNM": ["which buffer leads in odd steps"],
    "RectifiedAdam": ["the variance is rectified"],
    "ScheduleFree": ["its own warm-up is over"],
}
LOOPS: dict[str, tuple[Build, dict[str, Any]]] = {
    **{
        kind.__name__: (kind, {})
        for kind, *_ in [*papers.ELEMENTWISE, *papers.REDUCING]
    },
    "ScheduleFree": (ScheduleFree, {}),
}
#: What `make test` has time for.
QUICK = {"AdEMAMix", "MARS", "PNM", "ScheduleFree", "RectifiedAdam", "LAMB"}
#: No schedule may begin at a rate of 0, by which these divide.
DIVIDE = {"ScheduleFreeSGD", "Gravity"}
#: No schedule may move the betas by which these keep their state.
KEYED = {"AggMo"}


@pytest.mark.family(10)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=() if x in QUICK else (pytest.mark.slow,))
        for x in sorted(LOOPS)
    ],
)
def test_optimizers_of_papers(name: str, schedule: str) -> None:
    build, options = LOOPS[name]
    if schedule == "one cycle" and not moves_momentum(build):
        pytest.skip("it has no momentum that the schedule could move")
    if schedule == "warm-up from 0" and name in DIVIDE:
        pytest.skip("it divides by its rate")
    if schedule in ("one cycle", "everything") and name in KEYED:
        pytest.skip("in eager it finds no state by other betas")
    ways = [STATE, USUAL, *MORE.get(name, [])]
    assert compilations(build, SCHEDULES[schedule], **options) == len(ways)


@pytest.mark.parametrize("schedule", ["warm-up from 0", "cosine"])
def test_functions_and_periods_of_a_counter(schedule: str) -> None:
    ways = [USUAL, "each tenth step"]
    assert compilations(Periodic, SCHEDULES[schedule], 31) == len(ways)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AdEMAMix", "MARS", "ScheduleFree"])
def test_loops_of_sixty_groups(name: str) -> None:
    build, _ = LOOPS[name]
    ways = [STATE, USUAL]
    assert compilations(build, SCHEDULES["cosine"], 4, groups=60) == len(ways)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["warm-up from 0", "one cycle", "weight decay"])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "AdEMAMix", "ScheduleFree", "MARS"])
def test_a_thousand_steps(name: str, schedule: str) -> None:
    if name in LOOPS:
        build, options = LOOPS[name]
        ways = [STATE, USUAL, *MORE.get(name, [])]
    else:
        build = getattr(torch.optim, name)
        options, ways = of_torch(name)
    found = compilations(build, SCHEDULES[schedule], 1000, **options)
    assert found == len(ways)


# ---------------------------------------------------------------- hostile cases


class Asks(Optimizer):
    """`ask(lr, t)` decides by which of two factors gradients are scaled."""

    def __init__(self, params: Any, ask: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "step": 0})
        self.ask = ask

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            way = self.ask(group["lr"], group["step"])
            for p in group["params"]:
                if way:
                    p.add_(p.grad, alpha=-2 * group["lr"])
                else:
                    p.sub_(p.grad * group["lr"])


TINY = [0.1, 1e-20, 1e-17, 0.2, 1e-300, 5e-324, 0.3]
ASKED: dict[str, tuple[Callable[[float, int], Any], list[float]]] = {
    # true of floats, not of real numbers
    "cancels": (lambda lr, t: (lr + 1.0) - 1.0 == 0.0, TINY),
    "order": (lambda lr, t: (lr + 0.2) + 0.3 == lr + (0.2 + 0.3), [0.1, 0.7, 0.3, 0.4]),
    "scales": (lambda lr, t: lr * 3.0 / 3.0 == lr, [0.1, 0.2, 0.3, 1.1, 2.7, 5e-324]),
    "or": (lambda lr, t: lr or t > 3, [0.1, 0.0, 0.2, 0.0, 0.0]),
    "and": (lambda lr, t: lr and t > 3, [0.1, 0.0, 0.2, 0.0, 0.3]),
    "not": (lambda lr, t: not lr, [0.1, 0.0, 0.2, 0.0, 0.3]),
    "is nan": (lambda lr, t: lr != lr, [0.1, math.nan, 0.2, math.nan, 0.3]),
    "infinite": (lambda lr, t: lr - lr != 0, [0.1, 0.2, math.inf, 0.3, 0.4]),
    "sign": (lambda lr, t: math.copysign(1, lr) < 0, [0.0, -0.0, 0.1, -0.1, -0.0]),
    "root": (lambda lr, t: math.sqrt(t) % 1 == 0, [0.1, 0.2, 0.3, 0.4, 0.5]),
    "power": (lambda lr, t: 0.9**t < 0.7, [0.1, 0.2, 0.3, 0.4, 0.5]),
    "smallest": (lambda lr, t: min(lr, 0.2) == max(0.2, lr), [0.1, 0.2, 0.3, 0.2]),
    "whole": (lambda lr, t: int(lr * 10) % 2, [0.1, 0.2, 0.3, 0.4, 0.15]),
    "chain": (lambda lr, t: 0.1 < lr <= 0.3, [0.1, 0.2, 0.3, 0.4, 0.15]),
    "among": (lambda lr, t: lr in (0.1, 0.3), [0.1, 0.2, 0.1, 0.3, 0.2]),
    "not among": (lambda lr, t: t not in [lr, 3, 0.0], [0.1, 5, 0.1, 0.3]),
    "text": (lambda lr, t: f"{lr}" == "0.2", [0.1, 0.2, 0.1, 0.2]),
    "rounded": (lambda lr, t: round(lr, 1) == 0.1, [0.1, 0.12, 0.2, 0.08]),
}


@pytest.mark.family(36)
@pytest.mark.filterwarnings("ignore:fuseopt:RuntimeWarning")  # text is made in eager
@pytest.mark.parametrize("way", ["compile", "backend"])
@pytest.mark.parametrize("name", ASKED)
def test_a_branch_is_asked_of_pythons_numbers(name: str, way: str) -> None:
    ask, rates = ASKED[name]
    theirs, mine = make_params([(5,), (3,)]), make_params([(5,), (3,)])
    plain, other = Asks(theirs, ask), Asks(mine, ask)
    if way == "compile":
        step = fuseopt.compile(other).step
    else:
        step = torch.compile(other.step, backend="fuseopt")
    for number, rate in enumerate(rates * 3):
        for opt in (plain, other):
            opt.param_groups[0]["lr"] = rate
        set_grads(theirs, mine, number)
        plain.step()
        step()
        assert differences(other, plain) == [], f"{rate} in step {number}"


#: By name, how many ways there are through what is asked.
WAYS = {"cancels": 2, "order": 2, "scales": 2, "power": 2, "among": 2, "chain": 3}


@pytest.mark.family(3)
@pytest.mark.parametrize("name", WAYS)
def test_a_branch_is_one_compilation_for_each_way(name: str) -> None:
    ask, rates = ASKED[name]
    theirs, mine = make_params([(5,), (3,)]), make_params([(5,), (3,)])
    plain, other = Asks(theirs, ask), Asks(mine, ask)
    fuseopt.compile(other, fallback="error")
    for number, rate in enumerate(rates * 3):
        for opt in (plain, other):
            opt.param_groups[0]["lr"] = rate
        set_grads(theirs, mine, number)
        plain.step()
        other.step()
        assert differences(other, plain) == [], f"{rate} in step {number}"
    assert len(fuseopt.reports()) <= WAYS[name]


class Exponents(Optimizer):
    """Numbers that make another structure of the step: an exponent, an order."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "power": 2.0, "order": 2.0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                scaled = p.grad.abs() ** group["power"]
                scaled /= torch.linalg.vector_norm(p.grad, group["order"]) + 1
                p.sub_(scaled * group["lr"])


def test_an_exponent_is_a_constant_until_it_moves() -> None:
    """Of a square eager multiplies; a kernel for any exponent has other bits."""
    theirs, mine = make_params([(40,), (7,)]), make_params([(40,), (7,)])
    plain, other = Exponents(theirs), Exponents(mine)
    fuseopt.compile(other)
    moves: list[dict[str, Any]] = [{}, {"lr": 0.2}, {"lr": 0.3}, {"power": 3.0}]
    moves += [{"power": 0.5}, {"order": 1.0}, {"power": 2.0}]
    for number, move in enumerate(moves):
        for opt in (plain, other):
            opt.param_groups[0].update(move)
        set_grads(theirs, mine, number)
        plain.step()
        other.step()
        assert differences(other, plain) == [], f"{move} in step {number}"
        if number == 2:
            (report,) = fuseopt.reports()
            assert (report.externs, report.fallback) == ([], "")


class Letter(Optimizer):
    """A counter whose name is a part of `_init_group`, which Dynamo takes for it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.t = 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.t += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / self.t)


def test_a_counter_whose_name_is_a_part_of_a_methods() -> None:
    assert compilations(Letter, SCHEDULES["cosine"], 5) == 1


def test_a_rate_that_was_a_whole_number() -> None:
    """Another type is another way: one compilation more, once."""
    rates = [1, 1, 0.5, 0.25, 1, 0.125, 2]

    class Rates(Decay):
        def _set(self) -> None:
            for group in self.optimizer.param_groups:
                group["lr"] = rates[self.steps % len(rates)]

    assert compilations(torch.optim.AdamW, Rates, 7) == len([int, float]) + 1


def test_a_scheduler_that_is_made_late() -> None:
    """It adds `initial_lr` and more to the groups of a step that was compiled."""
    theirs, mine = make_params([(5,), (3,)]), make_params([(5,), (3,)])
    plain, other = torch.optim.AdamW(theirs), torch.optim.AdamW(mine)
    fuseopt.compile(other, fallback="error")
    schedules: list[Any] = []
    for number in range(8):
        if number == 3:
            schedules = [lrs.OneCycleLR(o, 0.1, total_steps=9) for o in (plain, other)]
        set_grads(theirs, mine, number)
        plain.step()
        other.step()
        assert differences(other, plain) == [], f"step {number}"
        for each in schedules:
            each.step()
    assert len(fuseopt.reports()) <= 2


def test_many_lanes_that_few_lead() -> None:
    """Numbers that others write into groups move, and nothing is compiled anew."""
    shapes = [(5,), (3, 4)] * 10
    theirs, mine = make_params(shapes), make_params(shapes)
    plain, other = (torch.optim.AdamW(ps, lr=0.1) for ps in (theirs, mine))
    fuseopt.compile(other, fallback="error")
    for number in range(12):
        for opt in (plain, other):
            (group,) = opt.param_groups
            group["lr"] = 0.01 * number
            group["progress"] = number / 12
            group["epoch"] = number
        set_grads(theirs, mine, number)
        plain.step()
        other.step()
        assert differences(other, plain) == [], f"step {number}"
    (report,) = fuseopt.reports()
    assert "they stand for" in report.traced


@pytest.mark.slow
def test_two_optimizers_in_threads() -> None:
    """Each trace has symbols of its own."""

    def go(params: Any, opt: Optimizer) -> None:
        schedule = SCHEDULES["cosine"](opt)
        for number in range(8):
            set_grads(params, params, number)
            opt.step()
            schedule.step()

    pairs = []
    threads = []
    for kind in (torch.optim.AdamW, ScheduleFree):
        theirs, mine = make_params([(5,), (3,)]), make_params([(5,), (3,)])
        plain, other = kind(theirs), kind(mine)
        # alone: torch.optim asks whether anybody compiles, in any thread
        go(theirs, plain)
        fuseopt.compile(other, fallback="error")
        pairs.append((plain, other))
        threads.append(threading.Thread(target=go, args=(mine, other)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for plain, other in pairs:
        assert differences(other, plain) == []

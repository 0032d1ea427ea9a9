"""The recorder of `bench`: a step has eager's bits, recorded or refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

import fuseopt
from bench.recorder.way import RecordedIsolated, recorded
from tests.beside import apart
from tests.steps import Twins, differences, make_params, set_grads
from tests.uniformity.test_traps import judge


def stepped(twins: Twins, lr: float = 0.0) -> None:
    """One step of both, which must not differ."""
    if lr:
        for optimizer in twins.both():
            optimizer.param_groups[0]["lr"] = lr
    assert twins.step() == []


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("name", ["AdamW", "NAdam", "RMSprop"])
def test_one_recording_follows_the_rate_and_the_counters(
    name: str, foreach: bool
) -> None:
    with recorded() as every:
        twins = Twins(name, foreach=foreach)
        for lr in (0.0, 0.0, 0.01, 0.003, 0.0):
            stepped(twins, lr)
        (step,) = every
    assert (step.steps, step.recorder.why) == ([5, 0], "")
    assert step.recorder.recorded <= 2  # RMSprop's state has no counter before


def test_a_branch_on_a_counter_is_recorded_once_more() -> None:
    with recorded() as every:
        twins = Twins("RAdam", foreach=False, lr=0.1)
        for _ in range(8):
            stepped(twins)
        (step,) = every
    assert (step.steps, step.recorder.recorded) == ([8, 0], 2)


def test_counters_that_part_are_recorded_once_more() -> None:
    with recorded() as every:
        twins = Twins("AdamW", foreach=False)
        stepped(twins)
        for params, optimizer in (
            (twins.params, twins.optimizer),
            (twins.eager_params, twins.eager),
        ):
            optimizer.state[params[4]]["step"] += 5
        stepped(twins)
        stepped(twins)
        (step,) = every
    assert (step.steps, step.recorder.recorded) == ([3, 0], 2)


@pytest.mark.parametrize(
    "trap",
    [
        "around.CellCounts",
        "around.RandomOfNumpy",
        "around.DefaultCounts",
        "elsewhere.CountedWithin",
        "elsewhere.HeldAndReadElsewhere",
        "memory.DataIsSet",
    ],
)
def test_what_no_guard_sees_is_refused(trap: str) -> None:
    with recorded() as every:
        judge(trap, apart)
        (step,) = [x for x in every if sum(x.steps)]
    assert step.steps[0] == 0
    assert step.recorder.why


@pytest.mark.parametrize(
    "trap",
    [
        "around.CodeOfAFunction",
        "around.DefaultOfALambda",
        "around.GradMode",
        "attributes.Offset",
        "memory.ParameterReplaced",
    ],
)
def test_what_changes_is_seen(trap: str) -> None:
    with recorded() as every:
        judge(trap, apart)
        (step,) = [x for x in every if sum(x.steps)]
    assert step.steps[1] == 0
    assert step.recorder.recorded > 1


class Caught(torch.optim.SGD):
    """Its step catches what a refusal raises."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            try:
                scale = p.grad.tolist()[0]
            except Exception:
                scale = 1.0
            p.sub_(p.grad * scale)


@pytest.mark.filterwarnings("ignore")  # Dynamo ends its graph
def test_a_refusal_that_the_step_catches_is_one() -> None:
    theirs, mine = make_params([(3,)] * 4), make_params([(3,)] * 4)
    plain, opt = Caught(theirs, lr=0.1), Caught(mine, lr=0.1)
    with recorded() as every:
        fuseopt.compile(opt)
        set_grads(theirs, mine, 0)
        plain.step()
        opt.step()
        (step,) = every
    assert "tolist" in step.recorder.why
    assert differences(theirs, plain, mine, opt) == []


def test_nothing_in_the_package_imports_it() -> None:
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, fuseopt; fuseopt.compile; print(*sys.modules)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "bench.recorder" not in found.stdout
    assert RecordedIsolated.__mro__[1].__module__ == "fuseopt.isolate.isolated"

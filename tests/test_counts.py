"""Counts that hold on any machine: launches, builds, texts, graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as lrs

import fuseopt
from fuseopt.backend import fuseopt as backend
from fuseopt.backend import session
from tests.steps import ELEVEN, Twins, compiled, make, make_params, set_grads

#: Optimizers whose step counter takes no part in the update.
COUNTERS_APART = ("Adadelta", "RMSprop", "Rprop")


def run(
    params: list[torch.nn.Parameter], name: str, steps: int = 2, **options: Any
) -> Any:
    optimizer = make(name, params, **options)
    step = compiled(optimizer)
    for seed in range(steps):
        set_grads(params, params, seed)
        step()
    return optimizer


@pytest.mark.parametrize("name", ELEVEN)
def test_one_launch_for_three_parameters_and_two_groups(name: str) -> None:
    params = make_params([(3,), (4, 5), (2, 2), (7,)])
    options: dict[str, Any] = {"weight_decay": 0.1} if name != "Rprop" else {}
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.5}]
    run(params, name, 3, **options)
    torch._dynamo.reset()
    optimizer = make(name, groups, **options)
    step = compiled(optimizer)
    for seed in range(3):
        set_grads(params, params, seed)
        step()
    for report in fuseopt.reports():
        assert (report.launches, report.externs) == (1, []), str(report)
        assert report.lanes == 4
        # two groups are rows of one table; counters that nobody reads are a variant
        assert report.kernels[0].variants == 1 + (name in COUNTERS_APART)


@pytest.mark.parametrize("name", ELEVEN)
def test_one_launch_at_300_parameters_with_the_text_of_three(name: str) -> None:
    texts = []
    for count in (3, 300):
        params = make_params([(5,)] * count)
        run(params, name, 1)
        (report,) = fuseopt.reports()
        assert (report.launches, report.lanes) == (1, count)
        texts.append(report.kernels[0].source)
        torch._dynamo.reset()
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ELEVEN)
def test_one_launch_at_1000_parameters(name: str) -> None:
    texts = []
    for count in (3, 1000):
        run(make_params([(5,)] * count), name, 1)
        (report,) = fuseopt.reports()
        assert (report.launches, report.lanes) == (1, count)
        texts.append(report.kernels[0].source)
        torch._dynamo.reset()
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ELEVEN)
def test_one_launch_with_two_dtypes(name: str) -> None:
    params = make_params([(5, 3)] * 2, torch.bfloat16) + make_params([(5, 3)] * 2)
    run(params, name)
    for report in fuseopt.reports():
        assert report.launches == 1
        assert report.kernels[0].variants == 2 + (name in COUNTERS_APART)


def test_other_shapes_and_hyperparameters_build_nothing() -> None:
    run(make_params([(3, 4)] * 3), "AdamW")
    text = fuseopt.reports()[0].kernels[0].source
    built = session.builder.builds
    for shapes, options in (
        ([(7,), (2, 3, 4), ()], {"lr": 0.7, "betas": (0.2, 0.77), "eps": 1e-3}),
        ([(1000, 3)] * 2, {"weight_decay": 0.33, "lr": 2e-5}),
    ):
        torch._dynamo.reset()
        run(make_params(shapes), "AdamW", **options)
        assert fuseopt.reports()[0].kernels[0].source == text
        assert fuseopt.reports()[0].builds == 0
    assert session.builder.builds == built


def test_a_new_lr_makes_one_graph_more_and_no_kernel() -> None:
    params = make_params([(5,)] * 3)
    optimizer = make("SGD", params, lr=0.1, momentum=0.9)
    step = compiled(optimizer)
    for seed in range(8):
        set_grads(params, params, seed)
        step()
        optimizer.param_groups[0]["lr"] *= 0.9
    reports = fuseopt.reports()
    # the first step, which makes the buffers; a fixed lr; a symbolic one
    assert len(reports) <= 3
    assert sum(r.builds for r in reports[2:]) == 0


Scheduler = Callable[[torch.optim.Optimizer], Any]
SCHEDULERS: dict[str, Scheduler] = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda e: 0.95**e),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda e: 0.95),
    "StepLR": lambda o: lrs.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [2, 5], 0.5),
    "ConstantLR": lambda o: lrs.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: lrs.LinearLR(o, 0.3, total_iters=8),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 15, 2.0),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 9),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 4),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.1, 4, cycle_momentum=True),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=30),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lrs.SequentialLR(
        o, [lrs.ConstantLR(o, 0.5, 3), lrs.ExponentialLR(o, 0.9)], [4]
    ),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler(
        [lrs.ConstantLR(o, 0.5, 3), lrs.ExponentialLR(o, 0.9)]
    ),
}


def test_the_list_of_schedulers_is_whole() -> None:
    names = {
        name
        for name, value in vars(lrs).items()
        if isinstance(value, type) and issubclass(value, lrs.LRScheduler)
    }
    assert names - {"LRScheduler", "_LRScheduler", "SWALR"} <= SCHEDULERS.keys()


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_schedulers_recompile_once_and_stay_eagers_bits(
    optimizer: str, name: str
) -> None:
    """20 steps, the lr (and betas, momentum) a float that changes at each."""
    options = {"momentum": 0.9} if optimizer == "SGD" else {}
    twins = Twins(optimizer, [(33,), (4, 5)], lr=0.05, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # schedulers made after the step was compiled
        schedules = [SCHEDULERS[name](o) for o in twins.both()]
    twins.step_function = compiled(twins.optimizer)
    calls = 0
    for step in range(20):
        assert twins.step() == [], f"step {step}"
        for schedule in schedules:
            arguments = (1.0,) if name == "ReduceLROnPlateau" else ()
            schedule.step(*arguments)
        calls += 1
    reports = fuseopt.reports()
    assert all(r.launches == 1 and not r.fallback for r in reports)
    # SGD makes its buffers in a graph of its own
    first = 2 if optimizer == "SGD" else 1
    assert len(reports) <= first + 1, f"{len(reports)} graphs"
    assert calls == 20


def test_one_call_runs_one_kernel() -> None:
    """The count of launches is not only planned: the table is launched once a step."""
    params = make_params([(9,)] * 5)
    made: list[Any] = []

    def spy(gm: Any, inputs: Any) -> Any:
        made.append(backend(gm, inputs))
        return made[-1]

    optimizer = make("AdamW", params)
    step = torch.compile(optimizer.step, backend=spy)
    set_grads(params, params, 0)
    step()
    launches = []
    for table in made[0].plan.tables.values():
        entry = table.entry
        table.entry = lambda *a, entry=entry: (launches.append(1), entry(*a))
    step()
    assert launches == [1]

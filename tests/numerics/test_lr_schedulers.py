"""Every scheduler of torch.optim.lr_scheduler: eager's bits, in one compilation.

A compilation is a graph that Dynamo hands to the backend: one Report. A step that makes
its state when it is first called (SGD with momentum) is traced again for that reason.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR

import fuseopt
from tests.steps import compiled, differences, eager_step, make, make_params, set_grads

STEPS = 10
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
    "SWALR": lambda o: SWALR(o, swa_lr=0.01, anneal_epochs=5),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler(
        [lrs.ConstantLR(o, 0.5, 3), lrs.ExponentialLR(o, 0.9)]
    ),
}


OPTIMIZERS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}, "Adam": {}}


def test_the_list_of_schedulers_is_whole() -> None:
    names = {
        name
        for name, value in vars(lrs).items()
        if isinstance(value, type) and issubclass(value, lrs.LRScheduler)
    }
    assert names - {"LRScheduler", "_LRScheduler"} | {"SWALR"} == SCHEDULERS.keys()


def run(name: str, optimizer: str, tensor: bool, foreach: bool) -> None:
    """Ten steps beside eager, the scheduler stepping after each."""
    lr: Any = torch.tensor(0.05) if tensor else 0.05
    options = {"lr": lr, "foreach": foreach, **OPTIMIZERS[optimizer]}
    shapes = [(33,), (4, 5)]
    theirs, mine = make_params(shapes), make_params(shapes)
    reference = make(optimizer, theirs, reference=True, **copy.deepcopy(options))
    own = make(optimizer, mine, **copy.deepcopy(options))
    schedules = [SCHEDULERS[name](o) for o in (reference, own)]
    step = compiled(own)
    rates = []
    for number in range(STEPS):
        set_grads(theirs, mine, number)
        eager_step(reference)
        step()
        found = differences(theirs, reference, mine, own)
        assert found == [], f"step {number}"
        rates.append(float(own.param_groups[0]["lr"]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a deprecated use inside torch itself
            for schedule in schedules:
                schedule.step(*((1.0,) if name == "ReduceLROnPlateau" else ()))
    assert len(set(rates)) > 1, "the schedule changed nothing"
    reports = fuseopt.reports()
    ways = 2 if optimizer == "SGD" else 1
    assert len(reports) == ways, f"{len(reports)} compilations"
    for report in reports:
        assert (report.launches, report.externs, report.fallback) == (1, [], "")


@pytest.mark.family(32)
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize(("optimizer", "tensor"), [("SGD", False), ("Adam", True)])
def test_a_schedule_compiles_nothing_anew(
    name: str, optimizer: str, tensor: bool
) -> None:
    run(name, optimizer, tensor, foreach=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "for-loop"])
@pytest.mark.parametrize("tensor", [True, False], ids=["tensor", "float"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_schedule_in_every_form(
    name: str, optimizer: str, tensor: bool, foreach: bool
) -> None:
    run(name, optimizer, tensor, foreach)

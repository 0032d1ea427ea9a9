"""Counts that hold on any machine: launches, builds, texts, graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fuseopt
from fuseopt.backend import fuseopt as backend
from fuseopt.compiler.session import session
from tests.steps import ELEVEN, compiled, make, make_params, set_grads

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


@pytest.mark.family(12)
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


#: Dynamo's trace of 300 parameters takes long, so `make test` has two of them.
QUICK = ("AdamW", "SGD")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in ELEVEN],
)
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


@pytest.mark.family(4)
@pytest.mark.parametrize("name", ELEVEN)
def test_one_launch_with_two_dtypes(name: str) -> None:
    params = make_params([(5, 3)] * 2, torch.bfloat16) + make_params([(5, 3)] * 2)
    run(params, name)
    for report in fuseopt.reports():
        assert report.launches == 1
        assert report.kernels[0].variants == 2 + (name in COUNTERS_APART)


@pytest.mark.slow
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
    # the first step, which makes the buffers with a fixed lr; all others
    first, other = fuseopt.reports()
    assert first.launches == other.launches == 1


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
    for table in made[0].program.bound.tables.every.values():
        entry = table.entry
        table.entry = lambda *a, entry=entry: (launches.append(1), entry(*a))
    step()
    assert launches == [1]

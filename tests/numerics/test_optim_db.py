"""Every optimizer of torch, every input of optim_db, every form and dtype, in eager's
bits.

One optimizer holds parameters of all dtypes, so a case is one compilation. `make test`
runs one input of each optimizer in each form, the slow test all.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.testing._internal.common_optimizers import optim_db

import fuseopt
from fuseopt.backend import fuseopt as backend
from fuseopt.compiler.session import reports
from fuseopt.errors import UnsupportedInput
from tests.optim_cases import CASES, DISABLED, FEW, REAL, Case, run, untraceable
from tests.steps import make_params, same_bits
from tests.versions import VERSION

#: Every optimizer whose step is elementwise, with the number of its cases. The list of
#: another version of torch may be longer: then this test says so.
COUNTS = {
    "ASGD": 36,
    "Adadelta": 27,
    "Adagrad": 21,
    "Adam": 30,
    "AdamW": 30,
    "Adamax": 30,
    "NAdam": 33,
    "RAdam": 30,
    "RMSprop": 33,
    "Rprop": 21,
    "SGD": 27,
}
#: Those with reductions or matrix products.
REDUCING = {"Adafactor": 10, "Muon": 9 if VERSION >= (2, 14) else 7}
#: What they run as calls, and with how many launches between.
CALLS = {
    "Adafactor": {"linalg_vector_norm", "mean", "mm"},
    "Muon": {"linalg_vector_norm", "mm", "addmm"},
}
LAUNCHES = {"Adafactor": 4, "Muon": 4}
ELEMENTWISE = [case for case in CASES if case.name in COUNTS]
OTHERS = [case for case in CASES if case.name in REDUCING]
#: Those of them that this version of torch can trace; the others are skipped by name.
TRACED = [
    pytest.param(case, marks=pytest.mark.skip(why)) if (why := untraceable(case)) else
    case for case in OTHERS
]  # fmt: skip
WIDE = (torch.float32, torch.float64)
MATRICES = ((17, 5), (5, 17), (40, 40), (3, 1))


def picked() -> list[Case]:
    """One input for each optimizer and form, not the same for each."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in ELEMENTWISE:
        groups.setdefault((case.name, case.form), []).append(case)
    return [
        group[(5 * i + len(group) // 2) % len(group)]
        for i, group in enumerate(groups.values())
    ]


def one_launch(case: Case, shapes: tuple[tuple[int, ...], ...]) -> None:
    for report in run(case, shapes):
        assert report.launches == 1, str(report)
        assert not report.externs, str(report)
        assert not report.fallback, str(report)


def test_no_case_is_missing() -> None:
    assert Counter(case.name for case in CASES) == {**COUNTS, **REDUCING}
    names = {info.optim_cls.__name__ for info in optim_db}
    assert names == {*COUNTS, *REDUCING, *DISABLED}
    forms = {case.form for case in ELEMENTWISE}
    assert forms == {"foreach", "for-loop", "differentiable"}


@pytest.mark.family(44)
@pytest.mark.parametrize("case", picked(), ids=repr)
def test_one_input_of_each_form_in_every_dtype(case: Case) -> None:
    one_launch(case, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("case", ELEMENTWISE, ids=repr)
def test_every_input_of_every_form_in_every_dtype(case: Case) -> None:
    one_launch(case, ((), (3,), (17, 5), (0, 3), (40,), (181, 193)))


def in_one_graph(case: Case, dtypes: tuple[torch.dtype, ...]) -> None:
    """Nothing in eager but named calls between kernels; no graph for the next lr."""
    (report,) = run(case, MATRICES, dtypes, steps=3)
    assert not report.fallback
    assert 1 <= report.launches <= LAUNCHES[case.name], str(report)
    assert {name.split(".")[1] for name, _ in report.externs} <= CALLS[case.name]


@pytest.mark.parametrize("case", TRACED[8:9] + TRACED[-1:], ids=repr)
def test_one_input_of_those_that_reduce_or_multiply(case: Case) -> None:
    in_one_graph(case, WIDE)


@pytest.mark.slow
@pytest.mark.parametrize("case", TRACED, ids=repr)
def test_every_input_of_those_that_reduce_or_multiply(case: Case) -> None:
    in_one_graph(case, WIDE)


@pytest.mark.slow
@pytest.mark.parametrize("case", TRACED, ids=repr)
def test_matrix_products_in_narrow_dtypes(case: Case) -> None:
    in_one_graph(case, REAL)


def test_a_root_of_a_column_times_a_row_in_bfloat16() -> None:
    """The tail of `rsqrt` is that of its own tensor, not of the fused loop's rows."""
    case = next(case for case in OTHERS if not untraceable(case))
    in_one_graph(case, (torch.bfloat16, torch.float16))


@pytest.mark.parametrize("name", DISABLED)
def test_a_step_that_dynamo_never_traces_says_so(name: str) -> None:
    params = make_params([(3, 4)])
    params[0].grad = torch.ones(3, 4).to_sparse()
    optimizer = getattr(torch.optim, name)(params)
    said = f"{name}.step is disabled under Dynamo, so torch never calls a backend"
    with pytest.raises(Exception, match=said) as error:
        torch.compile(optimizer.step, backend=backend)(lambda: params[0].sum())
    assert "\n\n" not in str(error.value).strip()
    with pytest.raises(UnsupportedInput, match=said):
        fuseopt.explain(optimizer.step)


@pytest.mark.parametrize("name", ["Adam", "SGD", "RMSprop", "Adagrad"])
def test_a_step_that_autograd_records_runs_in_eager_and_says_so(name: str) -> None:
    """`differentiable=True` over results of the user's own arithmetic: the gradient
    through two steps is eager's, to the bit.
    """

    def gradient(compiled: bool) -> torch.Tensor:
        weight = torch.linspace(-1, 1, 20).reshape(5, 4).requires_grad_()
        params = [weight * 2, weight[1] * 1.5]
        for p in params:
            p.grad = torch.full_like(p, 0.25)
        kind = getattr(torch.optim, name)
        optimizer = kind(params, differentiable=True, lr=0.1, weight_decay=0.5)
        step = optimizer.step
        if compiled:
            step = torch.compile(step, backend=backend)
        for _ in range(2):
            step()
        (made,) = torch.autograd.grad(sum((p**3).sum() for p in params), weight)
        return made

    want = gradient(compiled=False)
    assert same_bits(gradient(compiled=True), want)
    assert reports()
    for report in reports():
        assert "autograd records" in report.fallback
        assert "eager" in report.fallback

"""Norm groups in one process; tests/shards/groups.py has four processes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt.compiler.session import session

SHAPES = ((6, 5), (7,), (4, 3), (1,))


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    session.reset()


def params(dtype: torch.dtype = torch.float32) -> list[Any]:
    torch.manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(s).to(dtype)) for s in SHAPES]
    for p in made:
        p.grad = torch.randn_like(p)
    return made


def halves(every: list[Any]) -> list[fuseopt.NormGroup]:
    return [fuseopt.NormGroup(every[:2], name="first"), fuseopt.NormGroup(every[2:])]


@pytest.mark.parametrize(
    ("norm_type", "dtype"),
    [
        (2.0, torch.float32),
        (math.inf, torch.float32),
        (3.0, torch.float64),
        (2.0, torch.bfloat16),
    ],
)
def test_two_groups_have_the_norm_of_one(norm_type: float, dtype: torch.dtype) -> None:
    got, want = params(dtype), params(dtype)
    total = torch.nn.utils.get_total_norm([p.grad for p in want], norm_type)
    groups = halves(got)
    norm = fuseopt.clip_grad_norm_(got, 0.5, norm_type, norm_groups=groups)
    bound = 2**-7 if dtype == torch.bfloat16 else 2**-22
    assert abs(norm.item() / total.item() - 1) <= bound
    torch.nn.utils.clip_grads_with_norm_(want, 0.5, norm)
    for p, q in zip(got, want, strict=True):
        assert torch.equal(p.grad, q.grad)


def test_one_launch_measures_and_one_scales() -> None:
    every = params()
    groups = halves(every)
    fuseopt.clip_grad_norm_(every, 0.5, norm_groups=groups)
    measured, scaled = fuseopt.reports()
    assert (measured.launches, scaled.launches) == (1, 1)
    assert not measured.fallback
    assert not measured.externs
    for _ in range(3):
        fuseopt.clip_grad_norm_(every, 0.5, norm_groups=[*groups])
    assert len(fuseopt.reports()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_step_of_a_tail_scales_what_it_reads(dtype: torch.dtype) -> None:
    got, want = params(dtype), params(dtype)
    average, beside = ([p.detach().clone() for p in got] for _ in range(2))
    opt, plain = (torch.optim.AdamW(x, lr=0.1) for x in (got, want))
    tail = fuseopt.tail(
        opt,
        clip_grad_norm=0.5,
        norm_groups=halves(got),
        ema=[(average, 0.9)],
        zero_grad=True,
    )
    for _ in range(4):
        for p, q in zip(got, want, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        out = tail()
        torch.nn.utils.clip_grads_with_norm_(want, 0.5, out.norm)
        plain.step()
        torch._foreach_lerp_(beside, [p.detach() for p in want], 1 - 0.9)
        for x, y in zip([*got, *average], [*want, *beside], strict=True):
            assert torch.equal(x, y)
    launches = [r.launches for r in fuseopt.reports()]
    assert launches == [1, 1]


@pytest.mark.family(6)
@pytest.mark.parametrize("many", [1, 5])
@pytest.mark.parametrize(
    "more",
    [
        {"stats": True},
        {"clip_grad_adaptive": 0.01},
        {"clip_grad_value": 0.01, "grad_divisor": 2.0, "zero_grad": "zeros"},
    ],
    ids=["stats", "adaptive", "value"],
)
def test_beside_other_options(more: dict[str, Any], many: int) -> None:
    """Whether few lanes lead, or all are traced."""
    got, want = ([params()[0] for _ in range(3 * many)] for _ in range(2))
    opt, plain = (torch.optim.AdamW(x, lr=0.1) for x in (got, want))
    groups = [fuseopt.NormGroup(got[:2]), fuseopt.NormGroup(got[2:])]
    tail = fuseopt.tail(opt, clip_grad_norm=0.1, norm_groups=groups, **more)
    rest = {**more, "grad_divisor": None}
    beside = fuseopt.tail(plain, **rest)
    for _ in range(4):
        for p, q in zip(got, want, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        out = tail()
        if "grad_divisor" in more:
            torch._foreach_div_([q.grad for q in want], more["grad_divisor"])
        torch.nn.utils.clip_grads_with_norm_(want, 0.1, out.norm)
        beside()
        for p, q in zip(got, want, strict=True):
            assert torch.equal(p, q)
    assert not [r for r in fuseopt.reports() if r.fallback]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite(bad: float) -> None:
    got, want = params(), params()
    for every in (got, want):
        every[1].grad[3] = bad
    groups = halves(got)
    before = [p.grad.clone() for p in got]
    with pytest.raises(RuntimeError, match="non-finite"):
        fuseopt.clip_grad_norm_(got, 0.5, 2.0, True, norm_groups=groups)
    assert all(torch.equal(p.grad, g) for p, g in zip(got[2:], before[2:], strict=True))
    norm = fuseopt.clip_grad_norm_(got, 0.5, norm_groups=groups)
    torch.nn.utils.clip_grads_with_norm_(want, 0.5, norm)
    assert not math.isfinite(norm)
    for p, q in zip(got, want, strict=True):
        assert torch.equal(p.grad.isnan(), q.grad.isnan())


def test_no_gradients_have_no_norm() -> None:
    every = params()
    for p in every:
        p.grad = None
    assert fuseopt.clip_grad_norm_(every, 1.0, norm_groups=halves(every)) == 0


@pytest.mark.slow
def test_what_is_refused_writes_nothing() -> None:
    every = params()
    before = [p.grad.clone() for p in every]
    one = fuseopt.NormGroup(every, name="all")
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"norm_groups": []}, ValueError, "empty"),
        ({"norm_groups": [every]}, TypeError, "a list"),
        ({"norm_groups": halves(every)[:1]}, ValueError, "in no norm group"),
        ({"norm_groups": [one, one]}, ValueError, "again in norm group 'all'"),
        ({"norm_groups": [one], "defer": "unsafe"}, ValueError, "exclude"),
        ({"norm_groups": [one], "norm_type": 0.0}, ValueError, "above 0"),
    ]
    for given, error, text in cases:
        with pytest.raises(error, match=text):
            fuseopt.clip_grad_norm_(every, 1.0, **given)
    with pytest.raises(ValueError, match="not among the parameters"):
        fuseopt.clip_grad_norm_(every[:2], 1.0, norm_groups=[one])
    with pytest.raises(TypeError, match="no process group and no mesh"):
        fuseopt.NormGroup(every, ["world"])
    with pytest.raises(TypeError, match="among its parameters"):
        fuseopt.NormGroup([3])
    assert all(torch.equal(p.grad, g) for p, g in zip(every, before, strict=True))


@pytest.mark.parametrize(
    ("name", "value"), [("skip_nonfinite", True), ("error_if_nonfinite", True)]
)
def test_options_that_would_let_processes_differ(name: str, value: Any) -> None:
    every = params()
    opt = torch.optim.SGD(every, lr=0.1)
    tail = fuseopt.tail(
        opt, clip_grad_norm=1.0, norm_groups=halves(every), **{name: value}
    )
    with pytest.raises(ValueError, match=f"{name} and norm_groups exclude"):
        tail()

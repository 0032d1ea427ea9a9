"""A step that one call of C repeats: what ends that, and what it keeps alive."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt.compiler.session import COMPILED
from tests.replicate.steady_twins import Count
from tests.steps import make_params, set_grads


def ready(**options: Any) -> tuple[list[Any], Any]:
    """Parameters and an optimizer, whose last call was a single one."""
    params = make_params([(4, 4), (3,)] * 10)
    optimizer = torch.optim.AdamW(params, foreach=True, **options)
    fuseopt.compile(optimizer, eager_if_faster=False)
    with Count() as count:
        for seed in range(8):
            set_grads(params, params, seed)
            optimizer.step()
    assert count.single > 0
    return params, optimizer


def test_gradients_are_kept_by_their_parameters_alone() -> None:
    params, optimizer = ready()
    with Count() as count:
        optimizer.step()
    assert count.single == 1
    grads = [weakref.ref(p.grad) for p in params]
    gc.disable()
    try:
        optimizer.zero_grad()
        assert all(grad() is None for grad in grads)
    finally:
        gc.enable()


def test_an_optimizer_ends_with_its_last_reference() -> None:
    params, optimizer = ready()
    state = weakref.ref(optimizer.state[params[0]]["exp_avg"])
    quick = getattr(optimizer.step, COMPILED).quick
    del optimizer
    assert quick.step is None
    gc.collect()
    assert state() is None


@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_step_within_the_comparison_ends_it(place: int) -> None:
    """The end of an object may call the step between two comparisons."""
    params, optimizer = ready()
    steps: list[None] = []

    def step_once() -> None:
        if not steps:
            steps.append(None)
            optimizer.step()

    single = getattr(optimizer.step, COMPILED).quick.step
    compares = [*single._compares]
    single._compares = [
        *compares[:place],
        functools.partial(step_once),
        *compares[place:],
    ]
    twins = make_params([(4, 4), (3,)] * 10)
    twin = torch.optim.AdamW(twins, foreach=True)
    for seed in range(8):
        set_grads(twins, twins, seed)
        twin.step()
    optimizer.step()
    assert steps
    for _ in range(2):
        twin.step()
    for p, q in zip(params, twins, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(
            optimizer.state[p]["exp_avg_sq"], twin.state[q]["exp_avg_sq"]
        )


@pytest.mark.parametrize("what", ["rate", "hook", "profiler", "threads", "stance"])
def test_a_call_that_differs_is_no_single_one(what: str) -> None:
    params, optimizer = ready()
    seen: list[Any] = []
    with Count() as count:
        if what == "rate":
            optimizer.param_groups[0]["lr"] *= 0.5
        if what == "hook":
            optimizer.register_step_pre_hook(lambda *_: seen.append(1) or None)
        before = [p.detach().clone() for p in params]
        if what == "profiler":
            with torch.profiler.profile() as profile:
                optimizer.step()
            assert any("step" in x.key for x in profile.key_averages())
        elif what == "stance":
            with torch.compiler.set_stance("force_eager"):
                optimizer.step()
        elif what == "threads":
            n = torch.get_num_threads()
            torch.set_num_threads(n + 1)
            optimizer.step()
            torch.set_num_threads(n)
        else:
            optimizer.step()
    assert count.single == 0
    assert seen == [1] * (what == "hook")
    assert not any(map(torch.equal, before, params))

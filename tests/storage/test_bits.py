"""Steps of packed state: the bits of unpack, step, pack, in one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lion_pytorch
import pytest
import pytorch_optimizer
import torch
from torch.optim import Optimizer

import fuseopt
from fuseopt.compiler.report import Report
from tests.storage.reference import (
    Reference,
    assert_same,
    give_grads,
    params_of,
    turn_grads,
)

Make = Callable[[Any], Optimizer]
ADAMW: Make = lambda params: torch.optim.AdamW(params, lr=1e-2)  # noqa: E731
#: (optimizer, bytes an element with state in 16 bits)
CASES: dict[str, tuple[Make, int]] = {
    "AdamW": (ADAMW, 20),
    "AdamW-for-loop": (lambda p: torch.optim.AdamW(p, foreach=False), 20),
    "amsgrad": (lambda p: torch.optim.Adam(p, amsgrad=True), 24),
    "SGD": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True), 16),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9), 24),
    "Adadelta": (lambda p: torch.optim.Adadelta(p), 20),
    "NAdam": (lambda p: torch.optim.NAdam(p), 20),
    "Lion": (lambda p: lion_pytorch.Lion(p), 16),
    "ADOPT": (lambda p: pytorch_optimizer.ADOPT(p), 20),
    "AdEMAMix": (lambda p: pytorch_optimizer.AdEMAMix(p), 24),
}
SLOW = {
    "Adagrad": (lambda p: torch.optim.Adagrad(p), 16),
    "Adamax": (lambda p: torch.optim.Adamax(p), 20),
    "RAdam": (lambda p: torch.optim.RAdam(p), 20),
    "Rprop": (lambda p: torch.optim.Rprop(p), 20),
    "ASGD": (lambda p: torch.optim.ASGD(p), 16),
    "Yogi": (lambda p: pytorch_optimizer.Yogi(p), 20),
    "AdaBelief": (lambda p: pytorch_optimizer.AdaBelief(p), 20),
}
EVERY = [
    *CASES,
    *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
]


def case(name: str) -> tuple[Make, int]:
    return {**CASES, **SLOW}[name]


def last_report() -> Report:
    return fuseopt.reports()[-1]


def run(
    make: Make, storage: Any, n: int, steps: int = 6, missing: int = 0, **options: Any
) -> Any:
    """Steps of both, compared after each; returns the compiled optimizer."""
    theirs, ours = params_of(n), params_of(n)
    reference = Reference(make(theirs), storage)
    optimizer = fuseopt.compile(make(ours), storage=storage, **options)
    for step in range(steps):
        give_grads(step, theirs, ours, missing=missing if step > 1 else 0)
        for group in (*reference.optimizer.param_groups, *optimizer.param_groups):
            group["lr"] *= 0.9
        reference.step()
        optimizer.step()
        assert_same(reference, theirs, ours, optimizer)
    return optimizer


@pytest.mark.family(12)
@pytest.mark.parametrize("n", [4, 24])
@pytest.mark.parametrize("storage", ["bf16", "fp16", "bf16-stochastic"])
@pytest.mark.parametrize("name", EVERY)
def test_bits(name: str, storage: str, n: int) -> None:
    make, size = case(name)
    run(make, storage, n)
    report = last_report()
    assert report.fallback == ""
    assert report.launches == 1
    (kernel,) = report.kernels
    assert max(x.bytes_per_element for x in kernel.bodies) == size


@pytest.mark.parametrize("name", ["AdamW", "Lion"])
def test_gradients_may_be_missing(name: str) -> None:
    before = len(fuseopt.reports())
    run(case(name)[0], "bf16-stochastic", 18, steps=12, missing=3)
    assert len(fuseopt.reports()) - before <= 2  # with all gradients, and without


def test_formats_by_key() -> None:
    formats = {"exp_avg": "bf16", "exp_avg_sq": "bf16-stochastic"}
    optimizer = run(ADAMW, formats, 18)
    (first, *_) = optimizer.state.values()
    assert {*first} == {
        "step",
        "exp_avg@bf16",
        "exp_avg_sq@bf16-stochastic",
        "exp_avg_sq@bf16-stochastic.draw",
    }


@pytest.mark.slow
def test_reductions_and_products() -> None:
    """Elements that are counted are in another kernel than those that are reduced."""
    run(lambda p: torch.optim.Adafactor(p), "bf16-stochastic", 12)
    matrices = lambda params: torch.optim.Muon(  # noqa: E731
        [p for p in params if p.dim() == 2]
    )
    run(matrices, "bf16-stochastic", 12)
    assert last_report().fallback == ""


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_no_bit(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        make = ADAMW
        theirs, ours = ([torch.nn.Parameter(torch.zeros(300_007))] for _ in range(2))
        reference = Reference(make(theirs), "bf16-stochastic")
        optimizer = fuseopt.compile(make(ours), storage="bf16-stochastic")
        for step in range(3):
            give_grads(step, theirs, ours)
            reference.step()
            optimizer.step()
            assert_same(reference, theirs, ours, optimizer)
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_a_gradient_of_other_strides() -> None:
    """An element keeps its number where the gradient lies in another order."""
    theirs, ours = params_of(6), params_of(6)
    reference = Reference(ADAMW(theirs), "bf16-stochastic")
    optimizer = fuseopt.compile(ADAMW(ours), storage="bf16-stochastic")
    for step in range(5):
        give_grads(step, theirs, ours)
        if step > 1:
            turn_grads(theirs, ours)
        reference.step()
        optimizer.step()
        assert_same(reference, theirs, ours, optimizer)


def test_no_wide_state_lies_in_memory() -> None:
    params = [torch.nn.Parameter(torch.zeros(1000)) for _ in range(20)]
    optimizer = fuseopt.compile(torch.optim.AdamW(params), storage="bf16")
    for step in range(4):
        give_grads(step, params)
        optimizer.step()
    kept = optimizer.step.__func__  # what the step holds
    assert kept is not None
    sizes = {
        t.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for t in state.values()
    }
    assert sizes == {4, 2000}

"""Denormals where the threads of OpenMP treat them in another way than the caller.

`torch.set_flush_denormal` changes the thread that calls it. Threads of OpenMP keep what
their creator had. Eager computes small tensors in the thread that calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuseopt.compiler import pipeline
from fuseopt.ir.products import CHAINED
from fuseopt.runtime.probes import circumstances
from tests.numerics.test_products import LED, Pair
from tests.papers.matrices import Matrices

#: So many small lanes are worth two threads.
MANY = [(96, 96)] * 12
#: Small enough that products of two gradients are denormals.
SMALL, LARGE = 3e-20, 1e30


class Elements(Matrices):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.add_((g * 1e-20) * LARGE)


class Sums(Matrices):
    """Denormals that a row, or a whole matrix, adds up."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        small = g * 1e-20
        p.add_(small.sum(dim=1, keepdim=True) * LARGE)
        p.add_(small.sum() * LARGE)


class Products(Matrices):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        x = g / 2.0
        gram = x @ x.mT
        y = 0.5 * gram + gram @ (gram * LARGE)
        p.add_((y @ (x * LARGE)) * 1e28)


class Alone(Matrices):
    """Products without any that follow them."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.add_((g @ g.mT).sum() * LARGE)


def in_new_thread(run: Callable[[], None]) -> None:
    """Run in a thread, which has new threads of OpenMP."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def with_workers(flush: bool, run: Callable[[], None]) -> None:
    """Run where the caller flushes denormals, or its threads do, not both."""

    def inside() -> None:
        torch.set_num_threads(2)
        try:
            if not torch.set_flush_denormal(not flush):
                pytest.skip("this processor cannot flush denormals")
            torch.ones(1 << 18).mul_(2.0)  # this begins the other thread
            torch.set_flush_denormal(flush)
            assert circumstances().workers == (flush, not flush)
            run()
        finally:
            torch.set_flush_denormal(False)

    before = torch.get_num_threads()
    try:
        in_new_thread(inside)
    finally:
        torch.set_num_threads(before)


@pytest.mark.family(4)
@pytest.mark.parametrize("flush", [False, True], ids=["keeps", "flushes"])
@pytest.mark.parametrize("chains", [True, False], ids=["chains", "batches"])
@pytest.mark.parametrize(
    ("make", "shapes"),
    [(Elements, MANY), (Sums, MANY), (Products, LED), (Alone, LED)],
    ids=["elements", "sums", "products", "alone"],
)
def test_small_tensors_are_treated_as_the_caller_does(
    make: Any,
    shapes: Any,
    chains: bool,
    flush: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not chains:
        monkeypatch.setattr(pipeline, "_chains", lambda *_: None)

    def steps() -> None:
        pair = Pair(make, shapes)
        for _ in range(3):
            pair.gradients()
            for p in (*pair.params, *pair.others):
                p.grad.mul_(SMALL)  # type: ignore[union-attr]
            pair.step()
            pair.check()
        for p in (*pair.params, *pair.others):
            assert p.isfinite().all()
        ways = {b.way for b in pair.report.batches}
        assert chains or CHAINED not in ways
        # what is compared holds more than zeros
        moved = sum(
            int((p != q).sum()) for p, q in zip(pair.params, start, strict=True)
        )
        assert flush or moved

    torch.manual_seed(0)
    start = Pair(make, shapes).params
    with_workers(flush, steps)


def test_the_threads_modes_are_read_once_for_each_way() -> None:
    def inside() -> None:
        torch.set_num_threads(2)
        torch.ones(1 << 18).mul_(2.0)
        assert circumstances().workers == (False, False)
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot flush denormals")
        try:
            assert circumstances().workers == (True, False)
        finally:
            torch.set_flush_denormal(False)
        torch.set_num_threads(1)
        assert circumstances().workers == ()

    before = torch.get_num_threads()
    try:
        in_new_thread(inside)
    finally:
        torch.set_num_threads(before)

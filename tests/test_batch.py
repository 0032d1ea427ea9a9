"""Like products of several lanes in one call: only with the same bits, in less time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from fuseopt.backend import fuseopt as backend
from fuseopt.capture import capture
from fuseopt.runtime import batch
from fuseopt.runtime.batch import Batch, Trials, aten, in_batches
from fuseopt.scheduler import schedule
from tests.steps import same_bits


def orthogonal(x: Tensor) -> Tensor:
    """Two steps of Newton and Schulz, in bfloat16."""
    x = x.bfloat16()
    for _ in range(2):
        gram = x @ x.T
        update = torch.addmm(gram, gram, gram, beta=-4.7, alpha=2.0)
        x = torch.addmm(x, update, x, beta=3.4)
    return x


def lanes(n: int = 4, shape: tuple[int, int] = (16, 24)) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        [torch.randn(shape, generator=generator) for _ in range(2)] for _ in range(n)
    ]


def graph_of(function: Callable[..., Any], *args: Any) -> tuple[Any, list[Any]]:
    """Dynamo's graph of a function and its arguments."""
    found: list[Any] = []

    def keep(gm: Any, inputs: Any) -> Any:
        found.append((gm, list(inputs)))
        return gm.forward

    with torch.no_grad():
        torch.compile(function, backend=keep)(*args)
    ((gm, inputs),) = found
    return gm, inputs


def steps_of(function: Callable[..., Any], *args: Any) -> list[Any]:
    captured = capture(*graph_of(function, *args))
    return in_batches(captured.graph, schedule(captured.graph), captured.calls)


def update(pairs: list[list[Tensor]]) -> None:
    for p, g in pairs:
        p.sub_(orthogonal(g * 0.1) * 0.5)


def test_like_products_of_lanes_stand_together() -> None:
    """Each product of an iteration needs the one before: two times three batches."""
    steps = steps_of(update, lanes())
    assert [len(s.members) for s in steps if isinstance(s, Batch)] == [4] * 6
    assert not any(hasattr(s, "payload") for s in steps)


def test_other_shapes_and_dtypes_do_not() -> None:
    mixed = [*lanes(2), *lanes(2, (24, 16)), *lanes(1, (8, 8))]
    sizes = {len(s.members) for s in steps_of(update, mixed) if isinstance(s, Batch)}
    assert sizes == {2}

    def in_float32(pairs: list[list[Tensor]]) -> None:
        for p, g in pairs:
            p.sub_(g @ g.T @ g)

    assert not any(isinstance(s, Batch) for s in steps_of(in_float32, lanes()))


def test_calls_that_change_memory_keep_their_order() -> None:
    def between(pairs: list[list[Tensor]]) -> None:
        for p, g in pairs:
            made = g.bfloat16() @ g.T.bfloat16()
            p.cumsum_(0)
            p[:, :16].sub_(made)

    steps = steps_of(between, lanes())
    for position, step in enumerate(steps):
        if isinstance(step, Batch):
            around = [s for s in steps[position - 1 : position + 2] if s is not step]
            assert all(not hasattr(s, "payload") for s in around)


class Clock:
    """Each interval is the next of `seconds`, again and again."""

    def __init__(self, *seconds: float) -> None:
        self.ticks = self._run(seconds)

    def _run(self, seconds: tuple[float, ...]) -> Iterator[float]:
        now = 0.0
        while True:
            for s in seconds:
                yield now
                now += s
                yield now

    def __call__(self) -> float:
        return next(self.ticks)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which way each product went."""
    ways: list[str] = []
    for name in ("as_one", "one_by_one"):
        way = getattr(batch, name)

        def told(*args: Any, name: str = name, way: Any = way) -> Any:
            ways.append(name)
            return way(*args)

        monkeypatch.setattr(batch, name, told)
    return ways


@pytest.mark.parametrize(
    ("one", "loop", "way"), [(1.0, 2.0, "as_one"), (1.9, 2.0, "one_by_one")]
)
def test_the_faster_way_is_taken(
    one: float, loop: float, way: str, taken: list[str]
) -> None:
    columns = [[torch.eye(4).bfloat16() for _ in range(3)] for _ in range(2)]
    trials = Trials(Clock(one, loop))
    trials.run(aten.mm.default, columns, {})
    assert taken[-1] == way
    taken.clear()
    trials.run(aten.mm.default, columns, {})
    assert taken == [way]  # no second trial


def test_other_bits_are_never_taken(
    taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def inexact(a: Tensor, b: Tensor) -> Tensor:
        return torch.bmm(a, b) * 1.01

    monkeypatch.setitem(batch.BATCHED, aten.mm.default, inexact)
    columns = [[torch.eye(4).bfloat16() for _ in range(3)] for _ in range(2)]
    Trials(Clock(1.0, 9.0)).run(aten.mm.default, columns, {})
    assert taken[-1] == "one_by_one"


@pytest.mark.parametrize("inner", [3, 8, 24])
@pytest.mark.parametrize("added", [False, True])
def test_sums_in_another_order_are_never_taken(
    inner: int, added: bool, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random numbers hide the order: rounding to 16 bits takes the difference away in
    all but one of thousands of elements, so that a step was other than eager's rarely.
    """

    def product(a: Tensor, b: Tensor, order: list[int]) -> Tensor:
        total = torch.zeros(())
        for k in order:
            total = total + a[..., :, k : k + 1].float() * b[..., k : k + 1, :].float()
        return total

    def there(*operands: Tensor) -> Tensor:
        *c, a, b = operands
        return (sum(c) + product(a, b, [*range(inner)])).bfloat16()

    def back(*operands: Tensor) -> Tensor:
        *c, a, b = operands
        return (sum(c) + product(a, b, [*range(inner)][::-1])).bfloat16()

    monkeypatch.setitem(batch.BATCHED, there, back)
    a, b, c = (torch.ones(s).bfloat16() for s in ((4, inner), (inner, 8), (4, 8)))
    columns = [[t] * 3 for t in ((c, a, b) if added else (a, b))]
    trials = Trials(Clock(1.0, 9.0))
    trials.run(there, columns, {})
    assert taken[-1] == "one_by_one"
    monkeypatch.setitem(batch.BATCHED, there, there)
    trials.known.clear()
    trials.run(there, columns, {})
    assert taken[-1] == "as_one"


def test_strides_that_differ_run_one_by_one(taken: list[str]) -> None:
    square = torch.randn(4, 4).bfloat16()
    columns = [[square, square.T], [square, square]]
    Trials(Clock(1.0, 9.0)).run(aten.mm.default, columns, {})
    assert taken == ["one_by_one"]


def test_a_trial_draws_no_random_numbers_of_the_users() -> None:
    before = torch.get_rng_state()
    columns = [[torch.eye(4).bfloat16() for _ in range(3)] for _ in range(2)]
    Trials().run(aten.mm.default, columns, {})
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("one", [1.0, 9.0])
def test_a_step_with_batches_has_eagers_bits(
    one: float, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever way is taken, batched results feed the kernels after them."""
    trials = Trials.__init__

    def with_clock(self: Trials) -> None:
        trials(self, Clock(one, 5.0))

    monkeypatch.setattr(Trials, "__init__", with_clock)
    mine, reference = lanes(), lanes()
    step = torch.compile(update, backend=backend)
    with torch.no_grad():
        for _ in range(3):
            step(mine)
            update(reference)
    for a, b in zip(chain(*mine), chain(*reference), strict=True):
        assert same_bits(a, b)
    assert taken[-1] == ("as_one" if one == 1.0 else "one_by_one")

"""An error at any place leaves a step whole: not begun, or done."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

import fuseopt
from fuseopt.compiler import pipeline
from fuseopt.runtime.batches import PreparedBatch
from fuseopt.runtime.memory import Memory
from fuseopt.runtime.undo import Undo
from tests.caller_states import WAYS, Twin, alike, held

PACKAGE = str(Path(fuseopt.__file__).parent)


class Injected(BaseException):
    """What no code of ours or of torch's expects."""


class Expected(RuntimeError):
    """What an ATen call may raise."""


class AtExtern:
    """Raises in place of the ATen call number `place`; counts them. Products of several
    lanes are one call.
    """

    def __init__(self, place: int) -> None:
        self.place, self.error = place, Injected if place % 2 else Expected
        self.count = 0
        self.where = "an extern"
        self.kept = Memory.run, PreparedBatch.run

    def __enter__(self) -> AtExtern:
        def counted(kept: Any) -> Any:
            def run(one: Any, other: Any) -> None:
                self.count += 1
                if self.count == self.place:
                    raise self.error
                kept(one, other)

            return run

        Memory.run, PreparedBatch.run = map(counted, self.kept)  # type: ignore
        return self

    def __exit__(self, *_: object) -> None:
        Memory.run, PreparedBatch.run = self.kept  # type: ignore[method-assign]


class AtFunction:
    """Raises where function number `place` of fuseopt's begins; counts them.

    What fuseopt takes for an error of its own would put all later steps in eager.
    """

    def __init__(self, place: int) -> None:
        self.place = place
        self.count = 0
        self.where = ""

    def __enter__(self) -> AtFunction:
        sys.settrace(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _see(self, frame: Any, event: str, _: Any) -> Any:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            # to put back is the answer to one error, and not to a second one
            if frame.f_code is not Undo.__exit__.__code__:
                self.count += 1
                if self.count == self.place:
                    self.where = frame.f_code.co_qualname
                    sys.settrace(None)
                    raise Injected
        return None


At = Callable[[int], Any]


class Stepped(Protocol):
    """An optimizer with parameters and gradients of its own."""

    params: list[Any]

    def step(self) -> Any: ...

    def set_grads(self) -> None: ...

    def held(self) -> list[Any]: ...


def at_each_place(kind: str, way: str, lanes: int, at: At, every: int = 1) -> int:
    """Raise an error at each place of a steady step in turn; returns how many there
    are.
    """
    return raised_at_each(Twin(kind, way, lanes), Twin(kind, "", lanes), at, every)


def raised_at_each(fused: Stepped, twin: Stepped, at: At, every: int = 1) -> int:
    """The same of two optimizers that are alike, of which the second is in eager."""

    def both() -> None:
        for x in (fused, twin):
            x.set_grads()
            x.step()

    for _ in range(4):
        both()
    place, done = 1, False
    while not done:
        fused.set_grads()
        twin.set_grads()
        grads = [p.grad.clone() for p in fused.params if p.grad is not None]
        before = fused.held()
        with at(place) as injected:
            try:
                fused.step()
                raised = False
            except (Injected, Expected):
                raised = True
        done = injected.count < place
        if raised and alike(fused.held(), before):
            # as before it: done again, it is eager's step
            for p, grad in zip(fused.params, grads, strict=True):
                p.grad = grad
            fused.step()
        twin.step()
        assert alike(fused.held(), twin.held()), injected.where
        place += every
        if place % 7 == 0:
            both()
            assert alike(fused.held(), twin.held()), injected.where
    return place


@pytest.mark.parametrize(
    ("kind", "way", "lanes"),
    [
        ("products", WAYS[0], 2),
        pytest.param("products", WAYS[1], 2, marks=pytest.mark.slow),
        pytest.param("products", WAYS[0], 18, marks=pytest.mark.slow),
        pytest.param("tail", WAYS[0], 2, marks=pytest.mark.slow),
        pytest.param("tail", WAYS[0], 18, marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_errors_of_aten_calls(
    kind: str, way: str, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Python makes each product."""
    monkeypatch.setattr(pipeline, "_chains", lambda *_: None)
    assert at_each_place(kind, way, lanes, AtExtern) > 4


@pytest.mark.parametrize(
    ("kind", "way", "lanes"),
    [
        ("products", WAYS[0], 2),
        pytest.param("products", WAYS[1], 18, marks=pytest.mark.slow),
        pytest.param("elementwise", WAYS[0], 4, marks=pytest.mark.slow),
        pytest.param("elementwise", WAYS[1], 18, marks=pytest.mark.slow),
        pytest.param("tail of AdamW", WAYS[0], 18, marks=pytest.mark.slow),
    ],
)
@pytest.mark.mishaps
@pytest.mark.filterwarnings("ignore")
def test_errors_of_python_calls(kind: str, way: str, lanes: int) -> None:
    """At every function of fuseopt's that a steady step enters."""
    at_each_place(kind, way, lanes, AtFunction)


def refused(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.cholesky(x @ x.T - 1e3 * torch.eye(len(x)))


@pytest.mark.parametrize("way", WAYS)
def test_an_error_of_the_step_s_own_leaves_it_undone(way: str) -> None:
    """Eager has written its momentum by then; a fused step has written nothing."""

    class Rooted(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                self.state[p]["b"].mul_(0.9).add_(p.grad)
                p.sub_(torch.linalg.cholesky(self.state[p]["b"]))
                self.state[p]["b"].mul_(0.5)

    params = [torch.nn.Parameter(torch.randn(4, 4)) for _ in range(2)]
    opt: Any = Rooted(params, {})
    for p in params:
        opt.state[p] = {"b": torch.eye(4)}
    options = {"eager_if_faster": False}
    step = (
        fuseopt.compile(opt, **options).step
        if way == WAYS[0]
        else torch.compile(opt.step, backend="fuseopt", options=options)
    )
    for t in range(4):
        for p in params:
            p.grad = torch.eye(4) * 0.1
        if t == 2:  # the root of the second parameter does not exist
            params[1].grad = -torch.eye(4) * 100
        before = held(opt)
        if t == 2:
            with pytest.raises(torch.linalg.LinAlgError):
                step()
            assert alike(held(opt), before)
        else:
            step()
            assert not alike(held(opt), before)


def test_nothing_is_put_back_once_all_is_written() -> None:
    t = torch.zeros(3)
    for done in (False, True):
        undo = Undo([t])
        with undo:
            t.add_(1)
            if done:
                undo.done()
            undo.__exit__(Injected)
        assert t.tolist() == [float(done)] * 3


def test_a_step_without_memory_for_copies_is_done() -> None:
    class Full(torch.Tensor):
        def clone(self, *_: Any, **__: Any) -> Any:
            raise torch.OutOfMemoryError("no memory")

    t = torch.zeros(3).as_subclass(Full)
    with Undo([t]):
        t.add_(1)
    assert functools.reduce(lambda a, b: a and b, (t == 1).tolist())

"""A plain optimizer and a compiled one, side by side, whose calls repeat the last."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

import fuseopt
from fuseopt.replicate.single_call import SingleCall
from fuseopt.replicate.steady import SteadyCall
from tests.beside import load
from tests.frozen import frozen, unlike

LANES = 18
SHAPES = ((4, 3), (5,), (2, 2, 2))
OWN = Path(__file__).parent / "own_steps.py"
#: A race with eager would do some of the calls.
OPTIONS = {"eager_if_faster": False}


class Side:
    """An optimizer of a module loaded for it alone."""

    def __init__(self, name: str, groups: int = 2) -> None:
        self.module: ModuleType = load(OWN)
        drawn = torch.Generator().manual_seed(7)
        self.ps: list[Any] = [
            torch.nn.Parameter(torch.randn(SHAPES[n % 3], generator=drawn))
            for n in range(LANES)
        ]
        half = LANES // 2
        parts = [self.ps[:half], self.ps[half:]] if groups == 2 else [self.ps]
        make = getattr(self.module, name)
        self.opt: Any = make([{"params": part} for part in parts])
        self.call: Callable[[], Any] = lambda: self.opt.step()
        self.turn = 0
        self.kept: Any = {}
        self.versions: list[int] = []

    def set_grads(self) -> None:
        """Give each parameter the gradient of this turn, in new memory."""
        for n, p in enumerate(self.ps):
            drawn = torch.Generator().manual_seed(1000 * self.turn + n)
            p.grad = None
            if p.requires_grad and p.is_leaf:
                p.grad = torch.randn(p.shape, generator=drawn).to(p.dtype)
        self.turn += 1
        self.versions = [p._version for p in self.ps]

    def take(self) -> BaseException | None:
        """Do one step; return what it raised."""
        try:
            self.call()
        except Exception as error:
            return error
        return None

    def frozen(self) -> dict[str, Any]:
        found = frozen(self.module, self.opt, self.ps)
        for n, p in enumerate(self.ps):
            if n < len(self.versions):
                found[f"counted {n}"] = p._version > self.versions[n]
        return found


class Counted:
    """Methods of classes, replaced within a context by functions that count calls."""

    def __init__(self, *replaced: tuple[type, str, Callable[..., Any]]) -> None:
        self._patches = [mock.patch.object(*x) for x in replaced]
        self._stack = ExitStack()

    def __enter__(self) -> Any:
        for patch in self._patches:
            self._stack.enter_context(patch)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class Count(Counted):
    """Counts the calls that a steady one did. `single`: those done by one call of C.

    `launched`: whether each attempt of such a call launched.
    """

    def __init__(self) -> None:
        self.done = self.tried = self.single = 0
        self.launched: list[bool] = []
        step, call, launched = SteadyCall.step, SingleCall.__call__, SingleCall.launched

        def counted(*args: Any) -> bool:
            self.tried += 1
            did = step(*args)
            self.done += did
            return did

        def counted_launch(*args: Any) -> bool:
            did = launched(*args)
            self.launched.append(did)
            self.tried += did
            self.done += did
            self.single += did
            return did

        def counted_single(*args: Any) -> bool:
            before = self.single
            did = call(*args)
            if did and self.single == before:  # by `SteadyCall.step`
                self.single += 1
            return did

        super().__init__(
            (SteadyCall, "step", counted),
            (SingleCall, "__call__", counted_single),
            (SingleCall, "launched", counted_launch),
        )


def by_compile(side: Side) -> None:
    fuseopt.compile(side.opt, **OPTIONS)
    side.call = lambda: side.opt.step()


def by_backend(side: Side) -> None:
    compiled = torch.compile(side.opt.step, backend="fuseopt", options=OPTIONS)
    side.call = lambda: compiled()


WAYS = {"compile": by_compile, "backend": by_backend}


class Pair:
    """Both sides, `calls` steady ones done."""

    def __init__(self, name: str, way: str, groups: int = 2) -> None:
        self.twin, self.mine = Side(name, groups), Side(name, groups)
        WAYS[way](self.mine)

    def both(self, do: Callable[[Side], Any]) -> None:
        for side in (self.twin, self.mine):
            do(side)

    def step(self, event: Callable[[Side], Any] | None = None) -> bool:
        """Do one step of both, after an event; return False if both raised."""
        self.both(Side.set_grads)
        if event is not None:
            self.both(event)
        want, got = self.twin.take(), self.mine.take()
        found = [*unlike(self.mine.frozen(), self.twin.frozen())]
        if want is not None or got is not None:
            assert type(got) is type(want), (want, got, found)
            return False
        assert not found, found[:3]
        return True

    def outlive(self, event: Callable[[Side], Any]) -> None:
        """Do a step after an event, and three more; stop where both raise."""
        if self.step(event):
            for _ in range(3):
                if not self.step():
                    break

    def warm(self, count: Count, calls: int = 8) -> None:
        """Do steps until a call was steady."""
        for _ in range(calls):
            before = count.done
            self.step()
        assert count.done == before + 1, "the last call was not steady"

    def end(self) -> None:
        for side in (self.twin, self.mine):
            sys.modules.pop(side.module.__name__, None)

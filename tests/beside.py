"""Two runs of one optimizer, a plain one and a compiled one, that must not differ.

Each loads the optimizer's module anew, so that they share nothing. After every step all
that either holds is compared (see tests/frozen.py).
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException
from torch.optim import Optimizer

import fuseopt
from fuseopt.compiler.session import session
from fuseopt.errors import FuseoptError
from tests.frozen import frozen, unlike


class Silent(AssertionError):
    """A step gave something else than eager's, and said nothing."""

    def kind(self) -> str:
        """What of it differs first, in a word."""
        return str(self).partition("): ")[2].partition(" ")[0]


class Loud(AssertionError):
    """A step raised what eager's does not, or did not raise what it does."""


def plain(opt: Optimizer) -> Callable[[], Any]:
    return opt.step


def backend(opt: Optimizer) -> Callable[[], Any]:
    return torch.compile(opt.step, backend="fuseopt")


def apart(opt: Optimizer) -> Callable[[], Any]:
    fuseopt.compile(opt)
    return lambda: opt.step()


def inside(opt: Optimizer) -> Callable[[], Any]:
    """A function of the user's is compiled, and Dynamo traces the step within it."""

    def train() -> None:
        opt.step()

    return torch.compile(train, backend="fuseopt")


def dynamo(opt: Optimizer) -> Callable[[], Any]:
    """Dynamo alone: is a difference of its making?"""
    return torch.compile(opt.step, backend="eager")


WAYS = {"backend": backend, "compile": apart, "inside": inside}
#: The first two are one path (tests/isolate/test_one_way.py); these are two.
PATHS = ("compile", "inside")

_loaded = 0


def load(path: Path) -> ModuleType:
    """The module of a file, another one at each call."""
    global _loaded
    _loaded += 1
    spec = importlib.util.spec_from_file_location(f"{path.stem}_{_loaded}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where Dynamo looks for the globals of its code
    spec.loader.exec_module(module)
    return module


@dataclass
class Run:
    """One optimizer, its parameters, what a user does to them before each step."""

    module: ModuleType
    ps: list[Any]
    opt: Any
    before: Callable[[int], None]
    step: Callable[[], Any] = lambda: None

    def prepare(self, turn: int) -> str:
        """Fresh gradients, and what the user does; the name of what that raised."""
        for n, p in enumerate(self.ps):
            drawn = torch.Generator().manual_seed(1000 * turn + n)
            grad = torch.randn(p.shape, generator=drawn).to(p.dtype)
            p.grad = grad if turn != 1 or n % 7 else torch.zeros_like(grad)
        try:
            self.before(turn)
        except Exception as error:
            return type(error).__name__
        return ""

    def take(self) -> Exception | None:
        """One step; what it raised."""
        try:
            self.step()
        except Exception as error:
            return error
        return None

    def frozen(self) -> dict[str, Any]:
        return frozen(self.module, self.opt, self.ps)


def refusal(error: BaseException | None) -> bool:
    """Is it fuseopt's own, whatever Dynamo wrapped it in?"""
    while error is not None:
        if isinstance(error, FuseoptError):
            return True
        error = getattr(error, "inner_exception", None) or error.__cause__
    return False


def outcome() -> str:
    """What became of the last step that was compiled: led, whole, eager and why."""
    told = fuseopt.reports()
    if told and "they stand for" in told[-1].traced:
        return "led"
    if any(not r.fallback for r in told):
        return "whole"
    if told:
        return f"eager: {told[-1].fallback}"
    # what is told of a step of which Dynamo gives no graph
    return "eager: " + next(iter(session.warned), "Dynamo gave no graph")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A fresh Dynamo, its warnings and logs unseen: a fallback is no failure here."""
    torch._dynamo.reset()
    session.reset()
    kept = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(kept)
        torch.set_grad_enabled(True)
        torch._dynamo.reset()


def beside(
    path: Path,
    build: Callable[[ModuleType], Run],
    way: Callable[[Optimizer], Callable[[], Any]],
    turns: int,
) -> str:
    """Both runs side by side: what became of the step. Raises Silent, Loud.

    "led", "whole" or "eager: why": the bits of eager, and all else. "refused: why": an
    error of fuseopt's, or ("dynamo") of Dynamo's, and nothing was written. "raised":
    eager's.
    """
    with quiet(), contextlib.ExitStack() as after:
        runs = []
        for how in (plain, way):
            module = load(path)
            after.callback(sys.modules.pop, module.__name__)
            runs.append(build(module))
            runs[-1].step = how(runs[-1].opt)
        twin, mine = runs
        for turn in range(turns):
            raised = mine.prepare(turn), twin.prepare(turn)
            if raised[0] != raised[1]:
                raise Silent(f"before step {turn}: {raised[0]}, in eager {raised[1]}")
            before = mine.frozen()
            want, got = twin.take(), mine.take()
            if got is not None and want is None:
                for what in unlike(mine.frozen(), before):
                    raise Silent(f"step {turn} was refused ({got}); yet {what}")
                if refusal(got):
                    return f"refused: {got}"
                if isinstance(got, TorchDynamoException):
                    return "dynamo"
            if want is not None and isinstance(got, (type(want), TorchDynamoException)):
                return "raised"
            if want is not None or got is not None:
                raise Loud(f"step {turn} raised {got!r}, in eager {want!r}") from got
            for what in unlike(mine.frozen(), twin.frozen()):
                raise Silent(f"after step {turn} ({outcome()}): {what}")
        return outcome()

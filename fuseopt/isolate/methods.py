"""Bound method that replaces `optimizer.step` after fuseopt.compile."""

from __future__ import annotations

import functools
import inspect
import sys
import types
import weakref
from typing import Any

from torch.optim import Optimizer


class Step:
    """A bound method that does not keep its optimizer alive.

    Until its first call it does, since nothing else may hold the optimizer. Later it
    does while objects other than the optimizer and the caller hold the method. Pickled
    or copied along with an optimizer, it becomes the `step` of the class.
    """

    def __init__(self, optimizer: Optimizer, function: Any) -> None:
        functools.update_wrapper(self, function)
        self.__func__ = function
        self.__signature__ = inspect.signature(types.MethodType(function, optimizer))
        self._owner = weakref.ref(optimizer)
        self._kept: Optimizer | None = optimizer

    @property
    def __self__(self) -> Optimizer | None:
        return self._owner()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = self._owner()
        if self._kept is not None and sys.getrefcount(self) <= _ALONE:
            self._kept = None
        if owner is None:
            raise ReferenceError("the optimizer of this step no longer exists")
        return self.__func__(owner, *args, **kwargs)

    def __reduce__(self) -> Any:
        return _plain_step, (self._owner(),)

    def __repr__(self) -> str:
        return f"<compiled step of {self._owner()!r}>"


class HeldStep(Step):
    """A bound method, which keeps its optimizer alive as bound methods do.

    A later scheduler wraps `optimizer.step`; it counts a call of this method as a step
    too.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = self._kept
        assert owner is not None
        if hasattr(owner.step, "_wrapped_by_lr_sched"):
            owner._opt_called = True  # type: ignore[attr-defined]
        return self.__func__(owner, *args, **kwargs)


class _Counts:
    """Counts the references to a method that only its owner and its caller hold."""

    def __call__(self) -> int:
        return sys.getrefcount(self)


_HOLDER = types.SimpleNamespace(step=_Counts())
_ALONE: int = _HOLDER.step()


def _plain_step(optimizer: Optimizer) -> Any:
    return types.MethodType(type(optimizer).step, optimizer)

"""What `optimizer.step` is where its function is compiled apart: a bound method."""

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

    But until its first call, since the optimizer may be nobody else's; and from then
    on if the method itself is held by more than the optimizer and its caller. Pickled
    or copied along with an optimizer, it becomes the class's own `step`.
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

    A scheduler that is made later marks the optimizer's own `step`; a call of this one
    is a step to it as well.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = self._kept
        assert owner is not None
        if hasattr(owner.step, "_wrapped_by_lr_sched"):
            owner._opt_called = True  # type: ignore[attr-defined]
        return self.__func__(owner, *args, **kwargs)


class _Counts:
    """Says how many references there are to a method of which nobody keeps hold."""

    def __call__(self) -> int:
        return sys.getrefcount(self)


_HOLDER = types.SimpleNamespace(step=_Counts())
_ALONE: int = _HOLDER.step()


def _plain_step(optimizer: Optimizer) -> Any:
    return types.MethodType(type(optimizer).step, optimizer)

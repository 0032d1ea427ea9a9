"""Find steps for which Dynamo's trace, without a guard, would differ from Python.

Such a step runs in eager, and the reason is reported.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from .. import compat
from .code_paths import every_code

#: Attributes of tensors that Dynamo treats as constants without a guard.
UNGUARDED = frozenset({"_version"})
#: Methods of an optimizer that run at each use of an attribute.
HOOKS = frozenset({"__getattribute__", "__setattr__", "__delattr__"})


def untraceable(optimizer: Optimizer) -> str:
    """Return the reason why Dynamo's trace of a step would differ from Python.

    Returns "" if the trace is right.
    """
    for group in optimizer.param_groups:
        for key, value in group.items():
            if compat.acts_otherwise(value):
                kind = type(value)
                base = next(x for x in kind.__mro__ if x.__module__ == "builtins")
                return (
                    f"the group's {key!r} is a {kind.__module__}.{kind.__qualname__}, "
                    f"which defines its own operators; set it as {base.__name__}(...) "
                    "instead, so that the step can be compiled"
                )
        for kind in {type(p) for p in group["params"]}:
            if _has_functions(kind):
                return f"a parameter is a {kind.__name__}, which changes what calls do"
    for kind in _own_kinds(optimizer):
        for name in sorted(HOOKS & vars(kind).keys()):
            return f"{kind.__name__} defines {name}, which Dynamo does not follow"
    for name in sorted(UNGUARDED & set(_names(optimizer))):
        return f"its step reads {name!r} of tensors, which Dynamo does not follow"
    return ""


def _own_kinds(optimizer: Optimizer) -> Iterator[type]:
    """Yield the classes of an optimizer outside of torch."""
    kinds = type(optimizer).__mro__
    for kind in kinds[: kinds.index(Optimizer)]:
        if not kind.__module__.startswith("torch."):
            yield kind


def _has_functions(kind: type[torch.Tensor]) -> bool:
    """Does a tensor class define `__torch_function__` and no `__torch_dispatch__`?"""
    attribute = getattr(kind, "__torch_function__", None)
    plain: Any = (
        torch.Tensor.__torch_function__,
        torch.nn.Parameter.__torch_function__,
        compat.NO_FUNCTION,
    )
    function = getattr(attribute, "__func__", attribute)
    if any(function is getattr(x, "__func__", x) for x in plain):
        return False
    dispatch: Any = kind.__torch_dispatch__
    plain_dispatch: Any = torch.Tensor.__torch_dispatch__
    return bool(dispatch is plain_dispatch)


def _names(optimizer: Optimizer) -> Iterator[str]:
    """Yield all names in the methods of an optimizer's own classes."""
    for kind in _own_kinds(optimizer):
        for value in vars(kind).values():
            if isinstance(value, (staticmethod, classmethod)):
                value = value.__func__
            if not isinstance(value, types.FunctionType):
                continue
            function = inspect.unwrap(value)
            if isinstance(function, types.FunctionType):
                for code in every_code(function.__code__):
                    yield from code.co_names

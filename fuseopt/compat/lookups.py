"""Refuse attributes that user code computes, where Dynamo runs that code more often.

Python runs a property once for `getattr(x, "rate", 1.0)` or `hasattr(x, "rate")`.
Dynamo traces it twice, and its guard runs it again at each call.
"""

from __future__ import annotations

import inspect
import sys
from types import FunctionType
from typing import Any

from .guards import guard
from .hooks import all_kinds, is_ours
from .leaving import refuse
from .names import attribute_of, find
from .patches import Hook, Patcher

#: Homes of code whose lookups have no effects.
TRUSTED = frozenset({"torch", "numpy", "fuseopt", *sys.stdlib_module_names})
_MISSING = object()


@guard("refused-lookups", "attributes that user code computes are refused where needed")
def LOOKUPS(patcher: Patcher) -> None:
    """Refuse to test for an attribute that code computes, and any such attribute of an
    optimizer, which a stand-in may replace.
    """
    objects = find("torch._dynamo.variables.user_defined:UserDefinedObjectVariable")
    optimizer = find("torch._dynamo.variables.optimizer:OptimizerVariable")
    read = attribute_of(optimizer, "tp_getattro_impl", "var_getattr")

    def check_name(original: Hook, self: Any, tx: Any, name: str) -> Any:
        if is_ours(tx) and computes(self.value, name):
            refuse(tx, f"it tests for {name!r}, which {_kind(self)} computes in code")
        return original(self, tx, name)

    def read_attribute(original: Hook, self: Any, tx: Any, name: str) -> Any:
        if is_ours(tx) and _is_made(self.value, name):
            refuse(tx, f"it reads {name!r}, which {_kind(self)} makes in __getattr__")
        return original(self, tx, name)

    for kind in set(all_kinds(objects)):
        if "call_obj_hasattr" in vars(kind):
            patcher.around(kind, "call_obj_hasattr", check_name, "self", "tx", "name")
    patcher.around(optimizer, read, read_attribute, "self", "tx", "name")


def _kind(variable: Any) -> str:
    return type(variable.value).__name__


def computes(value: Any, name: str) -> bool:
    """Does user code compute an attribute of an object?"""
    static = inspect.getattr_static(type(value), name, _MISSING)
    if isinstance(static, property):
        return _is_users(static.fget)
    if static is not _MISSING:
        return _is_users(inspect.getattr_static(type(static), "__get__", None))
    return _is_made(value, name)


def _is_made(value: Any, name: str) -> bool:
    """Does user code answer for an attribute that an object and its class lack?"""
    kind = type(value)
    if _is_users(inspect.getattr_static(kind, "__getattribute__", None)):
        return True
    if not _is_users(inspect.getattr_static(kind, "__getattr__", None)):
        return False
    return inspect.getattr_static(value, name, _MISSING) is _MISSING


def _is_users(function: Any) -> bool:
    """Is it a function of Python outside of torch and the standard library?"""
    if not isinstance(function, FunctionType):
        return False
    return (function.__module__ or "").partition(".")[0] not in TRUSTED

"""Recognize containers of the user in which a lookup or copy runs none of the user's
code.

A dict hashes and compares its keys; a defaultdict calls its factory for a missing item.
Eager runs the user's code for these once. So code that inspects a step in advance, or
copies an optimizer's containers, must not run it a second time.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Iterable
from typing import Any

#: Factories that make a new object without side effects.
FACTORIES = (
    *(list, dict, set, frozenset, tuple, int, float, complex, bool, str, bytes),
    *(collections.OrderedDict, collections.deque, collections.Counter),
)
IN_C = (types.WrapperDescriptorType, types.MethodDescriptorType)
#: Modules whose classes compare and hash in Python without side effects.
PURE = ("enum", "torch")


def acts_when_copied(container: Any) -> str:
    """Describe the user's code that runs when a dict or a set is copied; "" if none."""
    if isinstance(container, (dict, set, frozenset)):
        kind = _acting_class(container)
        if kind:
            return f"has keys of the class {kind}, which defines their comparison"
    return ""


def lookup_effect(container: Any) -> str:
    """Describe the user's code that a copy or a lookup of an item runs; "" if none."""
    if isinstance(container, collections.defaultdict):
        makes: Any = container.default_factory
        if makes is not None and not any(makes is x for x in FACTORIES):
            return "has a function that makes missing items"
    return acts_when_copied(container)


def _acting_class(keys: Iterable[Any]) -> str:
    """Return the name of a key class that defines its own hash or comparison, or ""."""
    for kind in {*map(type, keys)}:
        if not (_is_pure(kind, "__hash__") and _is_pure(kind, "__eq__")):
            return str(kind.__name__)
    for key in keys:
        if isinstance(key, (tuple, frozenset)):
            within = _acting_class(key)
            if within:
                return within
    return ""


def _is_pure(kind: type, name: str) -> bool:
    """Is a method from C, or from a module whose methods have no side effects?"""
    method = next((vars(c)[name] for c in kind.__mro__ if name in vars(c)), None)
    if method is None or isinstance(method, IN_C):
        return True
    home = method.__module__ if isinstance(method, types.FunctionType) else ""
    return str(home).partition(".")[0] in PURE

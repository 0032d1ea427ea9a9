"""Which containers of a user's are tables: looking into them runs no code of theirs.

A dict asks its keys for their hashes, and compares keys; a defaultdict calls what makes
a missing item. What the user's code does there, it does once in eager: nothing that
looks at a step beforehand, or has a copy of what an optimizer holds, may call it.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Iterable
from typing import Any

#: What makes something new and does nothing else.
FACTORIES = (
    *(list, dict, set, frozenset, tuple, int, float, complex, bool, str, bytes),
    *(collections.OrderedDict, collections.deque, collections.Counter),
)
IN_C = (types.WrapperDescriptorType, types.MethodDescriptorType)
#: Modules whose classes compare and hash in Python, without effects.
PURE = ("enum", "torch")


def acts_when_copied(container: Any) -> str:
    """What code of the user's runs where a dict or a set is copied key by key; "" if
    none does.
    """
    if isinstance(container, (dict, set, frozenset)):
        kind = _acting_class(container)
        if kind:
            return f"has keys of the class {kind}, which defines their comparison"
    return ""


def acts_when_asked(container: Any) -> str:
    """What code of the user's runs where a container is copied, or an item of it is
    looked up; "" if none does.
    """
    if isinstance(container, collections.defaultdict):
        makes: Any = container.default_factory
        if makes is not None and not any(makes is x for x in FACTORIES):
            return "has a function that makes missing items"
    return acts_when_copied(container)


def _acting_class(keys: Iterable[Any]) -> str:
    """The name of a class of keys that hashes or compares by code of its own, or ""."""
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
    """Is a method of a class one of C, or one of a module whose methods do nothing?"""
    method = next((vars(c)[name] for c in kind.__mro__ if name in vars(c)), None)
    if method is None or isinstance(method, IN_C):
        return True
    home = method.__module__ if isinstance(method, types.FunctionType) else ""
    return str(home).partition(".")[0] in PURE

"""Look up what torch does not promise, by name; every such name stands in a call here.

    find("torch._dynamo.guards:GuardBuilder.ID_MATCH")

A test reads the package's code: no other line names a private part of torch, so that
the names found there are all that there are.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

#: What tests take away, as if a torch of tomorrow had renamed it.
HIDDEN: set[str] = set()
_RAISE: Any = object()


class Missing(Exception):
    """Torch lacks a name, or has something else under it."""


def find(path: str, default: Any = _RAISE) -> Any:
    """What torch has at "module:Name.attribute".

    Raises Missing where torch lacks the module or the name, unless there is a default.
    """
    try:
        return _found(path)
    except (ImportError, AttributeError, Missing):
        if default is not _RAISE:
            return default
        raise Missing(f"torch has no {path.replace(':', '.')}") from None


def _found(path: str) -> Any:
    if path in HIDDEN:
        raise Missing(path)
    module, _, names = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in names.split(".") if names else ():
        found = getattr(found, name)
    return found


def either(*paths: str) -> Any:
    """What torch has at the first of these places where it has anything.

    Raises Missing, which names the first place.
    """
    for path in paths[1:] and paths:
        found = find(path, None)
        if found is not None:
            return found
    return find(paths[0])


def attribute_of(owner: Any, *names: str) -> str:
    """The first of these names that an object of torch's has. Raises Missing."""
    where = getattr(owner, "__qualname__", None) or getattr(owner, "__name__", owner)
    for name in names:
        if f"{where}.{name}" not in HIDDEN and hasattr(owner, name):
            return name
    raise Missing(f"{where} has no {names[0]}")


def takes(function: Any, *names: str) -> None:
    """Check that a function's first parameters have these names.

    Raises Missing where they have others, or its signature cannot be read.
    """
    parameters = parameters_of(function)
    if parameters[: len(names)] != [*names]:
        where = getattr(function, "__qualname__", function)
        raise Missing(
            f"{where} takes ({', '.join(parameters)}), not ({', '.join(names)}, ...)"
        )


def parameters_of(function: Any) -> list[str]:
    """The names of a function's parameters in order; ["?"] where they are not known."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None)
    if code is not None:  # as `inspect.signature` reads them, in a tenth of the time
        return [*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
    try:
        return [*inspect.signature(function).parameters]
    except (TypeError, ValueError):
        return ["?"]

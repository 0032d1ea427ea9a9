"""Look up private parts of torch by name; every such name is in a call of `find`.

    find("torch._dynamo.guards:GuardBuilder.ID_MATCH")

A test reads the package's code: no other line names a private part of torch. So these
calls have all such names.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

#: Names that tests hide, as if a future torch had renamed them.
HIDDEN: set[str] = set()
_RAISE: Any = object()


class Missing(Exception):
    """Torch lacks a name, or has another kind of object under it."""


def find(path: str, default: Any = _RAISE) -> Any:
    """Return the object of torch at "module:Name.attribute".

    Raises Missing if torch lacks the module or the name, unless there is a default.
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
    """Return the object at the first of these places that exists.

    Raises Missing, which names the first place.
    """
    for path in paths[1:] and paths:
        found = find(path, None)
        if found is not None:
            return found
    return find(paths[0])


def attribute_of(owner: Any, *names: str) -> str:
    """Return the first of these names that an object of torch has. Raises Missing."""
    where = getattr(owner, "__qualname__", None) or getattr(owner, "__name__", owner)
    for name in names:
        if f"{where}.{name}" not in HIDDEN and hasattr(owner, name):
            return name
    raise Missing(f"{where} has no {names[0]}")


def takes(function: Any, *names: str) -> None:
    """Check that a function's first parameters have these names.

    Raises Missing if they differ, or if its signature cannot be read.
    """
    parameters = parameters_of(function)
    if parameters[: len(names)] != [*names]:
        where = getattr(function, "__qualname__", function)
        raise Missing(
            f"{where} takes ({', '.join(parameters)}), not ({', '.join(names)}, ...)"
        )


def parameters_of(function: Any) -> list[str]:
    """Return the names of a function's parameters in order, or a list of a question
    mark.

    The latter represents a signature that cannot be read.
    """
    function = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None)
    if code is not None:  # as `inspect.signature` reads them, in a tenth of the time
        return [*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
    try:
        return [*inspect.signature(function).parameters]
    except (TypeError, ValueError):
        return ["?"]

"""Values that hang on an optimizer and keep its step from being traced on a shadow.

Users attach schedulers, models and notes to an optimizer during training, and remove
them again. A Hindrance records the place of such a value, so that each call can check
whether it is still there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer

from ..inputs.keys import OddValue

Path = tuple[Any, ...]
_GONE = object()


class Hindrance:
    """A value of the type `kind` at a place of an optimizer.

    The place is the name of an attribute, then keys and indices.
    """

    def __init__(self, path: Path, kind: type) -> None:
        self._path = path
        self._kind = kind

    def stands(self, optimizer: Optimizer) -> bool:
        """Is there still a value of this type, the type that prevented the trace?"""
        x: Any = vars(optimizer)
        for key in self._path:
            # dict.get adds no entry to a defaultdict
            if isinstance(x, dict):
                x = dict.get(x, key, _GONE)
            elif isinstance(x, (list, tuple)) and key in range(len(x)):
                x = x[key]
            else:
                return False
        return type(x) is self._kind


#: A reason that no user can remove: an optimizer always has attributes.
LASTING = Hindrance((), dict)


def hindrance_of(error: Exception, optimizer: Optimizer) -> Hindrance:
    """Return the value on an optimizer that caused an error.

    Returns LASTING for an error other than an OddValue of this optimizer.
    """
    if isinstance(error, OddValue):
        for path, x, holder in _held(optimizer):
            if x is error.value and (error.within is None or error.within is holder):
                return Hindrance(path, type(x))
    return LASTING


def _held(optimizer: Optimizer) -> Iterator[tuple[Path, Any, Any]]:
    """Yield all that an optimizer holds, at any depth: (path, value, holder)."""
    seen: set[int] = set()
    pending: list[tuple[Path, Any, Any]] = [((), vars(optimizer), None)]
    while pending:
        path, x, holder = pending.pop()
        yield path, x, holder
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, dict):
            pending += [((*path, key), y, x) for key, y in x.items()]
        elif isinstance(x, (list, tuple)):
            pending += [((*path, i), y, x) for i, y in enumerate(x)]

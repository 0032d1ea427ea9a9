"""What a recording depends on outside of the optimizer, and whether that holds."""

from __future__ import annotations

import abc
import collections
import math
import operator
from typing import Any

import torch

from .numbers import Refused

PLAIN = (
    *(int, float, bool, complex, str, bytes, type(None), type(...), torch.dtype),
    *(torch.device, torch.Size, torch.layout, torch.memory_format),
)
#: Types of containers whose contents are compared at each call.
TABLES = (
    *(list, dict, set, frozenset, tuple, collections.OrderedDict),
    *(collections.defaultdict, collections.deque, collections.Counter),
)
#: Modules and classes of which every name is compared.
SHARED = (math, operator, torch.Tensor, torch.Tensor.__mro__[1], torch.nn.Parameter)
#: Stands for a name that there is not.
MISSING = object()


def frozen(x: Any, depth: int = 0) -> Any:
    """Plain contents, as a value that compares types too. Raises Refused."""
    kind = type(x)
    if kind in PLAIN:
        return kind, repr(x)
    if kind not in TABLES or depth > 8:
        raise Refused(f"a table holds a {kind.__name__}")
    if isinstance(x, dict):
        return kind, [
            (frozen(k, depth + 1), frozen(v, depth + 1)) for k, v in x.items()
        ]
    items = [frozen(y, depth + 1) for y in x]
    return kind, sorted(items, key=repr) if kind in (set, frozenset) else items


def containers(x: Any) -> list[Any]:
    """A table, and the containers within it that can change."""
    found = [x] if isinstance(x, (list, dict, set, collections.deque)) else []
    if type(x) in TABLES:
        for y in x.values() if isinstance(x, dict) else x:
            found += containers(y)
    return found


class Facts:
    """What must be as it was: names in dicts, cells, functions, tables."""

    def __init__(self) -> None:
        self.names: list[tuple[Any, str, Any]] = []
        self.cells: list[tuple[Any, Any]] = []
        self.functions: list[tuple[Any, Any]] = []
        self.tables: list[tuple[Any, Any]] = []
        self.classes: list[tuple[type, Any]] = []
        self.containers: set[int] = set()  # ids of tables, and of those within them
        self.token = abc.get_cache_token()
        self.modes = modes()
        #: what everybody uses and somebody may patch
        self.shared = [(x, [*x.values()]) for x in map(vars, SHARED)]

    def hold(self) -> bool:
        """Is all of it as it was?"""
        try:
            return (
                all(vars(o).get(n, MISSING) is x for o, n, x in self.names)
                and all(cell_of(c) is x for c, x in self.cells)
                and all(parts(f) == x for f, x in self.functions)
                and all(c.__mro__ == x for c, x in self.classes)
                and all(frozen(t) == x for t, x in self.tables)
                and self.token == abc.get_cache_token()
                and self.modes == modes()
                and all(_same_values(x, known) for x, known in self.shared)
            )
        except Refused:
            return False


def _same_values(names: Any, known: list[Any]) -> bool:
    return len(names) == len(known) and all(map(operator.is_, names.values(), known))


def modes() -> Any:
    """The modes of torch's that the results of calls depend on."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise Refused("autocast is on")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
    )


def cell_of(cell: Any) -> Any:
    """The content of a cell."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def parts(function: Any) -> Any:
    """What a function does, by identity."""
    return (
        id(function.__code__),
        tuple(map(id, function.__defaults__ or ())),
        tuple([(k, id(v)) for k, v in (function.__kwdefaults__ or {}).items()]),
    )

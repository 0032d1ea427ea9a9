"""Do dicts and lists hold the objects that they held? Asked of all in one C call."""

from __future__ import annotations

import collections
import ctypes
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from ... import compat
from .library import Held
from .tensors import address

#: Containers that the compiled helper may go through.
CONTAINERS = frozenset({dict, list, collections.defaultdict})


def told(
    struct: Held,
    containers: Sequence[Any],
    lengths: Iterable[int],
    items: Sequence[Any],
) -> list[array[int]]:
    """Let a struct know what containers hold; returns what it points to.

    `lengths`: how many entries or items each holds. `items`: those of each in turn, of
    a dict its keys, then its values. The caller keeps alive containers and items, and
    what is returned.
    """
    sizes = [
        n if isinstance(x, dict) else -1 - n
        for x, n in zip(containers, lengths, strict=True)
    ]
    arrays = [
        array("Q", map(id, containers)),
        array("q", sizes),
        array("Q", bytes(8 * len(containers))),
        array("Q", map(id, items)),
    ]
    at = map(address, arrays)
    struct.containers, struct.sizes, struct.versions, struct.items = at
    struct.version = compat.dict_version()
    struct.n = len(containers)
    return arrays


class Holdings:
    """What some containers held. `helper`: the library of the guards, built.

    `containers` are of CONTAINERS; `lengths`, `items`: as in `told`.
    """

    def __init__(
        self,
        helper: ctypes.PyDLL,
        containers: Sequence[Any],
        lengths: Sequence[int],
        items: Sequence[Any],
    ) -> None:
        struct = Held()
        arrays = told(struct, containers, lengths, items)
        self._keep = struct, containers, items, arrays
        self._call = helper.fuseopt_holds
        self._call.restype, self._call.argtypes = ctypes.c_int64, [ctypes.c_void_p]
        #: where the struct lies
        self.where = ctypes.addressof(struct)

    def same(self) -> bool:
        """Do they hold the same objects still?"""
        return bool(self._call(self.where))

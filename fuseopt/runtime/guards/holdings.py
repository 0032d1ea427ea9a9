"""Compare the contents of dicts and lists with a record of them, in one C call."""

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
    """Record the contents of containers in a struct; returns the arrays it points to.

    `lengths`: the number of entries or items of each. `items`: those of all in turn, of
    a dict its keys, then its values. The caller keeps alive containers, items and the
    arrays.
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
    addresses = map(address, arrays)
    struct.containers, struct.sizes, struct.versions, struct.items = addresses
    struct.version = compat.dict_version()
    struct.n = len(containers)
    return arrays


class Holdings:
    """A record of the contents of containers. `helper`: the guards' library, built.

    `containers`: of the types in CONTAINERS; `lengths`, `items`: as in `told`.
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
        #: the address of the struct
        self.where = ctypes.addressof(struct)

    def same(self) -> bool:
        """Do the containers still hold the same objects?"""
        return bool(self._call(self.where))

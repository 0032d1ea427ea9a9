"""Read dicts as CPython keeps them: their version (PEP 509), and that of a class."""

from __future__ import annotations

import collections
import ctypes
import functools
import gc
import sys
from operator import is_
from typing import Any

from .capability import cached, probed
from .names import Missing


@probed(
    "dict-versions",
    "the version of a dict shows that nothing wrote to it (PEP 509)",
    "dicts are compared item by item: some microseconds more a call",
    expected=True,
)
def VERSIONS() -> None:
    if not _version_place():
        raise Missing(f"Python {sys.version_info[0]}.{sys.version_info[1]} has none")


#: Versions of CPython whose every write to a dict gives it a version that no dict of
#: the process had before (PEP 509). Later ones keep something else there, or nothing.
VERSIONED = ((3, 10), (3, 11), (3, 12))


@cached
def dict_version() -> int:
    """Return the byte offset of the version in a dict's memory; 0 if there is none.

    A version has 8 bytes. A dict with an unchanged version has unchanged contents. The
    probe tries each way to change a dict, and a dict that stays unchanged.
    """
    if not VERSIONS.available():
        return 0
    return _version_place()


@functools.cache
def _version_place() -> int:
    if sys.version_info[:2] not in VERSIONED or sys.implementation.name != "cpython":
        return 0
    if ctypes.sizeof(ctypes.c_void_p) != ctypes.sizeof(ctypes.c_uint64):
        return 0
    # the version follows the size
    at = object.__basicsize__ + ctypes.sizeof(ctypes.c_ssize_t)
    return at if _holds(at) else 0


def _holds(at: int) -> bool:
    """Does the word at this offset change at each write, and only then?"""
    for kind in (dict, collections.defaultdict):
        sample: Any = kind()
        word = ctypes.c_uint64.from_address(id(sample) + at)
        sample.update({i: object() for i in range(3)})
        seen = {word.value}
        for name, *args in _CHANGES:
            getattr(sample, name)(*args)
            seen.add(word.value)
        before = word.value
        sample.get(1)
        [*sample.items()]
        if len(seen) != 1 + len(_CHANGES) or word.value != before:
            return False
    return True


#: Calls that change a dict with the keys 0, 1 and 2.
_CHANGES: tuple[tuple[Any, ...], ...] = (
    ("__setitem__", 0, "another"),
    ("__setitem__", 7, "new"),
    ("update", {1: "another"}),
    ("pop", 7),
    ("__delitem__", 0),
    ("setdefault", 8, "new"),
    ("popitem",),
    ("__ior__", {9: "new"}),
    ("clear",),
)


def dict_of_class(kind: type) -> dict[str, Any] | None:
    """Return the dict of a class, of which `vars(kind)` is a read-only view.

    Relies on the collector, which lists what the view refers to. Returns None if that
    is anything but one dict with the same items.
    """
    found = gc.get_referents(vars(kind))
    if len(found) != 1 or type(found[0]) is not dict:
        return None
    same = all(map(is_, found[0].values(), vars(kind).values()))
    return found[0] if same and [*found[0]] == [*vars(kind)] else None

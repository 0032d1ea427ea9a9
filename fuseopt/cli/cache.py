"""What lies in the cache of built kernels, and how it is emptied."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from ..runtime.cpp.build import parts
from ..runtime.folders import Folder

#: What a file of a kernel that can be loaded ends with.
LIBRARY = ".so"


@dataclass(frozen=True)
class Entry:
    """One built kernel: its key, the bytes of all its files, when it was built."""

    key: str
    bytes: int
    built: float


def entries(path: str) -> Iterator[Entry]:
    """The kernels in a cache. Raises FileNotFoundError, or OSError where the folder
    may not be used.
    """
    with Folder.open(path) as root:
        for part in sorted(parts(root)):
            with root.enter(part) as place:
                yield from _kernels(place)


def _kernels(place: Folder) -> Iterator[Entry]:
    sizes: dict[str, int] = {}
    built: dict[str, float] = {}
    for name in place.names():
        key, dot, ending = name.partition(".")
        try:
            info = os.stat(os.path.join(place.path, name), follow_symlinks=False)
        except OSError:  # removed meanwhile
            continue
        sizes[key] = sizes.get(key, 0) + info.st_size
        if dot + ending == LIBRARY:
            built[key] = info.st_mtime
    for key in sorted(built):
        yield Entry(key, sizes[key], built[key])


def usage(path: str) -> tuple[int, int]:
    """How many kernels a cache holds, and their bytes. Raises as `entries` does."""
    every = list(entries(path))
    return len(every), sum(entry.bytes for entry in every)


def clear(path: str) -> tuple[int, int]:
    """Remove all kernels of a cache; how many there were, and their bytes.

    A process that has one loaded keeps it; one that builds meanwhile builds again.
    Raises as `entries` does.
    """
    held = usage(path)
    with Folder.open(path) as root:
        for part in parts(root):
            root.remove(part)
    return held


def megabytes(size: int) -> str:
    """Bytes in words."""
    return f"{size / 1e6:,.1f} MB"

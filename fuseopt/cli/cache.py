"""List and clear the cache of built kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from ..runtime.cpp.build import parts
from ..runtime.folders import Folder

#: The suffix of a built kernel's library.
LIBRARY = ".so"


@dataclass(frozen=True)
class Entry:
    """One built kernel: its key, the bytes of all its files, and the time of its build.

    `built`: in seconds since the epoch.
    """

    key: str
    bytes: int
    built: float


def entries(path: str) -> Iterator[Entry]:
    """Yield the kernels in a cache.

    Raises FileNotFoundError, or OSError where the folder may not be used.
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
        except OSError:  # another process removed the file
            continue
        sizes[key] = sizes.get(key, 0) + info.st_size
        if dot + ending == LIBRARY:
            built[key] = info.st_mtime
    for key in sorted(built):
        yield Entry(key, sizes[key], built[key])


def usage(path: str) -> tuple[int, int]:
    """Return the number of kernels in a cache, and their bytes. Raises as `entries`
    does.
    """
    every = list(entries(path))
    return len(every), sum(entry.bytes for entry in every)


def clear(path: str) -> tuple[int, int]:
    """Remove all kernels of a cache; return their number and their bytes.

    A process that has loaded a kernel keeps it. A process that builds one at the same
    time builds it again. Raises as `entries` does.
    """
    held = usage(path)
    with Folder.open(path) as root:
        for part in parts(root):
            root.remove(part)
    return held


def megabytes(size: int) -> str:
    """Format a number of bytes in megabytes."""
    return f"{size / 1e6:,.1f} MB"

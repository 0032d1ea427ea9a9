"""Launch runs of kernels, block by block, and provide the memory of their temps.

The scheduler decides which lanes make a block and where temps lie in the arena. The
size of this machine's cache bounds a block.
"""

from __future__ import annotations

import ctypes
import functools
import os
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from ..ir.graph import Buffer, MemoryPlan, Run
from .cpp.table import CppTable, TableFactory, TensorLayout
from .pages import use_huge_pages
from .tables.addresses import AddressPool
from .tables.host_numbers import CPU

#: Folder where Linux shows the sizes of caches; UNKNOWN bytes are assumed elsewhere.
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
UNKNOWN = 1 << 20
#: A block takes at most 1/SHARE of the largest cache, which other code uses too.
SHARE = 4
#: A block takes at most so many bytes for each processor. A virtual machine may show
#: the cache of its whole host, most of which others use.
PER_PROCESSOR = 8 << 20
#: An arena of more bytes is freed after each call.
KEPT = 64 << 20
#: The same on devices, where other calls may need the memory meanwhile.
KEPT_REMOTE = 4 << 20


def cache_bytes(folder: Path = CACHES) -> int:
    """Return the bytes of the largest cache, or a careful guess."""
    sizes = [UNKNOWN]
    for file in folder.glob("index*/size"):
        try:
            text = file.read_text().strip()
            unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
            sizes.append(int(text.rstrip("KM")) * unit)
        except (OSError, ValueError):
            continue
    return max(sizes)


def processors() -> Collection[int]:
    """Return the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


#: Arena of a call: for each device its bytes (uint8), and its first offset.
Arenas = dict[str, tuple[torch.Tensor, int]]


def block_bytes(largest: int, processors: int) -> int:
    """Return the bytes that a block may take, with a largest cache of so many bytes."""
    return min(largest // SHARE, processors * PER_PROCESSOR)


#: Bytes that the lanes of a block touch together.
BLOCK = block_bytes(cache_bytes(), len(processors()))


class TempArena:
    """The memory of those temps that have an offset in a plan's arena.

    `position` is that of each buffer in the pool of addresses. `keeps` is true for a
    small arena, which stays from call to call. As with the tables of a plan, the user
    orders calls on several streams: they write the same parameters.
    """

    def __init__(
        self,
        buffers: Sequence[Buffer],
        plan: MemoryPlan,
        position: Mapping[int, int],
    ) -> None:
        first = max((end for _, end in plan.remote.values()), default=0)
        parts = {**plan.remote, CPU: (first, plan.size)}
        #: for each device its part; positions of temps, and their places in it
        self.parts: list[tuple[str, int, int, torch.Tensor, torch.Tensor]] = []
        for device, (begin, end) in parts.items():
            places = [
                (position[b], plan.offsets[x.storage] - begin + x.first_byte)
                for b, x in enumerate(buffers)
                if x.storage in plan.offsets and x.device == device
            ]
            if places:
                positions, offsets = torch.tensor(places).t().contiguous()
                self.parts.append((device, begin, end - begin, positions, offsets))
        self.keeps = first <= KEPT_REMOTE and plan.size - first <= KEPT
        self.arena: Arenas | None = None

    def take(self, addresses: AddressPool) -> Arenas | None:
        """Return the arena of a call, after writing its addresses to the pool. The
        caller must keep it until the call has ended. Return None if it holds no temp.
        """
        if not self.parts or self.arena is not None:
            return self.arena
        arena: Arenas = {}
        for device, begin, size, positions, offsets in self.parts:
            t = torch.empty(size, dtype=torch.uint8, device=device)
            if device == CPU and size > KEPT:
                use_huge_pages(t)
            addresses.place_all(positions, offsets + t.data_ptr())
            arena[device] = t, begin
        if self.keeps:
            self.arena = arena
        return arena


class RunTable:
    """Tables of a run: one for each kernel of each block."""

    place: torch.device | None = None

    def __init__(
        self,
        run: Run,
        factories: Mapping[str, TableFactory],
        pool: array[int],
        position: Mapping[int, int],
        layouts: Mapping[int, TensorLayout],
        helper: ctypes.PyDLL | None,
    ) -> None:
        self.tables: list[CppTable] = []
        for block in run.blocks:
            for k, kernel in enumerate(run.kernels):
                part = run.part(block, k)
                if part.lanes:
                    table = factories[kernel.name](part, pool, position, layouts)
                    self.tables.append(cast(CppTable, table))
        self.changing = [t for t in self.tables if t.symbolic]
        self.symbolic = bool(self.changing)
        self.threads = 0
        n = len(self.tables)
        self.entries = (ctypes.c_void_p * n)(
            *(
                ctypes.cast(cast(Any, t.entry), ctypes.c_void_p).value
                for t in self.tables
            )
        )
        self.structs = (ctypes.c_void_p * n)(
            *(ctypes.addressof(t.structs) for t in self.tables)
        )
        self.start: Any = None
        if helper is not None:
            # CDLL: other threads may run Python meanwhile
            self.start = ctypes.CDLL(helper._name, handle=helper._handle).fuseopt_blocks
            self.start.argtypes = [
                *(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
            ]
            self.start.restype = None

    def fill_rows(self, numbers: Sequence[float]) -> None:
        """Write the scalars; `numbers` are the values of the step's symbols."""
        for t in self.changing:
            t.fill_rows(numbers)

    def keep(
        self,
        taking: bytes | None,
        owners: Mapping[int, int],
        helper: ctypes.PyDLL | None,
    ) -> None:
        """See CppTable."""
        for t in self.tables:
            t.keep(taking, owners, helper)

    def launches(self, threads: int) -> list[Callable[[], object]]:
        """Return C calls that run all blocks, for this number of threads."""
        calls = [call for t in self.tables for call in t.launches(threads)]
        if self.start is None:
            return calls
        self.threads = threads
        every = len(self.tables), self.entries, self.structs, threads
        return [functools.partial(self.start, *every)]

    def launch(self, threads: int) -> None:
        """Run all kernels over a block, then over the next one."""
        if threads != self.threads:
            self.threads = threads
            for t in self.tables:
                t.prepare(threads)
        if self.start is None:
            for t in self.tables:
                t.launch(threads)
            return
        self.start(len(self.tables), self.entries, self.structs, threads)

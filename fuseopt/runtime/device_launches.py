"""Do all work that can precede the launches on devices, then the launches.

First come the CPU's kernels whose results devices read, and the words of arenas, in the
order of the step and in one C call. A copy to each device that lacks words follows. The
launches, or replays of captured ones, are last. An error at any place restores the
numbers that kernels of the CPU wrote for a device.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import cast

from ..compat.profiling import profiled
from .cpp.table import DeviceTable, HostTable, KernelTable
from .marks import marked
from .tables.updates import updater
from .tables.upload import Arena
from .undo import at_once

Calls = Sequence[Callable[[], object]]


class DeviceLaunches:
    """Launches of a binding that has kernels on devices.

    `shown` returns the name of a kernel for profilers. `tables` are by name. `fed` is
    true if devices read results of the CPU's kernels. `saved` is a C call that saves
    those numbers and restores them, None where there are none. `alone` is true if the
    plan has only launches, allocates no memory, and needs no copies of tensors for an
    undo.
    """

    def __init__(
        self,
        shown: Callable[[str], str],
        tables: Mapping[str, KernelTable],
        arenas: Sequence[Arena],
        pool: array[int],
        helper: ctypes.PyDLL | None,
        fed: bool,
        saved: Callable[[int], object] | None,
        alone: bool,
    ) -> None:
        self.shown, self.tables = shown, tables
        self.arenas = [arena for arena in arenas if arena.remote]
        self.fed, self.saved, self.alone = fed, saved if fed else None, alone
        #: the name of a table of the CPU, or a call that writes the words of several
        #: tables
        self._parts: list[str | Callable[[], object]] = []
        named = [(name, getattr(t, "arena", None)) for name, t in tables.items()]
        for arena, group in groupby(named, lambda x: x[1]):
            names = [name for name, _ in group]
            if arena is None:
                self._parts += names
            else:
                devices = [cast(DeviceTable, tables[name]) for name in names]
                self._parts.append(updater(helper, arena, devices, pool))
        self._made: tuple[int, Calls, Calls, Calls] | None = None

    def _calls(self, name: str, threads: int) -> list[Callable[[], object]]:
        """Return calls that run one kernel, with its name under a profiler."""
        table = self.tables[name]
        if table.place is None:
            calls = cast(HostTable, table).launches(threads)
        else:
            calls = [functools.partial(cast(DeviceTable, table).run)]
        return marked(self.shown(name), calls) if profiled() else calls

    def _make(self, threads: int) -> tuple[int, Calls, Calls, Calls]:
        """Return the calls before copies, the starts of devices' kernels, and the CPU's
        kernels that follow.
        """
        before: list[Callable[[], object]] = []
        starts: list[Callable[[], object]] = []
        after: list[Callable[[], object]] = []
        for part in self._parts:
            if not isinstance(part, str):
                before.append(part)
            else:
                (before if self.fed else after).extend(self._calls(part, threads))
        for name, table in self.tables.items():
            if table.place is not None:
                starts += self._calls(name, threads)
        return threads, before, starts, after

    def send(self) -> None:
        """Write all changes to arenas and to devices, and launch nothing."""
        at_once([part for part in self._parts if not isinstance(part, str)])
        for arena in self.arenas:
            arena.push()

    def run(self, threads: int, then: Calls, replays: Calls | None = None) -> None:
        """Launch everything, and make C calls after it with nothing in between.

        `replays` are called in place of the launches on devices.
        """
        made = self._made
        if made is None or made[0] != threads or profiled():
            made = self._make(threads)
            self._made = None if profiled() else made
        _, before, starts, after = made
        saved = self.saved
        done: list[bool] = []
        if saved is not None:
            saved(0)
        try:
            at_once(before)
            for arena in self.arenas:
                arena.push()
            launches = starts if replays is None else replays
            finished = functools.partial(done.append, True)
            at_once([*launches, *after, finished, *then])
        except BaseException:
            if saved is not None and not done:
                saved(1)
            raise

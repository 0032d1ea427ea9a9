"""A plan: a schedule, bound to the layouts of a call's tensors.

What comes in is a `Captured` graph, its `Schedule` and what makes each kernel's table;
a `Plan` then follows tensors from call to call: their addresses (`move`), their strides
(`fits`, `bind`), and what memory they share.
"""

from __future__ import annotations

import ctypes
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast

import torch

from ..capture.trace import Captured, read_at_once
from ..compat.gc_pause import collector_paused
from ..errors import AliasError, UnsupportedInput
from ..ir.graph import DTYPE_BYTES, Extern, Kernel, Run, Schedule, written_by
from .cpp.table import DeviceTable, HostTable, KernelTable, TableFactory, TensorLayout
from .extern_calls import prepare
from .guards.probe import Moves, Probe
from .memory import Memory, extent, layout, shared_inputs
from .run_tables import RunTable, TempArena
from .tables.host_numbers import CPU, place_of
from .tables.upload import Arena, settle_together


class Replays(Protocol):
    """Launches of a plan that were captured, and are replayed."""

    def run(
        self, plan: Plan, tensors: Sequence[torch.Tensor], threads: int
    ) -> Memory | None:
        """Run the plan on the tensors of a call; the memory of what it returns."""

    def release(self) -> None:
        """Forget what was captured: the plan's tables are about to change."""


class Plan:
    """A schedule bound to the layouts of a call's tensors.

    The pool of addresses has an entry per buffer of the graph: static tensors, tensor
    arguments, views of those, temps.
    """

    def __init__(
        self,
        captured: Captured,
        schedule: Schedule,
        factories: dict[str, TableFactory],
        helper: ctypes.PyDLL | None = None,
        replays: Replays | None = None,
    ) -> None:
        self.helper = helper
        #: what surrounds the first binding: it waits for kernels that are being built
        self.opening: Callable[[], AbstractContextManager[None]] = nullcontext
        #: graphs of its launches; None if none are wanted
        self.replays = replays
        self.captured = captured
        self.schedule = schedule
        self.factories = factories
        graph = captured.graph
        buffers = graph.buffers
        self.n_tensors = len(captured.statics) + len(captured.tensor_args)
        # pool position of each buffer: inputs by source, then the rest
        self.position: dict[int, int] = {}
        extra: list[int] = []
        for b, buffer in enumerate(buffers):
            if buffer.kind in ("static", "arg"):
                self.position[b] = buffer.source
            else:
                self.position[b] = self.n_tensors + len(extra)
                extra.append(b)
        self.pool = array("Q", [0] * (self.n_tensors + len(extra)))
        # an empty tensor has no address, whatever storage it is a part of
        base = {
            buffer.storage: b
            for b, buffer in enumerate(buffers)
            if buffer.kind in ("static", "arg") and 0 not in buffer.shape
        }
        # (pool position, base's position, distance in bytes)
        self.views = [
            (
                self.position[b],
                self.position[base[buffers[b].storage]],
                buffers[b].offset * DTYPE_BYTES[buffers[b].dtype]
                - buffers[base[buffers[b].storage]].offset
                * DTYPE_BYTES[buffers[base[buffers[b].storage]].dtype],
            )
            for b in extra
            if buffers[b].kind == "view" and buffers[b].storage in base
        ]
        self.temps = schedule.temps
        self.memory = layout(buffers, schedule.memory)
        self.order = schedule.steps
        self.blocks = TempArena(buffers, schedule.memory, self.position)
        freed = schedule.memory.freed or ((),) * len(schedule.steps)
        #: the externs' calls, by payload
        self.externs = {
            step.payload: prepare(
                step,
                captured.calls[step.payload],
                buffers,
                self.memory.members,
                schedule.memory,
                self.position,
                own,
            )
            for step, own in zip(schedule.steps, freed, strict=True)
            if isinstance(step, Extern)
        }
        storages = {
            buffers[graph.values[v]].storage for n in graph.nodes for v in written_by(n)
        }
        self.written = frozenset(
            b for b, buffer in enumerate(buffers) if buffer.storage in storages
        )
        self.mutated = sorted(
            buffer.source
            for buffer in buffers
            if buffer.kind in ("static", "arg") and buffer.storage in storages
        )
        #: buffers of arguments by their place among the tensors; is one written?
        self._args = {x.source: b for b, x in enumerate(buffers) if x.kind == "arg"}
        self._writes_args = any(i >= len(captured.statics) for i in self.mutated)
        #: what of the inputs' places the plan rests on
        self.rests = shared_inputs(buffers, storages)
        self.metadata: list[Any] = []
        self.infers = False
        self.settled = False  # have the tables the addresses that the probe knows?
        self.probe: Probe | None = None
        self.tables: dict[str, KernelTable] = {}
        self.on_host: list[HostTable] = []
        self.on_devices: list[DeviceTable] = []
        self.arenas: list[Arena] = []
        #: the devices that kernels run on, other than the CPU
        self.devices: list[torch.device] = []
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.simple = (
            len(schedule.steps) == 1
            and isinstance(schedule.steps[0], Kernel)
            and not self.temps
            and not any(buffers[b].kind == "view" for b in graph.outputs)
        )
        #: kernels of the CPU are all that it runs
        self.on_cpu = all(isinstance(step, (Kernel, Run)) for step in self.order)
        #: a call needs its tensors' addresses alone, and those that numbers are in
        self.lean = self.simple and captured.result == () and not captured.complexes
        self.lean &= not captured.given

    # ---------------------------------------------------------------- binding

    def bind(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make the tables for the strides that the tensors have now."""
        with collector_paused(), self.opening():
            self._bind(tensors)
        self.opening = nullcontext

    def _bind(self, tensors: Sequence[torch.Tensor]) -> None:
        buffers = self.captured.graph.buffers
        layouts: dict[int, TensorLayout] = {}
        for b, buffer in enumerate(buffers):
            if buffer.kind in ("static", "arg"):
                t = tensors[buffer.source]
                layouts[b] = TensorLayout(tuple(t.shape), t.stride())
            else:
                layouts[b] = TensorLayout(buffer.shape, buffer.stride)
            if buffer.device == CPU:
                layouts[b] = layouts[b]._replace(on_host=buffer.dtype)
        places = {k.name: place_of(buffers, k) for k in self.schedule.kernels}
        try:
            tables = {
                step.name: self._table(step, layouts)
                for step in self.order
                if isinstance(step, (Kernel, Run))
            }
            on_devices = [cast(DeviceTable, t) for t in tables.values() if t.place]
            arenas = settle_together(on_devices, self.arenas)
        except torch.OutOfMemoryError as error:
            named = ", ".join(f"{name} on {place}" for name, place in places.items())
            raise torch.OutOfMemoryError(
                f"{error} It was for the tables of {named}. The step has changed "
                "nothing, and the next call makes them anew."
            ) from error
        if not any(t.symbolic for t in tables.values()):
            for table in tables.values():
                table.fill_rows(())
        # from here on nothing fails: a plan is bound anew, or as it was
        if self.replays is not None:
            self.replays.release()
        self.tables, self.on_devices, self.arenas = tables, on_devices, arenas
        self._settle_numbers()
        #: temps that are allocated in each call
        self.allocated = self.memory.without_memory(self.temps)
        self.on_host = [cast(HostTable, t) for t in tables.values() if not t.place]
        self.devices = [a.at for a in arenas if a.remote]
        self.on_cpu = self.on_cpu and len(self.on_host) == len(tables)
        #: may it be launched when what calls it has run to its end?
        self.waits = self.on_cpu or bool(self.captured.result == ())
        # but not where memory is given, or numbers are read, as soon as it has run
        self.waits &= not self.captured.given and not read_at_once(self.captured)
        self._launches: tuple[int, list[Callable[[], object]]] | None = None
        self.numbers: list[Any] | None = None
        # autograd may have saved any of them, with or without a gradient of its own
        counted = [i for i in self.mutated if not tensors[i].is_inference()]
        #: does it write inference tensors, which eager only writes in inference mode?
        self.infers = len(counted) < len(self.mutated)
        self.probe = Probe(tensors, self.helper, counted)
        self.metadata = [(t.dtype, t.shape, t.device) for t in tensors]
        self.settled = False
        #: bytes from the first to behind the last element of each tensor
        self._reach = {
            b: extent(x._replace(shape=layouts[b].shape, stride=layouts[b].stride))
            for b, x in enumerate(buffers)
            if x.kind in ("static", "arg")
        }

    def _table(
        self, step: Kernel | Run, layouts: dict[int, TensorLayout]
    ) -> KernelTable:
        if isinstance(step, Kernel):
            return self.factories[step.name](step, self.pool, self.position, layouts)
        return RunTable(
            step, self.factories, self.pool, self.position, layouts, self.helper
        )

    def _settle_numbers(self) -> None:
        """What kernels of the CPU make for a device alone, they write into its arena.

        It is the caller's, or another extern's, memory that must not be there.
        """
        buffers, known = self.captured.graph.buffers, self.memory
        outputs = set(self.captured.graph.outputs)
        alone = [
            b
            for b in self.temps
            if buffers[b].device == CPU
            and buffers[b].shape == ()
            and b not in outputs
            and len(known.members[buffers[b].storage]) == 1
            and buffers[b].storage not in known.plan.returned
        ]
        known.homes.clear()
        for table in self.on_devices:
            for b, home in table.cells.give_homes(alone).items():
                known.homes[buffers[b].storage] = home
                self.pool[self.position[b]] = home.data_ptr()
            alone = [b for b in alone if buffers[b].storage not in known.homes]
        #: kernels of a device read what those of the CPU have made
        self.fed = any(len(table.cells) for table in self.on_devices)

    def follow(self) -> None:
        """The streams that are current use the plan's memory on their devices."""
        for arena in self.arenas:
            if arena.remote:
                own = [t for t in self.on_devices if t.arena is arena]
                arena.follow(own)

    def launches(self, threads: int) -> list[Callable[[], object]]:
        """Calls of C that run its kernels, all of them the CPU's, one after another."""
        if self._launches is None or self._launches[0] != threads:
            found = [call for t in self.on_host for call in t.launches(threads)]
            self._launches = threads, found
        return self._launches[1]

    def named(self) -> str:
        """Its kernels, for messages."""
        return ", ".join(self.tables)

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Do the strides allow what was planned? Of most tensors any do."""
        strides = [(i, tensors[i].stride()) for i, _ in self.rests.strides]
        return strides == self.rests.strides and all(
            tensors[i].stride() == tensors[k].stride() for i, k in self.captured.twins
        )

    def move(self, ptrs: list[int]) -> None:
        """Take new addresses. Raises AliasError if tensors now share memory, and
        UnsupportedInput for a tensor that has elements and lies nowhere.
        """
        if 0 in ptrs:
            self._check_nowhere(ptrs)
        together = all(ptrs[i] - ptrs[k] == d for i, k, d in self.rests.distances)
        if not together or any(ptrs[i] != ptrs[k] for i, k in self.captured.twins):
            raise AliasError("tensors that shared memory do so in another way")
        statics = len(self.captured.statics)
        known = self.pool[: self.n_tensors]
        now = array("Q", ptrs)
        whole = not self.settled or known[:statics] != now[:statics]
        if whole or self._writes_args:
            self._check_all(ptrs)
        else:
            self._check_moved(ptrs, known, statics)
        self.settled = True
        self.pool[: self.n_tensors] = now
        for position, base, distance in self.views:
            self.pool[position] = self.pool[base] + distance
        if (whole or self._writes_args) and self.probe is not None:
            self.probe.let_move(self._moves(statics))

    def _moves(self, statics: int) -> Moves:
        """What the probe may follow by itself: arguments that are only read, and on
        whose place nothing rests.
        """
        fixed = {x for i, k, _ in self.rests.distances for x in (i, k)}
        fixed.update(x for pair in self.captured.twins for x in pair)
        inputs = range(self.n_tensors)
        loose = [
            i >= statics
            and i not in fixed
            and (i not in self._args or self._args[i] not in self.written)
            for i in inputs
        ]
        reach = [self._reach.get(self._args.get(i, -1), 0) for i in inputs]
        return Moves(loose, reach, self._starts, self._ends, self.pool, self.views)

    def _check_nowhere(self, ptrs: Sequence[int]) -> None:
        """A launch never sees the address 0 of a tensor with elements."""
        for b, buffer in enumerate(self.captured.graph.buffers):
            if buffer.kind not in ("static", "arg") or ptrs[buffer.source]:
                continue
            if self._reach[b]:
                raise UnsupportedInput(
                    f"{buffer.name} has elements and no memory; nothing was written"
                )

    def _interval(self, b: int, ptr: int) -> tuple[int, int]:
        return ptr, ptr + self._reach[b]

    def _check_all(self, ptrs: list[int]) -> None:
        """Memory that a lane writes must be no other lane's, unless capture knew."""
        buffers = self.captured.graph.buffers
        spans = sorted(
            (*self._interval(b, ptrs[x.source]), b)
            for b, x in enumerate(buffers)
            if x.kind in ("static", "arg")
        )
        # how far the memory seen so far reaches: of all tensors, and of written ones
        reach, owner, written_reach, writer = 0, -1, 0, -1
        for start, end, b in spans:
            if start == end:
                continue
            is_written = b in self.written
            for other, far in ((writer, written_reach), (owner, reach)):
                fresh = start < far and buffers[b].storage != buffers[other].storage
                if fresh and (is_written or other in self.written):
                    raise AliasError(
                        f"{buffers[other].name} and {buffers[b].name} share memory, "
                        "which they did not when the step was captured"
                    )
            if end > reach:
                reach, owner = end, b
            if is_written and end > written_reach:
                written_reach, writer = end, b
        written = [s for s in spans if s[2] in self.written and s[0] != s[1]]
        self._starts = [s[0] for s in written]
        self._ends = [s[1] for s in written]

    def _check_moved(
        self, ptrs: Sequence[int], known: Sequence[int], statics: int
    ) -> None:
        """The same for read-only arguments that moved: none in written memory."""
        for i in range(statics, len(ptrs)):
            b = self._args.get(i)
            if ptrs[i] == known[i] or b is None:
                continue
            low, high = self._interval(b, ptrs[i])
            k = bisect_right(self._starts, low)
            before = k > 0 and self._ends[k - 1] > low
            after = k < len(self._starts) and self._starts[k] < high
            if low != high and (before or after):
                raise AliasError(
                    f"{self.captured.graph.buffers[b].name} now lies in memory that "
                    "the step writes"
                )

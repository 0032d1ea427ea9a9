"""Bind a plan to tensors: make its kernels' tables for the layouts of these tensors.

A `Binding` takes over changes between calls: addresses (`move`) and numbers (`fill`).
For tensors of other strides a plan is bound again.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any, cast

import torch

from ..capture.results import is_of_the_call
from ..capture.scalars.host import same_numbers
from ..compat.gc_pause import collector_paused
from ..compat.profiling import profiled
from ..ir.geometry import is_block
from ..ir.graph import Buffer, Kernel, Run
from .constants import made
from .cpp.table import DeviceTable, HostTable, KernelTable, TensorLayout
from .device_launches import DeviceLaunches
from .devices import Place
from .guards.sharing import Sharing
from .guards.tensors import TensorGuard
from .marks import kernel_name, marked
from .memory import Memory, extent
from .plan import Built, Plan
from .run_tables import RunTable, TempArena
from .tables.addresses import AddressPool
from .tables.host_numbers import CPU, place_of
from .tables.upload import Arena, settle_together
from .tables.words import HelperCall, SavedMemory
from .undo import Undo, UndoInC, whole_risk, written_on

Layouts = Mapping[int, TensorLayout]


class Tables:
    """Tables of a plan's kernels: `every` by name, and by device.

    `devices` are those that kernels run on, other than the CPU. `fed` is true if
    kernels of a device read numbers that kernels of the CPU compute.
    """

    def __init__(self, every: dict[str, KernelTable], before: Sequence[Arena]) -> None:
        self.every = every
        self.on_host = [cast(HostTable, t) for t in every.values() if not t.place]
        self.on_devices = [cast(DeviceTable, t) for t in every.values() if t.place]
        self.arenas = settle_together(self.on_devices, before)
        self.devices = [arena.at for arena in self.arenas if arena.remote]
        self.places = [*map(Place, self.devices)]
        self.fed = any(len(table.cells) for table in self.on_devices)
        self.interpreted = any(not arena.remote for arena in self.arenas)
        if not any(table.symbolic for table in every.values()):
            self.fill(())

    def fill(self, numbers: Sequence[Any]) -> None:
        """Write the numbers of a call."""
        for table in self.every.values():
            table.fill_rows(numbers)

    def follow(self) -> None:
        """Record that the current streams use the tables' memory on their devices."""
        for arena in self.arenas:
            arena.follow(self.on_devices)

    def named(self) -> str:
        """Return the names of the kernels, for messages."""
        return ", ".join(self.every)


class Binding:
    """Plan with tables for tensors of certain dtypes, shapes, strides and devices.

    `metadata` has the dtype, shape and device of each tensor. `addresses` is the pool
    that the tables read. `memory` is the plan's Layout, with homes in these tables.
    `allocated` are the temps that each call allocates; `temps` is the arena of other
    temps. `guard` compares tensors with those of the last call; it is None after an
    interrupted call. `settled` is true once the pool has addresses of tensors.
    `numbers` are those of the last call, None where the tables may differ. `infers` is
    true if the step writes inference tensors, which eager writes only in inference
    mode.
    """

    def __init__(
        self,
        plan: Plan,
        built: Built,
        tensors: Sequence[torch.Tensor],
        before: Sequence[Arena] = (),
    ) -> None:
        self.plan = plan
        captured, schedule = plan.captured, plan.schedule
        buffers = captured.graph.buffers
        layouts = _layouts(buffers, tensors)
        self.addresses = AddressPool(plan.positions)
        try:
            tables = {
                step.name: self._table(step, built, layouts)
                for step in schedule.steps
                if isinstance(step, (Kernel, Run))
            }
            self.tables = Tables(tables, before)
            for table in self.tables.on_devices:
                table.use_helper(built.helper)
        except torch.OutOfMemoryError as error:
            places = [f"{k.name} on {place_of(buffers, k)}" for k in schedule.kernels]
            raise torch.OutOfMemoryError(
                f"{error} It was for the tables of {', '.join(places)}. The step has "
                "changed nothing, and the next call makes them again."
            ) from error
        homes = {**self._homes(), **self._constants()}
        self.memory = replace(plan.memory, homes=homes, helper=built.helper)
        self.allocated = self.memory.without_memory(schedule.temps)
        self.temps = TempArena(buffers, schedule.memory, plan.positions.of)
        kernels = all(isinstance(step, (Kernel, Run)) for step in schedule.steps)
        #: true if the plan has kernels of the CPU alone
        self.on_cpu = kernels and not self.tables.on_devices
        #: true if it has these and ATen calls
        self.by_aten = not kernels and not self.tables.on_devices
        #: true if its launches may wait for the end of the optimizer's step
        early = self.on_cpu or is_of_the_call(captured.result, buffers)
        self.waits = not plan.at_once and early
        self._launches: tuple[int, list[Callable[[], object]]] | None = None
        self.numbers: list[Any] | None = None
        #: C calls of a plan of kernels and chains, with the arena and the
        #: circumstances that they are for
        self.in_c: tuple[object, object, list[Callable[[], object]]] | None = None
        # autograd may have saved any of them, with or without a gradient
        mutated = plan.inputs.mutated
        self.counted = [i for i in mutated if not tensors[i].is_inference()]
        self.infers = len(self.counted) < len(mutated)
        #: the argument of the last `keep`
        self.taking: Any = None
        self.helper = built.helper
        self.guard: TensorGuard | None = TensorGuard(
            tensors, built.helper, self.counted, built.raw_fields
        )
        self.metadata = metadata_of(tensors)
        self.settled = False
        #: how far an error may come: Triton's interpreter is Python
        self.risk, self.interpreted = plan.risk, self.tables.interpreted
        if self.interpreted:
            self.risk = whole_risk(captured.graph, schedule)
        on_host = self.risk.on_host if self.tables.fed else ()
        self._on_host = self._saver(layouts, on_host)
        self._written = self._saver(layouts, self.risk.written)
        #: the writes of the graphs of all devices but the last one. A refusal may come
        #: after they have begun
        self._on_first: list[int] = []
        if len(self.tables.devices) > 1:
            first = {str(device) for device in self.tables.devices[:-1]}
            self._on_first = written_on(captured.graph, schedule, first)
        #: true if tensors must be copied, since an error may leave them half written
        self.undoes_by_tensors = bool(self._on_first) or any(
            written and saved is None
            for written, saved in (
                (on_host, self._on_host),
                (self.risk.written, self._written),
            )
        )
        #: runs its kernels on devices; None where there are none
        self.device_launches: DeviceLaunches | None = None
        if self.tables.on_devices:
            undoes = self.undoes_by_tensors or self.interpreted
            takes = bool(self.allocated or (self.temps.parts and not self.temps.keeps))
            if self.temps.keeps:
                self.temps.take(self.addresses)
            self.device_launches = DeviceLaunches(
                self.shown,
                self.tables.every,
                self.tables.arenas,
                self.addresses.words,
                built.helper,
                self.tables.fed,
                self._on_host,
                plan.lean and not (undoes or takes),
            )
        self.sharing = Sharing(
            plan.inputs,
            {
                b: extent(x._replace(shape=layouts[b].shape, stride=layouts[b].stride))
                for b, x in enumerate(buffers)
                if x.kind in ("static", "arg")
            },
        )

    def _table(self, step: Kernel | Run, built: Built, layouts: Layouts) -> KernelTable:
        position, words = self.plan.positions.of, self.addresses.words
        if isinstance(step, Kernel):
            return built.factories[step.name](step, words, position, layouts)
        return RunTable(step, built.factories, words, position, layouts, built.helper)

    def _homes(self) -> dict[int, torch.Tensor]:
        """Return memory in the arena for numbers that kernels of the CPU compute and
        only kernels of a device read, by storage.

        Results of the step and of externs need memory elsewhere.
        """
        plan = self.plan
        graph, layout = plan.captured.graph, plan.memory
        buffers, outputs = graph.buffers, set(graph.outputs)
        alone = [
            b
            for b in plan.schedule.temps
            if buffers[b].device == CPU
            and buffers[b].shape == ()
            and b not in outputs
            and len(layout.members[buffers[b].storage]) == 1
            and buffers[b].storage not in layout.plan.returned
        ]
        homes: dict[int, torch.Tensor] = {}
        for table in self.tables.on_devices:
            for b, home in table.cells.give_homes(alone).items():
                homes[buffers[b].storage] = home
                self.addresses.place(plan.positions.of[b], home.data_ptr())
            alone = [b for b in alone if buffers[b].storage not in homes]
        return homes

    def _constants(self) -> dict[int, torch.Tensor]:
        """Return the results of constant calls, by storage."""
        plan = self.plan
        homes = made(plan.constants, plan.externs)
        for storage, home in homes.items():
            for b in plan.memory.members[storage]:
                first = plan.captured.graph.buffers[b].first_byte
                self.addresses.place(plan.positions.of[b], home.data_ptr() + first)
        return homes

    def _saver(
        self, layouts: Layouts, written: Sequence[int]
    ) -> Callable[[int], object] | None:
        """Return a C call that saves these buffers of the CPU, and restores them.
        Return None where one has gaps or lies on a device, or there is no helper.
        """
        buffers, of = self.plan.captured.graph.buffers, self.plan.positions.of
        on_cpu = all(
            buffers[b].device == CPU and buffers[b].kind != "view" for b in written
        )
        if self.helper is None or not on_cpu:
            return None
        if not all(is_block(*layouts[b][:2]) for b in written):
            return None
        sizes = [extent(buffers[b]) for b in written]
        arrays = {
            "position": array("q", [of[b] for b in written]),
            "bytes": array("q", sizes),
            "memory": array("b", bytes(sum(sizes))),
        }
        others = ctypes.c_void_p, ctypes.c_int64
        function = self.helper.fuseopt_saved
        saved = HelperCall(SavedMemory(len(written)), function, arrays, others)
        return functools.partial(saved, self.addresses.words.buffer_info()[0])

    def undo_on_host(self, tensors: Sequence[torch.Tensor]) -> Undo:
        """Return the Undo of the CPU's kernels that write for a device."""
        if self._on_host is not None:
            return UndoInC(self._on_host)
        memory = Memory(self.memory, tensors, self.addresses, self.numbers or ())
        return Undo(map(memory.tensor, self.risk.on_host))

    def undo_written(self, memory: Memory) -> Undo:
        """Return the Undo for an error before the last launch."""
        if self._written is not None:
            return UndoInC(self._written)
        return Undo(map(memory.tensor, self.risk.written))

    def undo_graphs(self, tensors: Sequence[torch.Tensor]) -> Undo:
        """Return the Undo for an error between the graphs of two devices."""
        if not self._on_first:
            return Undo()
        memory = Memory(self.memory, tensors, self.addresses, self.numbers or ())
        return Undo(map(memory.tensor, self._on_first))

    def launches(self, threads: int) -> list[Callable[[], object]]:
        """Return C calls that run its kernels, all on the CPU, one after another."""
        if profiled():
            return [
                call
                for step in self.plan.schedule.steps
                if isinstance(step, (Kernel, Run))
                for call in self.calls(step, threads)
            ]
        if self._launches is None or self._launches[0] != threads:
            calls = [call for t in self.tables.on_host for call in t.launches(threads)]
            self._launches = threads, calls
        return self._launches[1]

    def calls(self, step: Kernel | Run, threads: int) -> list[Callable[[], object]]:
        """Return C calls that run a kernel of the CPU, with a name for a profiler."""
        calls = cast(HostTable, self.tables.every[step.name]).launches(threads)
        return marked(self.shown(step.name), calls) if profiled() else calls

    def shown(self, name: str) -> str:
        """Return a kernel's name for a profiler."""
        graph, steps = self.plan.captured.graph, self.plan.schedule.steps
        (step,) = (x for x in steps if isinstance(x, (Kernel, Run)) and x.name == name)
        return kernel_name(graph, step)

    def keep(self, taking: bytes | None) -> None:
        """Let only lanes of some owners take part in launches from now on. None lets
        all lanes take part. `taking` has a byte for each owner, and 1 for lanes without
        an owner.

        Only for a plan of kernels; on a device, of kernels that reduce nothing.
        Launches write no other lanes, and leave the versions of their tensors
        unchanged.
        """
        owners = self.plan.captured.owners
        self.taking = False, taking  # should this be interrupted
        for table in self.tables.every.values():
            table.keep(taking, owners, self.helper)
        temps, owners_of_temps = self._temps_alone
        if taking is not None:
            temps = [*compress(temps, map(taking.__getitem__, owners_of_temps))]
        self.allocated = temps
        if self.guard is not None:
            kept = self.counted
            if taking is not None:
                kept = [
                    *compress(kept, map(taking.__getitem__, self._owners_of_counted))
                ]
            self.guard.count_up(kept)
        self.taking = taking

    @functools.cached_property
    def _temps_alone(self) -> tuple[list[int], list[int]]:
        """Return the temps that a call of all lanes allocates, and their owners."""
        temps = self.memory.without_memory(self.plan.schedule.temps)
        return temps, [self.plan.captured.owners.get(b, -1) for b in temps]

    @functools.cached_property
    def _owners_of_counted(self) -> list[int]:
        """Return the owner of each of `counted`; -1 for a tensor without an owner."""
        captured = self.plan.captured
        buffers = captured.graph.buffers
        owners = {
            buffers[b].source: owner
            for b, owner in captured.owners.items()
            if buffers[b].kind in ("static", "arg")
        }
        return [owners.get(i, -1) for i in self.counted]

    def fill(self, numbers: list[Any]) -> None:
        """Write the numbers of a call to the tables."""
        known = self.numbers
        if numbers != known or (0 in numbers and not same_numbers(numbers, known)):
            self.numbers = None  # should `fill` be interrupted
            self.tables.fill(numbers)
            self.numbers = numbers

    def move(self, addresses: Sequence[int]) -> None:
        """Write new addresses of the tensors to the pool.

        Raises AliasError if tensors now share memory, and UnsupportedInput for a tensor
        that has elements but no memory.
        """
        now = array("Q", addresses)
        before = self.addresses.tensors() if self.settled else None
        elsewhere = self.sharing.check(now, before)
        self.settled = True
        self.addresses.move(now)
        if elsewhere and self.guard is not None:
            self.guard.let_move(self.sharing.moves(self.addresses))


def bind(
    plan: Plan, tensors: Sequence[torch.Tensor], before: Binding | None = None
) -> Binding:
    """Make the tables for the present layouts of tensors.

    `before` is the binding of the same plan that this one replaces. Waits for kernels
    that are being built.
    """
    with collector_paused(), plan.kernels.ready() as built:
        arenas = before.tables.arenas if before is not None else ()
        return Binding(plan, built, tensors, arenas)


def metadata_of(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return the dtype, shape and device of each tensor."""
    return [(t.dtype, t.shape, t.device) for t in tensors]


def _layouts(
    buffers: Sequence[Buffer], tensors: Sequence[torch.Tensor]
) -> dict[int, TensorLayout]:
    """Return the layouts of all buffers; an input has that of its tensor."""
    layouts: dict[int, TensorLayout] = {}
    for b, buffer in enumerate(buffers):
        if buffer.kind in ("static", "arg"):
            t = tensors[buffer.source]
            layouts[b] = TensorLayout(tuple(t.shape), t.stride())
        else:
            layouts[b] = TensorLayout(buffer.shape, buffer.stride)
        if buffer.device == CPU:
            layouts[b] = layouts[b]._replace(on_host=buffer.dtype)
    return layouts

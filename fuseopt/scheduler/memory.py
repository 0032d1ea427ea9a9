"""Plan the memory of a schedule's temps.

The result of an extern has memory already. Stacks of batches lie in an arena, for as
long as a step needs them. So do temps that only kernels touch: all on the CPU, those up
to `REMOTE_SMALL` bytes on a device. Small ones have a permanent place. Others that only
one block of a run touches lie in a region that each block reuses. So a step needs
memory for its largest block instead of all blocks, and finds it in the cache. All other
temps are allocated at each call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from ..ir.graph import (
    ALIGNED,
    Batch,
    Block,
    Buffer,
    Extern,
    Graph,
    Kernel,
    MemoryPlan,
    Run,
    Schedule,
    Step,
    storage_bytes,
)
from ..ir.products import ADDRESSED, chained
from .dependencies import CPU
from .passes import Machine, goes_by_blocks

#: Temps up to this many bytes have a permanent place in the arena, with any users. A
#: piece of an allocation costs as much per call as a separate allocation.
SMALL = 4096
#: What stacks begin at on a device: as what its allocators return.
REMOTE = 512
#: Temps up to this many bytes lie in a device's part of the arena. Its allocator
#: divides larger blocks for those of up to 1 MiB too.
REMOTE_SMALL = 1 << 20


def plan_memory(graph: Graph, schedule: Schedule, machine: Machine) -> Schedule:
    """Give each storage of temps its place, as far as possible before a call."""
    members: dict[int, list[Buffer]] = {}
    for buffer in graph.buffers:
        if buffer.kind == "temp":
            members.setdefault(buffer.storage, []).append(buffer)
    returned = frozenset(s for e in schedule.externs for s in _returned(graph, e))
    kernels = {s for k in schedule.kernels for s in _of_kernel(graph, k)}
    kernels |= _addressed(graph, schedule)
    loose = frozenset(s for s in returned - kernels if len(members[s]) == 1)
    plan = MemoryPlan({}, 0, returned, loose)
    plan = _with_devices(graph, schedule, plan, members)
    if returned:
        plan = replace(plan, freed=_freed(graph, schedule, members, plan))
    if goes_by_blocks(graph, schedule, machine):
        plan = _with_arena(graph, schedule, plan, members)
    return schedule if plan == schedule.memory else replace(schedule, memory=plan)


def _with_devices(
    graph: Graph,
    schedule: Schedule,
    plan: MemoryPlan,
    members: dict[int, list[Buffer]],
) -> MemoryPlan:
    """The plan with an arena for the stacks of batches, and for small temps of devices.

    Stacks that no step needs at one time may have one place. Each device has a part,
    the CPU the last one.
    """
    small: dict[str, list[tuple[int, int]]] = {}
    if {b.device for b in graph.buffers} != {CPU}:
        sent = _sent(graph, schedule)
        for s, n in _free(graph, schedule, members, plan).items():
            device = members[s][0].device
            if n <= (SMALL if device == CPU else REMOTE_SMALL) and s not in sent:
                small.setdefault(device, []).append((s, n))
    devices = {stack.device for stack in schedule.stacks} | small.keys()
    for device in sorted(devices, key=_after_remote):
        first = plan.size
        plan = _with_stacks_of(device, graph, schedule, plan)
        offsets = dict(plan.offsets)
        rest = [x for x in small.get(device, ()) if x[0] not in offsets]
        begin = -(-plan.size // REMOTE) * REMOTE
        size = _place(offsets, rest, begin) if rest else plan.size
        plan = replace(plan, offsets=offsets, size=size)
        if device != CPU:
            plan = replace(plan, remote={**plan.remote, device: (first, size)})
    return plan


def _sent(graph: Graph, schedule: Schedule) -> set[int]:
    """Return the storages of numbers on the CPU that a device's kernel reads: they have
    cells in its tables.
    """
    sent: set[int] = set()
    for kernel in schedule.kernels:
        buffers = [graph.buffers[b] for v in kernel.every for c in v.columns for b in c]
        if any(b.device != CPU for b in buffers):
            sent.update(b.storage for b in buffers if b.device == CPU)
    return sent


def _free(
    graph: Graph,
    schedule: Schedule,
    members: dict[int, list[Buffer]],
    plan: MemoryPlan,
) -> dict[int, int]:
    """Return the storages of temps that only kernels touch, and their bytes."""
    touched = dict.fromkeys(
        s for k in schedule.kernels for s in _of_kernel(graph, k) if s in members
    )
    called = {s for x in schedule.steps if _calls(x) for s in storages_of(graph, x)} | {
        graph.buffers[b].storage for b in graph.outputs
    }
    seen = called | plan.returned
    return {s: storage_bytes(members[s]) for s in touched if s not in seen}


def _after_remote(device: str) -> tuple[bool, str]:
    return device == CPU, device


def _with_stacks_of(
    device: str, graph: Graph, schedule: Schedule, plan: MemoryPlan
) -> MemoryPlan:
    """The plan with the stacks of one device behind what it has."""
    align = ALIGNED if device == CPU else REMOTE
    stack_of = {
        s: k
        for k, x in enumerate(schedule.stacks)
        for s in x.storages
        if x.device == device
    }
    used: dict[int, tuple[int, int]] = {}
    for i, step in enumerate(schedule.steps):
        for k in {stack_of[s] for s in storages_of(graph, step) if s in stack_of}:
            used[k] = used.get(k, (i, i))[0], i
    used = _through_chains(schedule, used)
    offsets = dict(plan.offsets)
    stacks = schedule.stacks
    sizes = {k: stacks[k].step * len(stacks[k].storages) for k in used}
    places, size = first_fit(used, sizes, align, -(-plan.size // align) * align)
    for k, at in places.items():
        offsets.update(
            (s, at + i * stacks[k].step) for i, s in enumerate(stacks[k].storages)
        )
    # storages in the arena are not returned by calls
    returned = plan.returned - offsets.keys()
    return replace(
        plan, offsets=offsets, size=size, returned=returned, loose=plan.loose & returned
    )


def first_fit(
    used: Mapping[int, tuple[int, int]],
    sizes: Mapping[int, int],
    align: int,
    begin: int = 0,
) -> tuple[dict[int, int], int]:
    """Return a place for each piece of memory, and the end of all of them.

    `used`: the first and the last step that need a piece; a place is used again after
    the last one. `sizes`: the bytes of each. Places begin at multiples of `align`, from
    `begin` on.
    """
    places: dict[int, int] = {}
    there: list[tuple[int, int, int]] = []  # first byte, end, last step
    size = begin
    for k, (first, last) in sorted(used.items(), key=lambda item: item[1]):
        there = sorted(x for x in there if x[2] >= first)
        need = -(-sizes[k] // align) * align
        at = begin
        for start, end, _ in there:
            if at + need <= start:
                break
            at = max(at, end)
        there.append((at, at + need, last))
        size = max(size, at + need)
        places[k] = at
    return places, size


def _through_chains(
    schedule: Schedule, used: dict[int, tuple[int, int]]
) -> dict[int, tuple[int, int]]:
    """Return the first and last steps that need each stack.

    Chained batches run row by row, so a stack that they share with other steps is
    needed from the first of them to the last.
    """
    found = dict(used)
    for start, end in chained(schedule.steps):
        for k, (first, last) in used.items():
            inside = start <= first and last < end
            if not inside and first < end and last >= start:
                first, last = min(found[k][0], start), max(found[k][1], end - 1)
                found[k] = first, last
    return found


def _freed(
    graph: Graph,
    schedule: Schedule,
    members: dict[int, list[Buffer]],
    plan: MemoryPlan,
) -> tuple[tuple[int, ...], ...]:
    """Return, for each extern, the storages of temps that no later step touches.

    Storages that kernels touch last are freed at the end: kernels of a device may still
    run.
    """
    last: dict[int, int] = {}
    for i, step in enumerate(schedule.steps):
        last.update(dict.fromkeys(storages_of(graph, step), i))
    kept = {graph.buffers[b].storage for b in graph.outputs}
    freed: list[list[int]] = [[] for _ in schedule.steps]
    for s, i in last.items():
        unplaced = s in members and s not in kept and s not in plan.offsets
        if unplaced and _calls(schedule.steps[i]):
            freed[i].append(s)
    return tuple(map(tuple, freed))


def _with_arena(
    graph: Graph,
    schedule: Schedule,
    plan: MemoryPlan,
    members: dict[int, list[Buffer]],
) -> MemoryPlan:
    """Return the plan with an arena for the temps that only kernels touch."""
    users: dict[int, list[Step]] = {}
    for step in schedule.steps:
        for s in storages_of(graph, step):
            users.setdefault(s, []).append(step)
    free = _free(graph, schedule, members, plan)
    offsets = dict(plan.offsets)
    small = ((s, n) for s, n in free.items() if n <= SMALL * len(members[s]))
    size = _place(offsets, small, plan.size)
    first = size
    for step in schedule.steps:
        if not isinstance(step, Run):
            continue
        blocks = [_of_block(graph, step, block) for block in step.blocks]
        times: dict[int, int] = {}
        for touched in blocks:
            for s in touched:
                times[s] = times.get(s, 0) + 1
        for touched in blocks:
            alone = sorted(
                s
                for s in touched
                if s in free
                and s not in offsets
                and len(users[s]) == 1
                and times[s] == 1
            )
            size = max(size, _place(offsets, ((s, free[s]) for s in alone), first))
    return replace(plan, offsets=offsets, size=size)


def _place(offsets: dict[int, int], sizes: Iterable[tuple[int, int]], at: int) -> int:
    """Place storages one after another from `at` on; return the end."""
    for s, n in sizes:
        offsets[s] = at
        at += -(-n // ALIGNED) * ALIGNED
    return at


# ---------------------------------------------------------------- touched storages


def _addressed(graph: Graph, schedule: Schedule) -> set[int]:
    """Return the storages whose addresses chains read."""
    operands = (x for b in schedule.batches for x in b.operands)
    return {
        graph.buffers[b].storage
        for x in operands
        if x.stack == ADDRESSED
        for b in x.buffers
    }


def _returned(graph: Graph, extern: Extern) -> set[int]:
    """Return the storages that an extern allocates: written, but not read."""
    read = {graph.buffers[graph.values[v]].storage for v in extern.reads}
    written = {graph.buffers[graph.values[v]].storage for v in extern.writes}
    return written - read


def _calls(step: Step) -> bool:
    """Does a step call ATen?"""
    return isinstance(step, (Extern, Batch))


def storages_of(graph: Graph, step: Step) -> dict[int, None]:
    """Return the storages that a step touches, in order."""
    if isinstance(step, (Extern, Batch)):
        values = (*step.reads, *step.writes)
        return {graph.buffers[graph.values[v]].storage: None for v in values}
    kernels = step.kernels if isinstance(step, Run) else (step,)
    return {s: None for k in kernels for s in _of_kernel(graph, k)}


def _of_kernel(graph: Graph, kernel: Kernel) -> Iterator[int]:
    for v in kernel.every:
        for column in v.columns:
            yield from (graph.buffers[b].storage for b in column)


def _of_block(graph: Graph, run: Run, block: Block) -> set[int]:
    """Return the storages that the lanes of a block touch."""
    return {
        graph.buffers[b].storage
        for kernel, lanes in zip(run.kernels, block, strict=True)
        for v, lane in lanes
        for b in kernel.variants[v].touched(lane)
    }

"""Verify a Graph or Schedule: raise a GraphError that names the broken invariant.

`check_graph` checks the invariants of the IR (see graph_verifier.py). `check_schedule`
checks those of a Schedule, and that it is equivalent to its Graph (equivalence.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ..errors import GraphError
from . import blocks
from .alias import overlaps
from .batch_verifier import check_batches, check_branches
from .equivalence import difference
from .geometry import numel
from .graph import (
    ALIGNED,
    REDUCTIONS,
    Batch,
    Buffer,
    Extern,
    Graph,
    Kernel,
    Run,
    Schedule,
    Step,
    Variant,
    kept,
    makes_numbers,
    storage_bytes,
)
from .graph_verifier import broadcasts, check_graph, check_instrs, name_of, require

__all__ = ["check_graph", "check_schedule"]


def check_schedule(graph: Graph, schedule: Schedule) -> None:
    """Raise GraphError if a Schedule is malformed or not equivalent to its Graph.

    The Graph itself must have passed `check_graph`.
    """
    near = overlaps(graph.buffers)
    names: set[str] = set()
    for kernel in schedule.kernels:
        require(kernel.name not in names, f"{kernel.name}: two kernels have this name")
        names.add(kernel.name)
        _check_kernel(graph, kernel, near)
    for step in schedule.steps:
        if isinstance(step, Run):
            _check_run(step)
    check_batches(graph, schedule, near)
    check_branches(graph, schedule, near)
    payloads = [extern.payload for extern in schedule.externs]
    expected = [n.payload for n in graph.nodes if isinstance(n, Extern)]
    require(
        sorted(payloads) == sorted(expected),
        f"the schedule runs the externs of calls {payloads}, the graph has {expected}",
    )
    _check_temps(graph, schedule)
    _check_memory(graph, schedule)
    wrong = difference(graph, schedule, near)
    if wrong is not None:
        name, by = graph.buffers[wrong.buffer].name, "a view of it"
        if wrong.node is not None:
            by = name_of(wrong.node, graph.nodes[wrong.node])
        raise GraphError(
            f"{by}: the schedule "
            + (f"never writes {name}" if wrong.untouched else f"leaves another {name}")
        )


def _check_kernel(graph: Graph, kernel: Kernel, near: dict[int, list[int]]) -> None:
    require(bool(kernel.variants), f"{kernel.name}: a kernel with no variants")
    for number, variant in enumerate(kernel.every):
        _check_variant(graph, f"{kernel.name}, variant {number}", variant)
    _check_lanes(graph, kernel.name, kernel.variants, near)
    _check_lanes(graph, kernel.name, kernel.finish, near)
    _check_lanes(graph, kernel.name, kernel.first, near)
    apart = tuple(v for v in kernel.variants if not makes_numbers(v))
    for v in kernel.finish:
        _check_lanes(graph, kernel.name, (*apart, v), near)


def _check_run(run: Run) -> None:
    """Check that every lane is in one block, and no kernel waits for all blocks."""
    require(len(run.kernels) > 1, f"{run.name}: a run of one kernel")
    for kernel in run.kernels:
        require(not kernel.finish, f"{run.name}: {kernel.name} ends with a finish")
        require(not kernel.first, f"{run.name}: {kernel.name} has what runs first")
    for i, block in enumerate(run.blocks):
        require(
            len(block) == len(run.kernels),
            f"{run.name}: block {i} has lanes of {len(block)} kernels, "
            f"not of {len(run.kernels)}",
        )
    for k, kernel in enumerate(run.kernels):
        lanes = sorted(lane for block in run.blocks for lane in block[k])
        every = [
            (v, x)
            for v, variant in enumerate(kernel.variants)
            for x in range(variant.lanes)
        ]
        wrong = sorted(set(lanes) ^ set(every)) or [
            a for a, b in itertools.pairwise(lanes) if a == b
        ]
        require(
            not wrong,
            f"{run.name}: (variant, lane) {wrong[:1]} of {kernel.name} is not in "
            "one block",
        )


def _check_variant(graph: Graph, where: str, v: Variant) -> None:
    dtypes = [s.dtype for s in v.slots]
    check_instrs(where, v.instrs, dtypes, len(v.scalars))
    lane, late = set(v.lane_code), set(v.output_code)
    every = sorted((*v.lane_code, *v.code, *v.output_code))
    require(
        every == list(range(len(v.instrs))),
        f"{where}: lane code, element code and output code do not partition the "
        f"{len(v.instrs)} instructions: {every}",
    )
    for code in (v.lane_code, v.code, v.output_code):
        require(code == tuple(sorted(code)), f"{where}: code is out of order")
    folds = {x for x, i in enumerate(v.instrs) if i.op in REDUCTIONS}
    require(folds <= late, f"{where}: a reduction is not output code")
    require(
        bool(folds) == bool(v.reduction) == bool(late)
        and len(v.reduced) == len(v.operands) == (v.lanes if folds else 0),
        f"{where}: the tables of its reductions do not fit",
    )
    by_block = blocks.read_by_block(v.instrs)
    for x, instr in enumerate(v.instrs):
        if instr.op == "load":
            domain = v.slots[int(instr.attr or 0)].domain
            where_it_runs = (
                "lane" if x in lane else "output" if x in late else "element"
            )
            if where_it_runs == "element" and instr.attr in by_block:
                where_it_runs = "block"
            require(
                domain == where_it_runs,
                f"{where}: %{x} loads a slot of domain {domain} in the other code",
            )
        if x in lane:
            for a in instr.args:
                require(a in lane, f"{where}: %{x} is lane code, but its %{a} is not")
        elif x in late and x not in folds:
            for a in instr.args:
                # the value of a tail depends on the instruction that uses it
                require(
                    a in lane or a in late or v.instrs[a].op == "tail",
                    f"{where}: %{x} is output code, but its %{a} is element code",
                )
        else:
            for a in instr.args:
                require(
                    a not in late, f"{where}: %{x} sees %{a} before elements are done"
                )
    used = {a for instr in v.instrs for a in instr.args} | {x for x, _ in v.stores}
    for x, instr in enumerate(v.instrs):
        require(x in used, f"{where}: unused: %{x} = {instr.op}")
    _check_slots(where, v, lane)
    _check_columns(graph, where, v)


def _check_slots(where: str, v: Variant, lane: set[int]) -> None:
    loaded = {int(i.attr or 0) for i in v.instrs if i.op == "load"}
    stored: set[int] = set()
    for x, s in v.stores:
        require(0 <= x < len(v.instrs), f"{where}: stores missing %{x}")
        require(0 <= s < len(v.slots), f"{where}: stores to missing slot {s}")
        require(s not in stored, f"{where}: slot {s} is stored twice")
        stored.add(s)
        slot, dtype = v.slots[s], v.instrs[x].dtype
        require(slot.write, f"{where}: slot {s} is stored, but not writable")
        require(dtype == slot.dtype, f"{where}: slot {s} is {slot.dtype}, %{x} {dtype}")
        require(
            slot.domain == "output" or x not in set(v.output_code),
            f"{where}: slot {s} is stored by output code, but is of {slot.domain}",
        )
        require(
            (slot.domain == "block") == (v.instrs[x].op == "first"),
            f"{where}: slot {s} of {slot.domain} is stored by {v.instrs[x].op}",
        )
        require(
            slot.domain != "lane" or x in lane,
            f"{where}: slot {s} is a number per lane, but %{x} one per element",
        )
    for s, slot in enumerate(v.slots):
        require(
            slot.domain in ("lane", "element", "output", "block"),
            f"{where}: slot {s}: {slot.domain}",
        )
        require(
            (slot.read, slot.write) == (s in loaded, s in stored),
            f"{where}: slot {s} declares read={slot.read}, write={slot.write}, but is "
            f"read={s in loaded}, written={s in stored}",
        )


def _check_columns(graph: Graph, where: str, v: Variant) -> None:
    require(
        len(v.columns) == len(v.slots),
        f"{where}: {len(v.columns)} columns for {len(v.slots)} slots",
    )
    require(v.lanes > 0, f"{where}: no lanes")
    for name, table in (("slot", v.columns), ("scalar", v.scalars)):
        for k, column in enumerate(table):
            require(
                len(column) == v.lanes,
                f"{where}: the column of {name} {k} has {len(column)} entries for "
                f"{v.lanes} lanes",
            )
    block_sizes = blocks.slot_sizes(v.instrs, v.stores)
    for s, (slot, column) in enumerate(zip(v.slots, v.columns, strict=True)):
        for lane, index in enumerate(column):
            b, space = graph.buffers[index], v.shapes[lane]
            here = f"{where}: slot {s} of lane {lane} is {b.name}"
            require(b.dtype == slot.dtype, f"{here}, {b.dtype} among {slot.dtype}")
            if slot.domain == "lane":
                require(b.shape == (), f"{here}, shape {list(b.shape)} as one number")
            elif slot.domain == "block":
                n = blocks.count(numel(space), block_sizes[s])
                require(b.shape == (n,), f"{here}, shape {list(b.shape)} as {n} blocks")
            elif slot.domain == "output":
                left = kept(space, v.reduced[lane])
                count = b._replace(shape=left).numel
                require(
                    b.numel in (count, 1),
                    f"{here}, shape {list(b.shape)} as results {list(left)}",
                )
            elif slot.write:
                require(
                    b.shape == space,
                    f"{here}, shape {list(b.shape)} written over {list(space)}",
                )
            else:
                require(
                    broadcasts(b.shape, space),
                    f"{here}, shape {list(b.shape)} read over {list(space)}",
                )


def _check_lanes(
    graph: Graph, name: str, variants: tuple[Variant, ...], near: dict[int, list[int]]
) -> None:
    """Check that lanes are independent: no lane touches memory that another writes."""
    owners: dict[int, set[tuple[int, int]]] = {}  # buffer -> lanes that touch it
    written: list[tuple[int, tuple[int, int]]] = []
    devices: set[str] = set()
    for number, v in enumerate(variants):
        for slot, column in zip(v.slots, v.columns, strict=True):
            for lane, b in enumerate(column):
                owners.setdefault(b, set()).add((number, lane))
                if graph.buffers[b].shape:
                    devices.add(graph.buffers[b].device)
                if slot.write:
                    written.append((b, (number, lane)))
    require(len(devices) <= 1, f"{name}: tensors on {' and '.join(sorted(devices))}")
    for b, owner in written:
        at = graph.buffers[b].name
        require(
            owners[b] == {owner},
            f"{name}: {at} is written in (variant, lane) {owner} and touched "
            f"in {sorted(owners[b] - {owner})}",
        )
        for other in near.get(b, ()):
            require(
                other not in owners,
                f"{name}: {at} is written in {owner} and shares memory "
                f"with {graph.buffers[other].name}, which the kernel touches too",
            )


def _check_temps(graph: Graph, schedule: Schedule) -> None:
    """Check that every temp in a table or among the outputs has memory."""
    touched = set(graph.outputs)
    touched.update(b for k in schedule.kernels for v in k.every for b in _seen_by(v))
    touched.update(graph.values[r] for e in schedule.externs for r in e.reads)
    for b in sorted(touched):
        require(
            graph.buffers[b].kind != "temp" or b in schedule.temps,
            f"temp {graph.buffers[b].name} is used, but has no memory",
        )


def _seen_by(v: Variant) -> Iterator[int]:
    """Yield the buffers that a variant touches."""
    for column in v.columns:
        yield from column


def _check_memory(graph: Graph, schedule: Schedule) -> None:
    """Check the arena: each place belongs to a temp that only kernels touch, or to one
    in a stack, in the part of its device.

    Places that one launch touches must be disjoint. `difference` shows that a place
    still holds its value when a step reads it.
    """
    plan = schedule.memory
    members: dict[int, list[Buffer]] = {}
    for b in graph.buffers:
        members.setdefault(b.storage, []).append(b)
    stacked = {s for stack in schedule.stacks for s in stack.storages}
    ends: dict[int, int] = {}
    cpu = 0
    for first, end in sorted(plan.remote.values()):
        require(cpu <= first <= end <= plan.size, "arena: devices share a place in it")
        cpu = end
    for s, at in plan.offsets.items():
        views = members.get(s, [])
        name = views[0].name if views else f"storage {s}"
        require(
            bool(views)
            and all(x.kind == "temp" for x in views)
            and all(x.device in ("cpu", *plan.remote) for x in views),
            f"arena: {name} is no temp, or its device has no part",
        )
        ends[s] = at + storage_bytes(views)
        first, end = plan.remote.get(views[0].device, (cpu, plan.size))
        require(
            at >= first and (at % ALIGNED == 0 or s in stacked) and ends[s] <= end,
            f"arena of {plan.size} bytes: {name} lies from {at} to {ends[s]}",
        )
    storage = [b.storage for b in graph.buffers]
    from_externs: set[int] = set()
    shared = {storage[b] for b in graph.outputs}
    for e in schedule.externs:
        read = {storage[graph.values[v]] for v in e.reads}
        written = {storage[graph.values[v]] for v in e.writes}
        from_externs |= written - read
        shared |= (written | read) - stacked
    for s in sorted(shared & plan.offsets.keys()):
        raise GraphError(f"arena: {members[s][0].name} is seen by others than kernels")
    for s in sorted(plan.returned - from_externs):
        raise GraphError(f"storage {s} is returned by no extern")
    in_kernels = {
        storage[b] for k in schedule.kernels for v in k.every for b in _seen_by(v)
    }
    for s in sorted(plan.loose):
        if s not in plan.returned or s in in_kernels or len(members[s]) > 1:
            raise GraphError(f"storage {s} is loose, but not seen by externs alone")
    _check_freed(graph, schedule, members)
    for step in schedule.steps if plan.offsets else ():
        for where, touched in _launches(graph, step):
            placed = {storage[b] for b in touched} & plan.offsets.keys()
            places = sorted((plan.offsets[s], ends[s], s) for s in placed)
            for (_, end, one), (at, _, other) in itertools.pairwise(places):
                require(
                    end <= at,
                    f"{where}: {members[one][0].name} and {members[other][0].name} "
                    "share a place in the arena",
                )


def _check_freed(
    graph: Graph, schedule: Schedule, members: dict[int, list[Buffer]]
) -> None:
    """Check that only temps are freed, and that nothing touches them later."""
    plan, storage = schedule.memory, [b.storage for b in graph.buffers]
    if not plan.freed:
        return
    require(
        len(plan.freed) == len(schedule.steps),
        f"memory is freed after {len(plan.freed)} steps of {len(schedule.steps)}",
    )
    later = {storage[b] for b in graph.outputs}
    for step, freed in reversed([*zip(schedule.steps, plan.freed, strict=True)]):
        for s in freed:
            views = members.get(s, [])
            name = views[0].name if views else f"storage {s}"
            require(
                bool(views) and all(x.kind == "temp" for x in views),
                f"{step.name}: frees {name}, which is not a temp",
            )
            require(s not in later, f"{step.name}: frees {name} too early")
            later.add(s)
        touched = {b for _, views in _launches(graph, step) for b in views}
        later.update(storage[b] for b in touched)


def _launches(graph: Graph, step: Step) -> Iterator[tuple[str, set[int]]]:
    """Yield name and buffers of the parts of a step, between which lanes finish."""
    if isinstance(step, (Extern, Batch)):
        yield step.name, {graph.values[v] for v in (*step.reads, *step.writes)}
    elif isinstance(step, Kernel):
        yield step.name, {b for v in step.every for b in _seen_by(v)}
    elif isinstance(step, Run):
        for i, block in enumerate(step.blocks):
            touched = {
                b
                for kernel, lanes in zip(step.kernels, block, strict=True)
                for v, lane in lanes
                for b in kernel.variants[v].touched(lane)
            }
            yield f"{step.name}, block {i}", touched

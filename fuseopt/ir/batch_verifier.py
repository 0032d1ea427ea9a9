"""Verify batches and stacks: raise a GraphError that names the broken invariant.

This does not prove that a batch computes what its rows compute; a probe compares the
bits (see docs/numerics.md). It proves that no row depends on another, and that rows lie
where the batch places them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .graph import (
    ALIGNED,
    DTYPE_BYTES,
    Batch,
    Buffer,
    Extern,
    Graph,
    Schedule,
    storage_bytes,
)
from .graph_verifier import require
from .products import CHAINED, Operand


def check_batches(
    graph: Graph, schedule: Schedule, near: Mapping[int, Sequence[int]]
) -> None:
    """Raise GraphError at the first malformed stack or batch."""
    _check_stacks(graph, schedule)
    for batch in schedule.batches:
        _check_rows(graph, batch, near)
        for operand in (*batch.operands, *batch.results):
            _check_operand(graph, schedule, batch, operand)
        made = [tuple(graph.values[v] for v in e.writes) for e in batch.externs]
        require(
            [tuple(x.buffers[i] for x in batch.results) for i in range(len(made))]
            == made,
            f"{batch.name}: its results differ from the writes of its rows",
        )


def check_branches(
    graph: Graph, schedule: Schedule, near: Mapping[int, Sequence[int]]
) -> None:
    """Raise GraphError unless branches have each step of a series once.

    No branch may touch memory that another one writes, or its place in the arena.
    """
    for start, branches in schedule.branches.items():
        places = sorted(i for branch in branches for i in branch)
        series = schedule.steps[start : start + len(places)]
        require(
            places == [*range(start, start + len(places))]
            and all(isinstance(step, (Extern, Batch)) for step in series)
            and all(list(branch) == sorted(branch) for branch in branches),
            f"step {start}: its branches are not those of a series of calls",
        )
        writer: dict[int, int] = {}
        owner: dict[int, int] = {}
        for k, branch in enumerate(branches):
            for v in (v for i in branch for v in _writes(schedule.steps[i])):
                for b in (graph.values[v], *near.get(graph.values[v], ())):
                    require(writer.setdefault(b, k) == k, _meet(start, graph, b))
        for k, branch in enumerate(branches):
            for i in branch:
                for v in (*_reads(schedule.steps[i]), *_writes(schedule.steps[i])):
                    b = graph.values[v]
                    require(writer.get(b, k) == k, _meet(start, graph, b))
                    if graph.buffers[b].storage in schedule.memory.offsets:
                        owner.setdefault(graph.buffers[b].storage, k)
        _check_places(graph, schedule, owner, start)


def _check_places(
    graph: Graph, schedule: Schedule, owner: Mapping[int, int], start: int
) -> None:
    """Storages of different branches lie apart in the arena."""
    sizes: dict[int, list[Buffer]] = {s: [] for s in owner}
    for b in graph.buffers:
        if b.storage in sizes:
            sizes[b.storage].append(b)
    end = -1
    last = 0
    for s in sorted(owner, key=schedule.memory.offsets.__getitem__):
        at = schedule.memory.offsets[s]
        require(
            at >= end or owner[s] == owner[last],
            f"step {start}: two branches share a place in the arena",
        )
        if at + storage_bytes(sizes[s]) > end:
            end, last = at + storage_bytes(sizes[s]), s


def _meet(start: int, graph: Graph, b: int) -> str:
    return f"step {start}: two branches touch {graph.buffers[b].name}, one writes it"


def _reads(step: object) -> tuple[int, ...]:
    return step.reads if isinstance(step, (Extern, Batch)) else ()


def _writes(step: object) -> tuple[int, ...]:
    return step.writes if isinstance(step, (Extern, Batch)) else ()


def _check_stacks(graph: Graph, schedule: Schedule) -> None:
    members: dict[int, list[Buffer]] = {}
    for stack in schedule.stacks:
        members.update({s: [] for s in stack.storages})
    outputs = {graph.buffers[b].storage for b in graph.outputs}
    for b in graph.buffers:
        if b.storage in members:
            members[b.storage].append(b)
    seen: set[int] = set()
    for number, stack in enumerate(schedule.stacks):
        where = f"stack {number}"
        require(
            seen.isdisjoint(stack.storages)
            and len({*stack.storages}) == len(stack.storages),
            f"{where}: a storage lies in two places",
        )
        seen.update(stack.storages)
        places = [schedule.memory.offsets.get(s) for s in stack.storages]
        first = places[0]
        require(
            places == [None] * len(places)
            or (
                first is not None
                and first % ALIGNED == 0
                and places == [first + i * stack.step for i in range(len(places))]
            ),
            f"{where}: its storages are not adjacent in the arena",
        )
        for s in stack.storages:
            require(
                bool(members[s])
                and all(b.kind == "temp" for b in members[s])
                and s not in outputs,
                f"{where}: storage {s} is not a temp that only this stack places",
            )
            alike = {(b.dtype, b.device) for b in members[s]}
            require(
                alike == {(stack.dtype, stack.device)}
                and storage_bytes(members[s]) <= stack.step,
                f"{where}: storage {s} does not fit into {stack.step} bytes of "
                f"{stack.dtype}",
            )


def _check_rows(graph: Graph, batch: Batch, near: Mapping[int, Sequence[int]]) -> None:
    """Check that no row touches memory that another row writes."""
    several = len(batch.externs) > 1 or batch.way == CHAINED
    require(several, f"{batch.name}: a batch of one row")
    writer: dict[int, int] = {}
    for row, extern in enumerate(batch.externs):
        require(not extern.ordered, f"{batch.name}: row {row} keeps an order")
        for v in extern.writes:
            for b in (graph.values[v], *near.get(graph.values[v], ())):
                require(b not in writer, f"{batch.name}: two rows write one buffer")
                writer[b] = row
    for row, extern in enumerate(batch.externs):
        for v in extern.reads:
            other = writer.get(graph.values[v], row)
            require(
                other == row,
                f"{batch.name}: row {row} reads what row {other} writes",
            )


def _check_operand(
    graph: Graph, schedule: Schedule, batch: Batch, operand: Operand
) -> None:
    """Check that the rows of an operand lie in its stack, one after another."""
    require(
        len(operand.buffers) == len(batch.externs),
        f"{batch.name}: {len(operand.buffers)} matrices for {len(batch.externs)} rows",
    )
    if operand.stack < 0:
        return
    stack = schedule.stacks[operand.stack]
    size = DTYPE_BYTES[stack.dtype]
    for row, b in enumerate(operand.buffers):
        x = graph.buffers[b]
        require(
            x.storage in stack.storages,
            f"{batch.name}: {x.name} lies in no row of stack {operand.stack}",
        )
        at = stack.storages.index(x.storage) * stack.step + x.first_byte
        expected = (operand.first * size) + row * stack.step
        matrix = x.shape[-2:]
        rest = operand.shape[len(operand.shape) - len(matrix) :]
        require(
            at == expected and matrix == rest,
            f"{batch.name}: {x.name} lies at byte {at}, not at {expected}",
        )

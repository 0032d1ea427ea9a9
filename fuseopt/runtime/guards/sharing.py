"""Check that the tensors of a call share memory as they did when it was captured.

Most steps are captured for tensors that share none. Before a step runs on tensors at
other addresses, its written memory may overlap no other tensor's. The exceptions are
tensors that overlapped in the same way before.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import AliasError, UnsupportedInput
from ...ir.geometry import Shape, memory_order
from ...ir.graph import Buffer, Extern, Graph, written_by
from ..tables.addresses import AddressPool

#: (position of a tensor, of a second one, bytes between them)
Distance = tuple[int, int, int]


@dataclass(frozen=True)
class Inputs:
    """Writes of a step to the tensors of a call, and a plan's assumptions on their
    memory.

    `buffers` are all of the graph's. `statics` counts the tensors that belong to the
    graph, which come first. `written` are the buffers whose memory the step writes, or
    would write if the result were read. `mutated` are the indices of the tensors that
    it does write, sorted. `args` has the buffer of each argument by its index among the
    tensors.

    `strides` are (index, strides) of the tensors on whose strides the plan relies. With
    these strides memory was proven disjoint, views were made, ATen is called, or
    eager's loop was determined. `orders` are (index, shape, order of memory) of the
    tensors that decide the order of a sum, and the layout of results. `distances` are
    those of tensors that share memory. `twins` are index pairs (second, first) of
    arguments that are one tensor.
    """

    buffers: tuple[Buffer, ...]
    statics: int
    written: frozenset[int]
    mutated: list[int]
    args: dict[int, int]
    strides: list[tuple[int, tuple[int, ...]]]
    orders: list[tuple[int, Shape, Shape]]
    distances: list[Distance]
    twins: tuple[tuple[int, int], ...]

    @property
    def writes_args(self) -> bool:
        """Is an argument written?"""
        return any(self.buffers[b].kind == "arg" for b in self.written)

    def fit(self, strides: Sequence[tuple[int, ...]]) -> bool:
        """Are the strides of a call's tensors those that the plan assumes? It assumes
        none for most tensors.
        """
        return (
            all(strides[i] == planned for i, planned in self.strides)
            and all(strides[i] == strides[k] for i, k in self.twins)
            and all(
                memory_order(shape, strides[i]) == planned
                for i, shape, planned in self.orders
            )
        )


def inputs(
    graph: Graph,
    statics: int,
    twins: tuple[tuple[int, int], ...],
    dropped: Sequence[int] = (),
    moved: Sequence[int] = (),
) -> Inputs:
    """Return the Inputs of a graph.

    `dropped` are buffers without their writes. `moved` are tensors that are written in
    memory which the step gives them.
    """
    buffers = graph.buffers
    written = {graph.values[v] for n in graph.nodes for v in written_by(n)}
    mutated = {buffers[b].storage for b in written}
    storages = mutated | {buffers[b].storage for b in dropped}
    members: dict[int, list[Buffer]] = {}
    for buffer in buffers:
        members.setdefault(buffer.storage, []).append(buffer)
    strides: list[tuple[int, tuple[int, ...]]] = []
    distances: list[Distance] = []
    for storage, every in members.items():
        tensors = [x for x in every if x.kind in ("static", "arg")]
        if len(every) < 2 or not tensors:
            continue
        if storage in storages or len(tensors) < len(every):
            strides += [(x.source, x.stride) for x in tensors]
        if storage in storages:
            full = [x for x in tensors if 0 not in x.shape]
            distances += [
                (x.source, full[0].source, x.first_byte - full[0].first_byte)
                for x in full[1:]
            ]
    given = [x for x in buffers if x.kind in ("static", "arg")]
    changed = {x.source for x in given if x.storage in mutated}
    changed |= {second for second, first in twins if first in changed}
    orders: list[tuple[int, Shape, Shape]] = []
    if _has_tails(graph) or any(isinstance(n, Extern) for n in graph.nodes):
        strides += [(x.source, x.stride) for x in given]
    elif _has_orders(graph):
        orders = [(x.source, x.shape, memory_order(x.shape, x.stride)) for x in given]
    return Inputs(
        buffers,
        statics,
        frozenset(b for b, x in enumerate(buffers) if x.storage in storages),
        sorted(changed.union(moved)),
        {x.source: b for b, x in enumerate(buffers) if x.kind == "arg"},
        strides,
        orders,
        distances,
        twins,
    )


def _has_tails(graph: Graph) -> bool:
    """Do bits of a call change where eager's vectorized loop ends? The strides of its
    operands, temps among them, decide which of its elements that concerns.
    """
    bodies = {id(n.body): n.body for n in graph.nodes if not isinstance(n, Extern)}
    return any(x.op == "tail" for body in bodies.values() for x in body.instrs)


def _has_orders(graph: Graph) -> bool:
    """Does anything depend on the order of elements in memory? Sums do. New tensors
    take the layout of their operands.
    """
    reduces = any(n.body.reduction for n in graph.nodes if not isinstance(n, Extern))
    return reduces or any(len(graph.buffers[b].shape) > 1 for b in graph.outputs)


#: Moves of a tensor: FREELY to memory that the step does not write, ALONE to memory
#: that it shares with no other tensor.
FREELY, ALONE = 1, 2


class Moves(NamedTuple):
    """Tensors that a guard may follow to new addresses by itself.

    `loose[i]` is FREELY or ALONE for a tensor i that may move, else 0. `reach[i]` is
    the number of bytes from its first element to behind its last. `starts` and `ends`
    are the written memory that does not move, sorted. `pool` has the addresses to
    change. `stays` has starts and ends of all memory that does not move.
    """

    loose: Sequence[int]
    reach: Sequence[int]
    starts: Sequence[int]
    ends: Sequence[int]
    pool: AddressPool
    stays: tuple[Sequence[int], Sequence[int]] = ((), ())


class Sharing:
    """Memory that a step writes, for tensors of certain layouts.

    `reach` is, for each buffer that is a tensor of the call, the number of bytes from
    its first element to behind its last.
    """

    def __init__(self, given: Inputs, reach: Mapping[int, int]) -> None:
        self.given = given
        self.reach = reach
        self._starts: list[int] = []
        self._ends: list[int] = []

    def check(self, now: array[int], known: array[int] | None) -> bool:
        """Raise AliasError if tensors at these addresses share memory in a new way.
        Raise UnsupportedInput for a tensor that has elements but no memory.

        `known` are the addresses that were checked before, if any. Returns whether
        written memory may have moved, so that the caller must call `moves` again.
        """
        inputs = self.given
        if 0 in now:
            self._check_nowhere(now)
        together = all(now[i] - now[k] == d for i, k, d in inputs.distances)
        if not together or any(now[i] != now[k] for i, k in inputs.twins):
            raise AliasError("the aliasing between inputs changed")
        n = inputs.statics
        if known is None or known[:n] != now[:n] or inputs.writes_args:
            self._check_all(now)
            return True
        self._check_moved(now, known)
        return False

    def moves(self, pool: AddressPool) -> Moves:
        """Return what a guard may follow: arguments of no `distances` or `twins`."""
        inputs = self.given
        fixed = {x for i, k, _ in inputs.distances for x in (i, k)}
        fixed.update(x for pair in inputs.twins for x in pair)
        tensors = range(pool.places.n_tensors)
        args, written = inputs.args, inputs.written
        loose = [
            0
            if i < inputs.statics or i in fixed
            else ALONE
            if args.get(i, -1) in written
            else FREELY
            for i in tensors
        ]
        reach = [self.reach.get(args.get(i, -1), 0) for i in tensors]
        stay = [b for b in self.reach if not loose[inputs.buffers[b].source]]
        now = pool.words
        written_spans = self._spans((b for b in stay if b in written), now)
        # the guard reads these only where a tensor may move ALONE
        all_spans = self._spans(stay, now) if ALONE in loose else ((), ())
        return Moves(loose, reach, *written_spans, pool, all_spans)

    def _spans(
        self, buffers: Iterable[int], now: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Return starts and ends of some buffers' memory: sorted, disjoint spans."""
        starts: list[int] = []
        ends: list[int] = []
        sources = self.given.buffers
        for start, end in sorted(
            self._interval(b, now[sources[b].source]) for b in buffers
        ):
            if ends and start < ends[-1]:
                ends[-1] = max(ends[-1], end)
            elif start < end:
                starts.append(start)
                ends.append(end)
        return starts, ends

    def _interval(self, b: int, address: int) -> tuple[int, int]:
        return address, address + self.reach[b]

    def _check_nowhere(self, now: Sequence[int]) -> None:
        """Raise UnsupportedInput for a tensor with elements at address 0."""
        for b, reach in self.reach.items():
            buffer = self.given.buffers[b]
            if reach and not now[buffer.source]:
                raise UnsupportedInput(
                    f"{buffer.name} has elements and no memory; nothing was written"
                )

    def _check_all(self, now: Sequence[int]) -> None:
        """Raise AliasError if written memory overlaps that of another storage."""
        buffers, written = self.given.buffers, self.given.written
        spans = sorted(
            (*self._interval(b, now[buffers[b].source]), b) for b in self.reach
        )
        # the ends of the memory up to here: of all tensors, and of written ones
        reach, owner, written_reach, writer = 0, -1, 0, -1
        for start, end, b in spans:
            if start == end:
                continue
            is_written = b in written
            for other, far in ((writer, written_reach), (owner, reach)):
                fresh = start < far and buffers[b].storage != buffers[other].storage
                if fresh and (is_written or other in written):
                    raise AliasError(
                        f"{buffers[other].name} and {buffers[b].name} share memory, "
                        "which they did not when the step was captured"
                    )
            if end > reach:
                reach, owner = end, b
            if is_written and end > written_reach:
                written_reach, writer = end, b
        written_spans = [s for s in spans if s[2] in written and s[0] != s[1]]
        self._starts = [s[0] for s in written_spans]
        self._ends = [s[1] for s in written_spans]

    def _check_moved(self, now: Sequence[int], known: Sequence[int]) -> None:
        """Raise AliasError if a read-only argument moved into written memory."""
        for i in range(self.given.statics, len(now)):
            b = self.given.args.get(i)
            if now[i] == known[i] or b is None:
                continue
            low, high = self._interval(b, now[i])
            k = bisect_right(self._starts, low)
            before = k > 0 and self._ends[k - 1] > low
            after = k < len(self._starts) and self._starts[k] < high
            if low != high and (before or after):
                raise AliasError(
                    f"{self.given.buffers[b].name} now lies in memory that the step "
                    "writes"
                )

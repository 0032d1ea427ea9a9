"""Prove that a Schedule is equivalent to its Graph, or find the first difference.

Both run on *terms* instead of numbers, and each buffer must end with the same term. A
term is a node of one shared expression tree. This covers dependencies, order, dropped
and doubled effects, the order of blocks, and temps that reuse one place. The cost is
linear.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from .graph import (
    REDUCTIONS,
    Batch,
    Buffer,
    Extern,
    Graph,
    Instr,
    Run,
    ScalarRef,
    Schedule,
    Variant,
    kept,
    rows_of,
    storage_bytes,
    written_by,
)

Key = tuple[object, ...]


class _Terms:
    """Interned terms: equal expressions have equal numbers."""

    def __init__(self) -> None:
        self.known: dict[Key, int] = {}

    def make(self, *key: object) -> int:
        return self.known.setdefault(key, len(self.known))


class _Arena:
    """The storages that currently occupy their places in an arena.

    A write evicts the storages that occupied its place before.
    """

    def __init__(self, graph: Graph, offsets: dict[int, int]) -> None:
        members: dict[int, list[Buffer]] = {s: [] for s in offsets}
        for b in graph.buffers:
            if b.storage in members:
                members[b.storage].append(b)
        self.places = {
            s: (at, at + storage_bytes(members[s])) for s, at in offsets.items()
        }
        #: the present ones: first byte, end and storage of each, in order
        self.owners: list[tuple[int, int, int]] = []

    def has(self, storage: int) -> bool:
        place = (*self.places[storage], storage)
        k = bisect_left(self.owners, place)
        return self.owners[k : k + 1] == [place]

    def take(self, storage: int) -> None:
        if self.has(storage):
            return
        start, end = self.places[storage]
        k = bisect_left(self.owners, (start, 0, 0))
        k -= k > 0 and self.owners[k - 1][1] > start
        last = k
        while last < len(self.owners) and self.owners[last][0] < end:
            last += 1
        del self.owners[k:last]
        insort(self.owners, (start, end, storage))


class _Memory:
    """Contents of every buffer, as a term.

    A write through an overlapping buffer adds a layer over the old term. Layers that do
    not touch each other have one canonical order. `offsets`: the places of storages in
    an arena.
    """

    def __init__(
        self,
        terms: _Terms,
        graph: Graph,
        near: dict[int, list[int]],
        offsets: dict[int, int],
    ) -> None:
        self.terms = terms
        self.near = {b: frozenset(others) for b, others in near.items()}
        self.base = [terms.make("entry", b) for b in range(len(graph.buffers))]
        self.layers: dict[int, list[tuple[int, int]]] = {}
        self.arena = _Arena(graph, offsets)
        # storages without bytes cannot be overwritten
        places = self.arena.places
        self.placed = {
            b: x.storage
            for b, x in enumerate(graph.buffers)
            if x.storage in places and places[x.storage][0] < places[x.storage][1]
        }

    def read(self, b: int) -> int:
        if b in self.placed and not self.arena.has(self.placed[b]):
            return self.terms.make("lost", b)
        layers = self.layers.get(b)
        if not layers:
            return self.base[b]
        return self.terms.make("over", self.base[b], tuple(layers))

    def write(self, b: int, term: int) -> None:
        if b in self.placed:
            self.arena.take(self.placed[b])
        self.base[b] = term
        self.layers.pop(b, None)
        for other in self.near.get(b, ()):
            layers = [x for x in self.layers.get(other, ()) if x[0] != b]
            free = len(layers)
            while free and layers[free - 1][0] not in self.near[b]:
                free -= 1
            while free < len(layers) and layers[free][0] < b:
                free += 1
            layers.insert(free, (b, term))
            self.layers[other] = layers


def _instr_terms(
    terms: _Terms,
    instrs: Sequence[Instr],
    loads: Sequence[int],
    scalars: Sequence[ScalarRef],
    one: Iterable[bool],
    dims: tuple[int, ...],
) -> list[int]:
    """Return the term of each instruction.

    `one[x]`: True if %x works on a single element. `dims`: removed by reductions.
    """
    results: list[int] = []
    for instr, single in zip(instrs, one, strict=True):
        if instr.op == "load":
            results.append(loads[int(instr.attr or 0)])
        elif instr.op == "scalar":
            results.append(
                terms.make("scalar", instr.dtype, scalars[int(instr.attr or 0)])
            )
        elif instr.op == "const":
            results.append(
                terms.make("const", instr.dtype, repr(float(instr.attr or 0)))
            )
        elif instr.op == "cast" and instrs[instr.args[0]].dtype == instr.dtype:
            results.append(results[instr.args[0]])
        else:
            # the value of a tail depends on the instruction that uses it
            args = tuple(
                terms.make("tail", single) if instrs[a].op == "tail" else results[a]
                for a in instr.args
            )
            how = (dims, instr.attr) if instr.op in REDUCTIONS else (instr.attr,)
            results.append(terms.make(instr.op, instr.dtype, args, *how))
    return results


def _run_extern(graph: Graph, memory: _Memory, node: Extern) -> None:
    seen = tuple(memory.read(graph.values[v]) for v in node.reads)
    for k, v in enumerate(node.writes):
        result = memory.terms.make("extern", node.payload, k, seen)
        memory.write(graph.values[v], result)


class Difference(NamedTuple):
    """A buffer that ends with another term than in the Graph.

    `node` makes its final value; None if that is a view of another node's result.
    `untouched`: the schedule never writes it.
    """

    buffer: int
    node: int | None
    untouched: bool


def difference(
    graph: Graph, schedule: Schedule, near: dict[int, list[int]]
) -> Difference | None:
    """Return the first Difference in program order; None proves equivalence.

    `near`: for each buffer, those that share memory with it. No lane of a kernel may
    touch memory that another lane writes.
    """
    terms = _Terms()
    expected = _Memory(terms, graph, near, {})
    for node in chain.from_iterable(map(rows_of, graph.nodes)):
        if isinstance(node, Extern):
            _run_extern(graph, expected, node)
            continue
        single = graph.buffers[graph.values[node.writes[0]]].shape == ()
        loads = [expected.read(graph.values[v]) for v in node.reads]
        instrs = node.body.instrs
        results = _instr_terms(
            terms, instrs, loads, node.scalars, [single] * len(instrs), node.dims
        )
        for v, (x, _) in zip(node.writes, node.body.writes, strict=True):
            expected.write(graph.values[v], results[x])
    got = _Memory(terms, graph, near, schedule.memory.offsets)
    for step in schedule.steps:
        if isinstance(step, (Extern, Batch)):
            for extern in step.externs if isinstance(step, Batch) else (step,):
                _run_extern(graph, got, extern)
        elif isinstance(step, Run):
            for block in step.blocks:
                for k in range(len(step.kernels)):
                    _run_variants(got, step.part(block, k).variants)
        else:
            for variants in (step.first, step.variants, step.finish):
                _run_variants(got, variants)
    writer = {v: i for i, n in enumerate(graph.nodes) for v in written_by(n)}
    needed = {b for b, v in enumerate(graph.final) if v >= 0} | set(graph.outputs)
    last = len(graph.nodes)
    for b in sorted(needed, key=lambda b: (writer.get(graph.final[b], last), b)):
        # an empty buffer has no contents that could differ
        if graph.buffers[b].numel and expected.read(b) != got.read(b):
            untouched = got.read(b) == terms.make("entry", b)
            return Difference(b, writer.get(graph.final[b]), untouched)
    return None


def _run_variants(memory: _Memory, variants: Sequence[Variant]) -> None:
    """Run all lanes of variants, whose loads all happen before their stores.

    The caller has checked that the lanes are independent.
    """
    results: list[tuple[int, int]] = []
    for v in variants:
        in_lane = set(v.lane_code)
        for lane, space in enumerate(v.shapes):
            loads = [
                memory.read(column[lane]) if slot.read else -1
                for slot, column in zip(v.slots, v.columns, strict=True)
            ]
            dims = v.reduced[lane] if v.reduced else ()
            left = kept(space, dims) if dims else space
            late = set(v.output_code)
            single = [
                x in in_lane or (left if x in late else space) == ()
                for x in range(len(v.instrs))
            ]
            refs = [column[lane] for column in v.scalars]
            computed = _instr_terms(memory.terms, v.instrs, loads, refs, single, dims)
            results += [(v.columns[s][lane], computed[x]) for x, s in v.stores]
    for b, term in results:
        memory.write(b, term)

"""Batch ATen calls: calls on matrices that are ready together become one call.

Between two kernels, externs depend on each other in *levels*; externs of one level are
independent. Calls of a level that differ only in their matrices become a Batch. The
first batch that reads or makes some rows decides their stack. Later batches keep that
order, so that a chain of products stays in its stacks. A single call stays at its place
in the chain of its lane, and `Schedule.alone` gives the reason.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..ir.alias import overlaps
from ..ir.graph import DTYPE_BYTES, Buffer, Extern, Graph, Schedule, Step, storage_bytes
from ..ir.products import (
    ADDRESSED,
    CHAINED,
    COPIED,
    MERGED,
    PADDED,
    SCALED,
    SHARED,
    TIMES,
    Alone,
    Batch,
    Operand,
    Product,
    Result,
    Stack,
    Trial,
)
from .batch_limits import COPY, COPY_REMOTE, refusal
from .batch_operands import (
    GAP,
    Refused,
    anywhere,
    contiguous_strides,
    kind_of_scale,
    layout_of,
    merged_rows,
    uneven,
)
from .dependencies import CPU
from .levels import in_levels, in_order
from .passes import Batching, Machine
from .placing import placed

#: Why a product is a single call.
ONLY = "no other product of its kind is ready with it"


class _Row(NamedTuple):
    extern: Extern
    product: Product


def batch_products(graph: Graph, schedule: Schedule, machine: Machine) -> Schedule:
    """Put products that are alike and ready together into batches."""
    # one product alone may be in a chain
    least = 2 if machine.batching is None or not machine.batching.chains else 1
    if machine.batching is None or len(schedule.externs) < least:
        return schedule
    fixed: frozenset[int] = frozenset()
    while True:
        batcher = _Batcher(graph, schedule, machine.batching, fixed)
        steps = batcher.steps(schedule.steps)
        # operands of single calls must have eager's alignment
        seen = batcher.seen_singly(steps)
        if not seen:
            break
        fixed |= seen
    own: list[Stack] = []
    if machine.batching.places:
        stacked = batcher.place
        own = placed(graph, machine.batching, steps, batcher.members, stacked)
    alone = (Alone(what, n, why) for (what, why), n in batcher.alone.items())
    stacks = (*batcher.stacks, *own)
    if not stacks and not alone and tuple(steps) == schedule.steps:
        return schedule
    return replace(schedule, steps=tuple(steps), stacks=stacks, alone=tuple(alone))


class _Batcher:
    """Makes batches of the externs between kernels, from first to last."""

    def __init__(
        self,
        graph: Graph,
        schedule: Schedule,
        batching: Batching,
        fixed: frozenset[int],
    ) -> None:
        self.graph = graph
        self.batching = batching
        self.near = overlaps(graph.buffers)
        self.members: dict[int, list[Buffer]] = {}
        for b in graph.buffers:
            if b.kind == "temp":
                self.members.setdefault(b.storage, []).append(b)
        #: storages that cannot lie in a stack: those of the caller, and those that ATen
        #: allocates
        self.fixed = {graph.buffers[b].storage for b in graph.outputs} | fixed
        self.stacks: list[Stack] = []
        self.place: dict[int, tuple[int, int]] = {}  # storage -> (its stack, its row)
        self.alone: Counter[tuple[str, str]] = Counter()

    def steps(self, steps: Sequence[Step]) -> list[Step]:
        """Return a schedule's steps with batches in them."""
        made: list[Step] = []
        beside: list[Extern] = []
        for step in (*steps, None):
            if isinstance(step, Extern):
                beside.append(step)
                continue
            made += self.batched(beside)
            beside = []
            if step is not None:
                made.append(step)
        return made

    def seen_singly(self, steps: Sequence[Step]) -> frozenset[int]:
        """Return the storages of single calls in stacks with rows at any byte."""
        values = self.graph.values
        touched = {
            self._storage(values[v])
            for e in steps
            if isinstance(e, Extern)
            for v in (*e.reads, *e.writes)
        }
        return frozenset(
            s
            for s in touched & self.place.keys()
            if uneven(self.stacks[self.place[s][0]])
        )

    def batched(self, externs: Sequence[Extern]) -> list[Extern | Batch]:
        """Return adjacent externs, in batches where possible."""
        batch_of: dict[int, Batch] = {}
        products = [self.batching.product(e.payload) for e in externs]
        if not any(products):
            self._take(externs)
            return [*externs]
        levels = in_levels(self.graph, externs, self.near)
        for level in levels.members:
            groups: dict[tuple[object, ...], list[int]] = {}
            single: list[int] = []
            for i in level:
                product = products[i]
                if isinstance(product, Product):
                    groups.setdefault(self._key(product), []).append(i)
                else:
                    single.append(i)
                    if product:
                        self.alone[externs[i].name, product] += 1
            for group in groups.values():
                rows = [_Row(externs[i], _product(products[i])) for i in group]
                batches = [*self._batches(rows)]
                made = {e.payload: x for x in batches for e in x.externs}
                for i in group:
                    if externs[i].payload in made:
                        batch_of[i] = made[externs[i].payload]
                    else:
                        single.append(i)
            self._take([externs[i] for i in single])
        return list(in_order(externs, batch_of, levels.needs))

    def _take(self, externs: Sequence[Extern]) -> None:
        """Record single calls: ATen allocates their results."""
        for e in externs:
            self.fixed |= {self._storage(self.graph.values[v]) for v in e.writes}

    def _storage(self, b: int) -> int:
        return self.graph.buffers[b].storage

    def _key(self, p: Product) -> tuple[object, ...]:
        """Return a key, equal for products that may be rows of one batch."""
        buffers = [self.graph.buffers[b] for b in self._touched(p)]
        storages = [self._storage(b) for b in p.operands]
        return (
            *(p.op, tuple(map(repr, p.scales)), p.options),
            tuple((x.dtype, x.device, *layout_of(x)) for x in buffers),
            tuple(self.place.get(s, (None, 0))[0] for s in storages),
            tuple(storages.index(s) for s in storages),
        )

    # ------------------------------------------------------------ one group

    def _batches(self, rows: list[_Row]) -> Iterator[Batch]:
        """Yield the batches of products that are alike; record the rest in `alone`."""
        what = self._described(rows[0].product)
        try:
            self._check(rows)
            largest = max(self._bytes(b) for b in self._touched(rows[0].product))
            most = self.batching.bytes // largest
            if most < 2:
                raise Refused("two of its matrices have more than batch_bytes")
        except Refused as why:
            self.alone[what, str(why)] += len(rows)
            return
        rows = self._sorted(rows)
        count = -(-len(rows) // most)
        ends = [len(rows) * i // count for i in range(count + 1)]
        for start, end in itertools.pairwise(ends):
            part = rows[start:end]
            try:
                yield self._batch(part)
            except Refused as why:
                self.alone[what, str(why)] += len(part)

    def _touched(self, p: Product) -> list[int]:
        return [*p.operands, *p.results]

    def _bytes(self, b: int) -> int:
        x = self.graph.buffers[b]
        return x.numel * DTYPE_BYTES[x.dtype]

    def _described(self, p: Product) -> str:
        shapes = [self.graph.buffers[b] for b in p.operands]
        between = " @ " if p.op in TIMES else ", "
        sizes = between.join(str(list(x.shape)) for x in shapes[-2:])
        return f"{p.op} {shapes[-1].dtype} {sizes}"

    def _check(self, rows: Sequence[_Row]) -> None:
        """Refuse calls that cannot be a batch."""
        p = rows[0].product
        buffers = [self.graph.buffers[b] for b in self._touched(p)]
        why = refusal(buffers, p)
        if why:
            raise Refused(why)

    def _sorted(self, rows: list[_Row]) -> list[_Row]:
        """Return rows in the order of the first stack that has them all."""
        for k in range(len(rows[0].product.operands)):
            storages = [self._storage(row.product.operands[k]) for row in rows]
            if len({*storages}) == len(rows) and all(s in self.place for s in storages):
                order = sorted(range(len(rows)), key=lambda i: self.place[storages[i]])
                return [rows[i] for i in order]
        return rows

    def _batch(self, rows: Sequence[_Row]) -> Batch:
        """Return the Batch of some rows. Raises Refused."""
        self._check(rows)
        if len(rows) < 2 and not self.batching.chains:
            raise Refused(ONLY)
        found = self._made_of(rows, ADDRESSED) if self._may_address(rows) else None
        found = found or self._made_of(rows, COPIED)
        assert found is not None, "a batch of copies is made or refused"
        return found

    def _may_address(self, rows: Sequence[_Row]) -> bool:
        """May generated code make these products of matrices of the caller?"""
        p = rows[0].product
        if not self.batching.chains or p.op not in TIMES or p.op in MERGED:
            return False
        every = (self.graph.buffers[b] for row in rows for b in row.product.operands)
        return all(x.device == CPU for x in every)

    def _made_of(self, rows: Sequence[_Row], apart: int) -> Batch | None:
        """Return a batch whose rows of the caller are COPIED, or ADDRESSED; None if
        only copies can be a batch. Raises Refused.
        """
        p = rows[0].product
        new: dict[tuple[int, ...], Stack] = {}
        columns = [
            tuple(r.product.operands[k] for r in rows) for k in range(len(p.operands))
        ]
        try:
            operands = [self._operand(x, new, p.op in MERGED, apart) for x in columns]
        except Refused:
            if apart == ADDRESSED:
                return None
            raise
        if not p.results and any(x.stack < 0 for x in operands):
            raise Refused("what it checks is in no batch")
        in_place = all(x.stack >= 0 or x.stack == ADDRESSED for x in operands)
        if apart == ADDRESSED and not in_place:
            return None
        if len(rows) < 2 and not in_place:
            raise Refused(ONLY)
        results = [*zip(*(r.product.results for r in rows), strict=True)]
        outs = [self.graph.buffers[b] for b in p.results]
        first = self.graph.buffers[p.operands[-1]]
        trial = Trial(
            *(p.op, first.dtype, first.device, len(rows)),
            tuple(layout_of(self.graph.buffers[b]) for b in p.operands),
            tuple((x.shape, x.stride, x.first) for x in operands),
            tuple(Result(x.shape, x.stride, x.dtype) for x in outs),
            tuple(map(kind_of_scale, p.scales)),
            p.options,
            anywhere(self.graph.buffers, columns) if p.op in TIMES else (),
        )
        # generated code writes a transposed result too
        contiguous = p.op in TIMES and p.op != SCALED
        dense = [self._made(column, contiguous) for column in results]
        outside = [self._apart(column) for column in results]
        chain = p.op == SCALED or (in_place and not any(outside))
        if apart == ADDRESSED and not chain:
            return None
        verdict = self.batching.verdict(trial, chain)
        if apart == ADDRESSED and verdict.way != CHAINED:
            return None
        if not verdict.way:
            raise Refused(verdict.why)
        for storages, stack in new.items():
            self._register(storages, stack)
        places: list[Operand] = []
        for column, size, out, why in zip(results, dense, outs, outside, strict=True):
            step = (size // GAP + 2) * GAP if verdict.way == PADDED else size
            if why:
                x = out._replace(offset=0)
                places.append(merged_rows(column, x, COPIED, 0, step, p.op in MERGED))
                continue
            made = tuple(map(self._storage, column))
            self._register(made, Stack(made, step, out.dtype, out.device))
            last = len(self.stacks) - 1
            places.append(merged_rows(column, out, last, 0, step, p.op in MERGED))
        externs = tuple(row.extern for row in rows)
        return Batch(
            *(externs, p.op, tuple(operands), tuple(places), p.scales, trial),
            verdict.way,
            verdict.order,
        )

    def _register(self, storages: tuple[int, ...], stack: Stack) -> None:
        self.place.update((s, (len(self.stacks), i)) for i, s in enumerate(storages))
        self.stacks.append(stack)

    def _made(self, results: Sequence[int], contiguous: bool) -> int:
        """Return the bytes of one row of a result."""
        buffers = [self.graph.buffers[b] for b in results]
        size = self._bytes(results[0])
        for x in buffers:
            if storage_bytes(self.members[x.storage]) != size:
                raise Refused("its result is a part of a larger tensor")
        if contiguous and buffers[0].stride != contiguous_strides(buffers[0].shape):
            raise Refused("its result is not contiguous")
        return size

    def _apart(self, results: Sequence[int]) -> bool:
        """Must rows of a result lie apart, since the step returns one, or single calls
        read it? They are copied there.
        """
        buffers = [self.graph.buffers[b] for b in results]
        if all(self._may_lie(x) and x.storage not in self.place for x in buffers):
            return False
        x = buffers[0]
        if x.device != CPU or x.numel > COPY.get(x.dtype, 1 << 12):
            raise Refused("the step returns it, or it has other views")
        return True

    def _may_lie(self, x: Buffer) -> bool:
        """May a storage be a row of a stack?"""
        views = self.members.get(x.storage, ())
        alike = all(y.dtype == x.dtype for y in views)
        return x.kind == "temp" and x.storage not in self.fixed and alike

    def _operand(
        self,
        buffers: tuple[int, ...],
        new: dict[tuple[int, ...], Stack],
        merged: bool,
        apart: int,
    ) -> Operand:
        """Return the places of an operand's rows. `merged`: each is a batch itself.
        `apart`: what rows outside of stacks are, COPIED or ADDRESSED.

        `new`: stacks that this batch is the first to need, by their storages, in the
        order of their future numbers.
        """
        x = self.graph.buffers[buffers[0]]
        storages = tuple(map(self._storage, buffers))
        addressed = apart == ADDRESSED
        if len(buffers) > len(set(buffers)) == 1 and not addressed:
            return merged_rows(buffers, x, SHARED, 0, 0, merged)
        places = [self.place.get(s) for s in storages]
        if None not in places and places[0] is not None:
            stack, row = places[0]
            if places == [(stack, row + i) for i in range(len(buffers))]:
                step = self.stacks[stack].step
                return merged_rows(buffers, x, stack, row, step, merged)
        if storages in new:
            number = len(self.stacks) + list(new).index(storages)
            return merged_rows(buffers, x, number, 0, new[storages].step, merged)
        every = [self.graph.buffers[b] for b in buffers]
        seen = {s for row in new for s in row}
        if (
            len({*storages}) == len(storages)
            and seen.isdisjoint(storages)
            and all(y.storage not in self.place and self._may_lie(y) for y in every)
        ):
            sizes = {storage_bytes(self.members[s]) for s in storages}
            if len(sizes) == 1:
                (size,) = sizes
                new[storages] = Stack(storages, size, x.dtype, x.device)
                number = len(self.stacks) + len(new) - 1
                return merged_rows(buffers, x, number, 0, size, merged)
        return self._outside(buffers, x, merged, apart)

    def _outside(
        self, buffers: tuple[int, ...], x: Buffer, merged: bool, stack: int
    ) -> Operand:
        """An operand whose rows lie apart; `stack`: COPIED or ADDRESSED."""
        if stack == COPIED and x.numel > (
            COPY.get(x.dtype, 1) if x.device == CPU else COPY_REMOTE
        ):
            raise Refused("its matrices are not adjacent, and a copy takes longer")
        if any(n > 1 and s <= 0 for n, s in zip(x.shape, x.stride, strict=True)):
            raise Refused("an expanded matrix")
        last = sum((n - 1) * s for n, s in zip(x.shape, x.stride, strict=True))
        size = (last + 1) * DTYPE_BYTES[x.dtype]
        return merged_rows(buffers, x._replace(offset=0), stack, 0, size, merged)


def _product(x: Product | str) -> Product:
    assert isinstance(x, Product)
    return x

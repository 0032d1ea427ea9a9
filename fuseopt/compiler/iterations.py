"""Recognise iterations X' = a X + u U X, with a product X X^T in each.

They are read from the recorded products and the sums around them, in any spelling: mm
and a sum, or addmm. The numbers are literals, the matrices are the step's alone, and
each is written once. So a matrix between two iterations of a chain is read by them
alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ..capture import Captured
from ..capture.aten.externs import Call, TensorRef
from ..ir.graph import (
    Extern,
    ForeachSchedulerNode,
    Graph,
    Instr,
    Literal,
    SchedulerNode,
    rows_of,
)

#: A matrix has at least so many times more columns than rows. At 1.5 both forms have
#: the same products; the products of m x m run at a lower rate than those of m x n.
WIDER = 2
#: Dtypes that have digits to lose.
DTYPES = ("f32", "f64")
MM, ADDMM = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
#: A node, and one of its rows.
Place = tuple[int, int]
#: A sum of buffers, each times a number.
Sum = dict[int, float]


class Iteration(NamedTuple):
    """X' = a X + u U X, made by the extern at place `node`.

    `x`, `u`, `made`: the buffers of X, U and X'. `product`: the buffer of U X, equal to
    `made` if the extern also adds. `rows`: those of the sum.
    """

    x: int
    u: int
    made: int
    product: int
    a: float
    scale: float
    node: int
    rows: tuple[Place, ...]


class Facts:
    """Tables of what writes and reads each storage of a captured step."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.graph: Graph = captured.graph
        self.buffers = self.graph.buffers
        self.writers: dict[int, list[Place]] = defaultdict(list)
        self.readers: dict[int, set[Place]] = defaultdict(set)
        self.value: dict[int, int] = {}
        for i, node in enumerate(self.graph.nodes):
            for k, row in enumerate(rows_of(node)):
                for v in row.writes:
                    self.writers[self.storage(v)].append((i, k))
                    self.value[self.graph.values[v]] = v
                for v in row.reads:
                    self.readers[self.storage(v)].add((i, k))
                    self.value[self.graph.values[v]] = v
        outputs = {self.buffers[b].storage for b in self.graph.outputs}
        kept = {
            x.storage
            for x, last in zip(self.buffers, self.graph.final, strict=True)
            if last >= 0 or x.kind != "temp"
        }
        self.fixed = outputs | kept

    def storage(self, value: int) -> int:
        return self.buffers[self.graph.values[value]].storage

    def once(self, b: int) -> bool:
        """Is a buffer a matrix of the step alone, that is written once?"""
        x = self.buffers[b]
        return (
            x.storage not in self.fixed
            and len(self.writers[x.storage]) == 1
            and x.dtype in DTYPES
            and len(x.shape) == 2
        )

    def row(self, place: Place) -> SchedulerNode | Extern:
        """Return the row at a place."""
        node = self.graph.nodes[place[0]]
        if isinstance(node, Extern):
            return node
        assert isinstance(node, ForeachSchedulerNode)
        return node.row(place[1])

    def call(self, place: Place) -> Call | None:
        """Return the product of plain matrices at a place."""
        node = self.graph.nodes[place[0]]
        if not isinstance(node, Extern):
            return None
        call = self.captured.calls[node.payload]
        plain = all(isinstance(x, TensorRef) and not any(x[1:]) for x in call.args)
        known = call.func in (MM, ADDMM) and plain
        numbers = all(isinstance(x, (int, float)) for x in call.kwargs.values())
        return call if known and numbers else None

    def transposed(self, one: int, other: int) -> bool:
        """Is a buffer the transposed view of another one?"""
        x, y = self.buffers[one], self.buffers[other]
        return (x.storage, x.offset, x.shape, x.stride) == (
            *(y.storage, y.offset),
            *(y.shape[::-1], y.stride[::-1]),
        )

    def sum_of(self, place: Place, stop: frozenset[int]) -> tuple[Sum, set[Place]]:
        """Return what a row makes, as a sum of buffers, and the rows that take part.

        It is empty if it is no sum. `stop` are storages that are not looked into.
        """
        row = self.row(place)
        if isinstance(row, Extern):
            return {}, set()
        own = _linear(row)
        total: Sum = {}
        rows = {place}
        for slot, factor in (own or {}).items():
            b = self.graph.values[row.reads[slot]]
            storage = self.buffers[b].storage
            inner: Sum = {}
            if storage not in stop and self.once(b):
                (maker,) = self.writers[storage]
                inner, more = self.sum_of(maker, stop)
                rows |= more if inner else set()
            for c, number in (inner or {b: 1.0}).items():
                total[c] = total.get(c, 0.0) + factor * number
        return total, rows


def _linear(row: SchedulerNode) -> Sum | None:
    """Return the factor of each operand of a row; None if it is no such sum."""
    made: list[Any] = []
    for instr in row.body.instrs:
        args = [made[x] for x in instr.args]
        made.append(_made(instr, args, row))
    (end, _), *others = row.body.writes
    result = made[end]
    return None if others or not isinstance(result, dict) else result


def _made(instr: Instr, args: list[Any], row: SchedulerNode) -> Any:
    """Return a number, a sum by slot, or None if an instruction makes neither."""
    if instr.op == "load":
        return {int(instr.attr or 0): 1.0}
    if instr.op == "const":
        return float(instr.attr or 0)
    if instr.op == "scalar":
        scalar = row.scalars[int(instr.attr or 0)]
        return scalar.value if isinstance(scalar, Literal) else None
    if any(x is None for x in args):
        return None
    if instr.op == "mul":
        return _times(*args)
    if instr.op == "add":
        return _plus(*args)
    if instr.op == "sub":
        return _plus(args[0], _times(-1.0, args[1]))
    if instr.op == "fma":
        return _plus(_times(*args[:2]), args[2])
    return None


def _times(x: Any, y: Any) -> Any:
    if isinstance(x, dict):
        x, y = y, x
    if isinstance(x, dict) or x is None or y is None:
        return None
    return {k: x * n for k, n in y.items()} if isinstance(y, dict) else x * y


def _plus(x: Any, y: Any) -> Any:
    if isinstance(x, dict) and isinstance(y, dict):
        return {k: x.get(k, 0.0) + y.get(k, 0.0) for k in {**x, **y}}
    both = isinstance(x, float) and isinstance(y, float)
    return x + y if both else None


# ---------------------------------------------------------------- recognition


def gram_products(facts: Facts) -> dict[int, Place]:
    """Return the products X X^T of wide matrices, by the storage of X."""
    grams: dict[int, Place] = {}
    for i in range(len(facts.graph.nodes)):
        call = facts.call((i, 0))
        if call is None or call.func is not MM:
            continue
        left, right = (x.buffer for x in call.args)
        x = facts.buffers[left]
        wide = len(x.shape) == 2 and x.shape[1] >= WIDER * x.shape[0] > 0
        (out,) = call.outputs
        if (
            wide
            and facts.once(left)
            and facts.once(out)
            and facts.transposed(left, right)
        ):
            grams.setdefault(x.storage, (i, 0))
    return grams


def chains(facts: Facts, grams: Mapping[int, Place]) -> Iterator[list[Iteration]]:
    """Yield the iterations of each matrix, two at least, first to last."""
    steps = {s: found for s in grams if (found := _step(facts, s, grams)) is not None}
    inner = {
        facts.buffers[x.made].storage: s
        for s, x in steps.items()
        if _is_inner(facts, x, grams, steps)
    }
    for s in steps:
        if s in inner:
            continue
        chain = [steps[s]]
        while (at := facts.buffers[chain[-1].made].storage) in inner:
            chain.append(steps[at])
        if len(chain) > 1:
            yield chain


def _step(facts: Facts, storage: int, grams: Mapping[int, Place]) -> Iteration | None:
    """Return the iteration that begins at a matrix with a Gram matrix."""
    for place in sorted(facts.readers[storage]):
        call = facts.call(place)
        if call is None or place == grams[storage]:
            continue
        *added, u, x = (t.buffer for t in call.args)
        matrix, square = facts.buffers[x], facts.buffers[u]
        if matrix.storage != storage or square.shape != (matrix.shape[0],) * 2:
            continue
        if not facts.once(u):
            continue
        (out,) = call.outputs
        if added:
            if added != [x] or not facts.once(out):
                continue
            a, scale = (float(call.kwargs.get(k, 1)) for k in ("beta", "alpha"))
            return Iteration(x, u, out, out, a, scale, place[0], ())
        found = _added(facts, x, out, frozenset({*grams, storage}))
        if found is not None:
            made, a, scale, rows = found
            return Iteration(x, u, made, out, a, scale, place[0], rows)
    return None


def _added(
    facts: Facts, x: int, product: int, stop: frozenset[int]
) -> tuple[int, float, float, tuple[Place, ...]] | None:
    """Return X', its factors of X and of a product, and the rows that add them."""
    made, total, rows = product, dict[int, float](), set[Place]()
    while total.keys() != {x, product}:
        readers = facts.readers[facts.buffers[made].storage]
        if len(readers) != 1 or not facts.once(made) or total.keys() - {product}:
            return None
        (place,) = readers
        total, rows = facts.sum_of(place, stop)
        if not total:
            return None
        (value,) = facts.row(place).writes
        made = facts.graph.values[value]
    for other in rows - {place}:
        (inner,) = facts.row(other).writes
        if not facts.readers[facts.storage(inner)] <= rows:
            return None
    same = facts.buffers[made].shape == facts.buffers[x].shape
    if not (same and facts.once(made)):
        return None
    return made, total[x], total[product], tuple(sorted(rows))


def _is_inner(
    facts: Facts,
    step: Iteration,
    grams: Mapping[int, Place],
    steps: Mapping[int, Iteration],
) -> bool:
    """Is what an iteration makes read by its own Gram matrix and the next one alone?"""
    storage = facts.buffers[step.made].storage
    if storage not in steps or steps[storage].x != step.made:
        return False
    after = steps[storage]
    return facts.readers[storage] <= {
        grams[storage],
        (after.node, 0),
        *after.rows,
    }

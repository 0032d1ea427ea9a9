"""Put scales and sums around products of matrices into the products.

`beta * x + (alpha * left) @ right` is a product and three nodes around it. As one call
it can be in a chain (runtime/chains.py), without a pass over memory for each of them.
The roundings stay those of eager. It is written where a probe finds eager's bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ..capture import Captured
from ..capture.aten.added_products import added
from ..capture.aten.externs import Call, TensorRef
from ..capture.scalars.host import Sym
from ..ir.geometry import numel
from ..ir.graph import (
    Body,
    Buffer,
    Extern,
    Literal,
    Node,
    ScalarRef,
    SchedulerNode,
    Symbol,
)
from ..ir.products import CHAINED, SCALED, Layout, Product, Result, Trial
from ..runtime.chains import HALF, MOST_HALF, multiplies_pairs
from ..runtime.matrix_calls import scaled_sum
from ..scheduler.batch_limits import refusal
from ..scheduler.batch_operands import anywhere, kind_of_scale
from ..scheduler.dependencies import CPU
from ..scheduler.passes import Batching
from .iterations import DTYPES, MM, Facts, Place

ADDMM = torch.ops.aten.addmm.default


class _Sum(NamedTuple):
    """beta * x + (alpha * left) @ right, made by the row at `place`.

    `rows` are those that it replaces, besides the product.
    """

    x: int
    left: int
    right: int
    made: int
    beta: ScalarRef
    alpha: ScalarRef | None
    product: int
    place: Place
    rows: tuple[Place, ...]


def has_products(captured: Captured) -> bool:
    """Has a step products on the CPU that generated code may make?"""
    buffers = captured.graph.buffers
    products = (call for call in captured.calls if call.func in (MM, ADDMM, added))
    return any(_is_chains(buffers, call) for call in products)


def _is_chains(buffers: Sequence[Buffer], call: Call) -> bool:
    out, right = buffers[call.outputs[0]], call.args[-1]
    if out.device != CPU or not isinstance(right, TensorRef):
        return False
    if out.dtype == HALF:
        terms = buffers[right.buffer].shape[0]
        return multiplies_pairs() or out.numel * terms <= MOST_HALF
    return out.dtype in DTYPES


def with_scaled_sums(captured: Captured, products: Batching) -> Captured:
    """Return the captured step with such products, where they have eager's bits."""
    facts = Facts(captured)
    found: dict[tuple[object, ...], list[_Sum]] = defaultdict(list)
    for i, node in enumerate(facts.graph.nodes):
        if isinstance(node, Extern):
            made = _sum_at(facts, i)
            if made is not None:
                found[_kind(facts, made)].append(made)
    taken = [
        x
        for group in found.values()
        if products.verdict(_trial(facts, group), chain=True).way == CHAINED
        for x in group
    ]
    return _written(facts, taken) if taken else captured


# ---------------------------------------------------------------- recognition


def _sum_at(facts: Facts, at: int) -> _Sum | None:
    """Return the sum that the product at a node is a part of."""
    call = facts.call((at, 0))
    if call is None or call.func is not MM or call.autocast is not None:
        return None
    left, right = (x.buffer for x in call.args)
    (product,) = call.outputs
    place = _only_reader(facts, product)
    row = None if place is None else facts.row(place)
    if place is None or not isinstance(row, SchedulerNode) or not _adds(row.body):
        return None
    read = [facts.graph.values[v] for v in row.reads]
    if read.count(product) != 1:
        return None
    (other,) = (b for b in read if b != product)
    (made,) = (facts.graph.values[v] for v in row.writes)
    scaled = _scaled(facts, other, place)
    if scaled is None:
        return None
    x, beta, before = scaled
    rows, alpha = [place, before], None
    factor = _scaled(facts, left, (at, 0))
    if factor is not None and left != right:
        left, alpha, before = factor
        rows.append(before)
    result = _Sum(x, left, right, made, beta, alpha, at, place, tuple(rows))
    return result if _suits(facts, result, product) else None


def _only_reader(facts: Facts, b: int) -> Place | None:
    """Return the one row that reads a matrix of the step."""
    if not facts.once(b):
        return None
    readers = facts.readers[facts.buffers[b].storage]
    return next(iter(readers)) if len(readers) == 1 else None


def _scaled(facts: Facts, b: int, reader: Place) -> tuple[int, ScalarRef, Place] | None:
    """Return a matrix and a number where a buffer that only `reader` reads is their
    product, and the row that makes it.
    """
    if _only_reader(facts, b) != reader:
        return None
    (place,) = facts.writers[facts.buffers[b].storage]
    row = facts.row(place)
    if not isinstance(row, SchedulerNode) or not _multiplies(row.body):
        return None
    (v,) = row.reads
    (number,) = row.scalars
    written = {facts.graph.values[v] for v in row.writes}
    return None if written != {b} else (facts.graph.values[v], number, place)


def _suits(facts: Facts, x: _Sum, product: int) -> bool:
    """May these products be chained, as far as their buffers tell?"""
    buffers = [facts.buffers[b] for b in (x.x, x.left, x.right, x.made)]
    once = all(map(facts.once, (x.x, x.left, x.right, x.made)))
    same = all(
        facts.buffers[b].shape == facts.buffers[product].shape for b in (x.x, x.made)
    )
    alike = all(y.dtype == buffers[0].dtype and y.device == CPU for y in buffers)
    if not (once and same and alike and 1 in facts.buffers[x.made].stride):
        return False
    p = Product(SCALED, (x.x, x.left, x.right), (x.made,))
    return not refusal(buffers, p)


def _adds(body: Body) -> bool:
    """Does a body add its two operands, and nothing else?"""
    return _is(body, "add", ("load", "load")) and body.n_scalars == 0


def _multiplies(body: Body) -> bool:
    """Does a body multiply its operand by a number, and nothing else?"""
    return _is(body, "mul", ("load", "scalar")) and body.n_scalars == 1


def _is(body: Body, op: str, given: tuple[str, str]) -> bool:
    if len(body.instrs) != 3 or body.reduction or len(body.writes) != 1:
        return False
    *first, last = body.instrs
    dtype = last.dtype
    return (
        last.op == op
        and sorted(last.args) == [0, 1]
        and sorted(x.op for x in first) == sorted(given)
        and dtype in DTYPES
        and all(x.dtype == dtype for x in first)
        and all(d == dtype for d in body.reads)
        and body.writes == ((2, dtype),)
        and len({x.attr for x in first if x.op == "load"}) == given.count("load")
    )


# ---------------------------------------------------------------- one kind


def _layout(x: Buffer) -> Layout:
    return x.shape, x.stride, x.offset


def _kind(facts: Facts, x: _Sum) -> tuple[object, ...]:
    """Return a key, equal for sums that are tried together."""
    buffers = [facts.buffers[b] for b in (x.x, x.left, x.right, x.made)]
    storages = [y.storage for y in buffers]
    return (
        *((y.dtype, *_layout(y)) for y in buffers),
        *(storages.index(s) for s in storages),
        *map(_form, (x.beta, x.alpha)),
    )


def _form(scalar: ScalarRef | None) -> str:
    """Return how a trial names a number: 1 for none."""
    if scalar is None:
        return "1"
    return kind_of_scale(scalar.value if isinstance(scalar, Literal) else scalar)


def _trial(facts: Facts, group: list[_Sum]) -> Trial:
    """Return the trial of a batch of sums, each operand in a stack without gaps."""
    first, n = group[0], len(group)
    operands = [facts.buffers[b] for b in (first.x, first.left, first.right)]
    columns = [*zip(*((s.x, s.left, s.right) for s in group), strict=True)]
    out = facts.buffers[first.made]
    return Trial(
        *(SCALED, out.dtype, out.device, n),
        tuple(map(_layout, operands)),
        tuple(((n, *x.shape), (numel(x.shape), *x.stride), x.offset) for x in operands),
        (Result(out.shape, out.stride, out.dtype),),
        (_form(first.beta), _form(first.alpha)),
        anywhere=anywhere(facts.buffers, columns),
    )


# ---------------------------------------------------------------- rewriting


def _written(facts: Facts, sums: list[_Sum]) -> Captured:
    """Return the captured step with these sums as calls."""
    calls = [*facts.captured.calls]
    gone: set[Place] = set()
    instead: Mapping[int, list[Node]] = defaultdict(list)
    for x in sums:
        old = facts.graph.nodes[x.product]
        assert isinstance(old, Extern), "a product is a call"
        gone |= {(x.product, 0), *x.rows}
        operands = (x.x, x.left, x.right)
        instead[x.place[0]].append(
            old._replace(
                name=SCALED,
                reads=tuple(facts.value[b] for b in operands),
                writes=(facts.value[x.made],),
                payload=len(calls),
            )
        )
        kwargs = {"beta": _given(x.beta), "alpha": _given(x.alpha)}
        args = tuple(map(TensorRef, operands))
        calls.append(Call(scaled_sum, args, kwargs, (x.made,), frozenset({x.made})))
    nodes: list[Node] = []
    for i, node in enumerate(facts.graph.nodes):
        count = 1 if isinstance(node, Extern) else node.rows
        left = [k for k in range(count) if (i, k) not in gone]
        if isinstance(node, Extern) or len(left) == count:
            nodes += [node] if left else []
        elif left:
            nodes.append(node.pick(left))
        nodes += instead.get(i, [])
    graph = replace(facts.graph, nodes=tuple(nodes))
    return replace(facts.captured, graph=graph, calls=tuple(calls))


def _given(scalar: ScalarRef | None) -> object:
    """Return a number as a call has it."""
    if scalar is None:
        return 1.0
    return Sym(scalar.expr, True) if isinstance(scalar, Symbol) else scalar.value

"""Fuse the nodes of a lane into one body, and split it by domain.

The bodies of a lane's nodes are joined where one reads the result of another. Equal
expressions are computed once, and unread results are dropped. Instructions that depend
only on scalars and 0-d tensors become lane code, which runs once per lane. Those that
depend on a reduction become output code, which runs once per result.
"""

from __future__ import annotations

from ..ir.blocks import SIZED, read_by_block
from ..ir.graph import (
    BY_ROWS,
    REDUCTIONS,
    ForeachSchedulerNode,
    Graph,
    Instr,
    Node,
    SchedulerNode,
    Slot,
    Variant,
)
from .alignment import Aligned
from .grouping import LaneTable, merged

#: A shape, or strides.
Sizes = tuple[int, ...]


def fuse(
    aligned: Aligned, tables: list[LaneTable], late: frozenset[int] = frozenset()
) -> Variant:
    """Return the Variant of lanes of one form; the first table gives the body.

    `late`: nodes that run on the results of reductions.
    """
    graph, first = aligned.graph, tables[0]
    instrs: list[Instr] = []
    numbering: dict[Instr, int] = {}
    slot_of = {place: s for s, place in enumerate(first.slots)}

    def emit(instr: Instr) -> int:
        if instr not in numbering:
            numbering[instr] = len(instrs)
            instrs.append(instr)
        return numbering[instr]

    instr_of: dict[int, int] = {}  # value -> instruction
    scalar = 0
    for position, i in enumerate(first.nodes):
        node = aligned.first[i]
        assert isinstance(node, SchedulerNode)
        local: list[int] = []
        for instr in node.body.instrs:
            if instr.op == "load":
                v = node.reads[int(instr.attr or 0)]
                if v in instr_of:
                    local.append(instr_of[v])
                else:
                    b = graph.values[v]
                    slot = slot_of.get((b, i in late), -1)
                    slot = slot_of[b, False] if slot < 0 else slot
                    local.append(emit(Instr("load", (), instr.dtype, slot)))
            elif instr.op == "scalar":
                k = scalar + int(instr.attr or 0)
                local.append(emit(Instr("scalar", (), instr.dtype, k)))
            elif instr.op == "tail":
                calls = [graph.nodes[x.nodes[position]] for x in tables]
                kind = _tail(graph, calls, int(instr.attr or 1))
                local.append(emit(Instr("tail", (), "b8", kind)))
            else:
                args = tuple([local[a] for a in instr.args])
                if instr.op == "cast" and instrs[args[0]].dtype == instr.dtype:
                    local.append(args[0])
                else:
                    local.append(emit(Instr(instr.op, args, instr.dtype, instr.attr)))
        scalar += node.body.n_scalars
        for v, (result, _) in zip(node.writes, node.body.writes, strict=True):
            instr_of[v] = local[result]
    stores = [(instr_of[v], slot) for v, slot in first.stores]
    per_result = {s for s, (_, late_) in enumerate(first.slots) if late_}
    names = tuple(graph.nodes[i].body.name for i in first.nodes)  # type: ignore[union-attr]
    return _split(graph, instrs, stores, merged(tables), names, per_result)


def _tail(graph: Graph, calls: list[Node], kind: int) -> int:
    """Return the attribute of a tail of these calls, for some lanes; see `ir.ARITY`."""
    by_shape = by_rows = False
    for call in calls:
        assert isinstance(call, ForeachSchedulerNode)
        results = [graph.buffers[graph.values[v]] for v in call.writes[0]]
        # a 0-d tensor is always leftover; in a list with other shapes each lane decides
        by_shape = by_shape or any(b.shape for b in results)
        for column in call.reads:
            read = [graph.buffers[graph.values[v]] for v in column]
            layouts = {
                (a.shape, a.stride, b.shape, b.stride)
                for a, b in zip(read, results, strict=True)
            }
            by_rows = by_rows or not all(not x[0] or _alike(*x) for x in layouts)
    if not by_shape:
        return 0
    return kind + BY_ROWS * by_rows


def _alike(shape: Sizes, stride: Sizes, other: Sizes, strides: Sizes) -> bool:
    """Does one index address both of two tensors, by their shapes and strides?"""
    if shape != other:
        return False
    sides = zip(shape, stride, strides, strict=True)
    return all(n == 1 or s == t for n, s, t in sides)


def _split(
    graph: Graph,
    instrs: list[Instr],
    stores: list[tuple[int, int]],
    lanes: LaneTable,
    names: tuple[str, ...],
    per_result: set[int],
) -> Variant:
    """Drop dead code, renumber, and give each instruction its domain."""
    live: set[int] = set()
    todo = [x for x, _ in stores]
    while todo:
        x = todo.pop()
        if x not in live:
            live.add(x)
            todo.extend(instrs[x].args)
    used_slots = {int(instrs[x].attr or 0) for x in live if instrs[x].op == "load"}
    used_slots |= {slot for _, slot in stores}
    slots = {old: new for new, old in enumerate(sorted(used_slots))}
    used_scalars = sorted(
        int(instrs[x].attr or 0) for x in live if instrs[x].op == "scalar"
    )
    numbers = {old: new for new, old in enumerate(used_scalars)}
    written = {slot for _, slot in stores}
    of_blocks = set(read_by_block(instrs))
    of_blocks.update(s for x, s in stores if instrs[x].op == "first")

    def slot_domain(s: int) -> str:
        numbers = all(graph.buffers[b].shape == () for b in lanes.columns[s])
        if s in per_result:
            # a number that is only read may lie in the CPU's memory
            return "lane" if numbers and s not in written else "output"
        if s in of_blocks:
            return "block"
        return "lane" if numbers else "element"

    domains = {s: slot_domain(s) for s in slots}
    renumber: dict[int, int] = {}
    kept: list[Instr] = []
    domain: list[str] = []
    for x, instr in enumerate(instrs):
        if x not in live:
            continue
        attr = instr.attr
        where = "lane"
        if instr.op == "load":
            where = domains[int(attr or 0)]
            attr = slots[int(attr or 0)]
        elif instr.op == "scalar":
            attr = numbers[int(attr or 0)]
        elif instr.op == "tail":
            where = "element" if attr else "lane"
        args = tuple([renumber[a] for a in instr.args])
        by_block = where == "block" or instr.op in SIZED
        if by_block or any(domain[a] == "element" for a in args):
            where = "element"
        if instr.op in REDUCTIONS or any(domain[a] == "output" for a in args):
            where = "output"
        renumber[x] = len(kept)
        kept.append(Instr(instr.op, args, instr.dtype, attr))
        domain.append(where)
    table = [
        Slot(
            graph.buffers[lanes.columns[old][0]].dtype,
            domains[old],
            any(i.op == "load" and i.attr == new for i in kept),
            old in written,
        )
        for old, new in slots.items()
    ]
    # an unread reduction is dropped, with its tables
    reduces = "output" in domain
    return Variant(
        tuple(kept),
        tuple(i for i, d in enumerate(domain) if d == "lane"),
        tuple(i for i, d in enumerate(domain) if d == "element"),
        tuple((renumber[x], slots[s]) for x, s in stores),
        tuple(table),
        tuple(lanes.columns[s] for s in slots),
        tuple(lanes.scalars[k] for k in used_scalars),
        lanes.shapes,
        names,
        tuple(i for i, d in enumerate(domain) if d == "output"),
        lanes.reduction if reduces else "",
        lanes.reduced if reduces else (),
        lanes.operands if reduces else (),
    )

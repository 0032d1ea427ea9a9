"""Print a Graph or a Schedule as text, for dumps and golden files.

The text is the same on every run. Lists are cut after a few lanes, with a count of the
rest. So a step of 1,000 parameters reads like one of three.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .expressions import formulas
from .geometry import is_contiguous
from .graph import (
    Batch,
    Body,
    Buffer,
    Extern,
    ForeachSchedulerNode,
    Graph,
    Instr,
    Kernel,
    Literal,
    Node,
    Run,
    ScalarRef,
    Schedule,
    Variant,
    symbols,
)
from .products import ADDRESSED, COPIED, SHARED

#: The number of lanes of a list, or buffers of a kind, that are printed.
FIRST = 3


def show_graph(graph: Graph, first: int = FIRST) -> str:
    """Print a Graph: buffers by kind, each body once, then the nodes, row by row."""
    names = _value_names(graph)
    lines = [
        f"graph: {len(graph.nodes)} nodes, {len(graph.buffers)} buffers, "
        f"{len(graph.values)} values",
        *_buffers(graph, first),
        *_bodies(graph),
    ]
    bodies = _body_names(graph)

    lines += _numbers(graph, first)
    for node in graph.nodes:
        lines += _call(node, names, bodies, first)
    left = [names[v] for v in graph.final if v >= 0]
    lines.append(f"final: {_few(left, first)}")
    if graph.outputs:
        lines.append(
            f"outputs: {', '.join(graph.buffers[b].name for b in graph.outputs)}"
        )
    return "\n".join([*lines, ""])


def show_schedule(graph: Graph, schedule: Schedule, first: int = FIRST) -> str:
    """Print a Schedule: kernels with their fused bodies, runs with their blocks.

    Externs, the places of temps, and refusals to fuse follow.
    """
    names = _value_names(graph)
    kernels, externs = len(schedule.kernels), len(schedule.externs)
    lines = [f"schedule: {kernels} kernels, {externs} externs"]
    freed = schedule.memory.freed or ((),) * len(schedule.steps)
    members = {b.storage: b.name for b in reversed(graph.buffers)}
    for step, storages in zip(schedule.steps, freed, strict=True):
        if isinstance(step, (Extern, Batch)):
            if isinstance(step, Extern):
                lines += ["", *_extern(step, names, first)]
            else:
                lines += ["", *_batch(graph, step, first)]
            if storages:
                lines.append(
                    f"  gives back {_few([members[s] for s in storages], first)}"
                )
        elif isinstance(step, Run):
            lines += ["", *_run(step, first)]
            for kernel in step.kernels:
                lines += _kernel(graph, kernel, first)
        else:
            lines += _kernel(graph, step, first)
    if schedule.temps:
        temps = [_buffer(graph.buffers[b]) for b in schedule.temps]
        lines += ["", f"temps in memory: {_few(temps, first)}"]
        lines += _places(graph, schedule, first)
    if schedule.refusals:
        lines += ["", "not fused:"]
    for r in schedule.refusals:
        seen = f" ({r.seen})" if r.seen else ""
        lines.append(f"  {r.producer} -> {r.consumer}: {r.code}{seen}")
    return "\n".join([*lines, ""])


# ---------------------------------------------------------------- words


def _few(items: Sequence[str], first: int) -> str:
    """Return the first items, and the number of further ones."""
    shown = ", ".join(items[:first])
    return shown if len(items) <= first else f"{shown}, … {len(items) - first} more"


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"


def _buffer(b: Buffer) -> str:
    text = f"{b.name} {b.dtype}{_shape(b.shape)}"
    if not is_contiguous(b.shape, b.stride):
        text += f" stride {_shape(b.stride)}"
    if b.offset:
        text += f" offset {b.offset}"
    return text if b.device == "cpu" else f"{text} on {b.device}"


def _scalar(ref: ScalarRef) -> str:
    return repr(ref.value) if isinstance(ref, Literal) else f"sym{ref.expr}"


def _value_names(graph: Graph) -> list[str]:
    """Return `name@k` for version k of a buffer, in program order."""
    versions: dict[int, int] = {}
    names = []
    for b in graph.values:
        k = versions[b] = versions.get(b, -1) + 1
        names.append(f"{graph.buffers[b].name}@{k}")
    return names


def _instr(x: int, instr: Instr, loads: str) -> str:
    args = ", ".join(f"%{a}" for a in instr.args)
    if instr.op == "load":
        args = f"{loads}{instr.attr}"
    elif instr.op == "scalar":
        args = f"k{instr.attr}"
    elif instr.op == "const":
        args = repr(instr.attr)
    return f"%{x} = {instr.op} {args}".rstrip() + f" : {instr.dtype}"


# ---------------------------------------------------------------- graph


def _buffers(graph: Graph, first: int) -> Iterable[str]:
    for kind in ("static", "arg", "view", "temp"):
        of_kind = [b for b in graph.buffers if b.kind == kind]
        if of_kind:
            yield f"{kind}: {len(of_kind)}"
            yield from (f"  {_buffer(b)}" for b in of_kind[:first])
            if len(of_kind) > first:
                yield f"  … {len(of_kind) - first} more"


def _numbers(graph: Graph, first: int) -> Iterable[str]:
    """Yield the formulas of the numbers that calls read."""
    nodes = [n for n in graph.nodes if isinstance(n, ForeachSchedulerNode)]
    read = symbols(ref for n in nodes for column in n.scalars for ref in column)
    if not graph.numbers or not read:
        return
    yield f"numbers of each call: {len(read)}"
    for i, text in formulas(graph.numbers, read[: 2 * first]).items():
        yield f"  sym{i} = {text}"
    if len(read) > 2 * first:
        yield f"  … {len(read) - 2 * first} more"


def _body_names(graph: Graph) -> dict[int, str]:
    names: dict[int, str] = {}
    for node in graph.nodes:
        if isinstance(node, ForeachSchedulerNode) and id(node.body) not in names:
            names[id(node.body)] = f"{node.body.name}.{len(names)}"
    return names


def _bodies(graph: Graph) -> Iterable[str]:
    names = _body_names(graph)
    shown: set[int] = set()
    for node in graph.nodes:
        if isinstance(node, ForeachSchedulerNode) and id(node.body) not in shown:
            shown.add(id(node.body))
            yield f"body {names[id(node.body)]}: {_signature(node.body)}"
            for x, instr in enumerate(node.body.instrs):
                yield f"  {_instr(x, instr, 'r')}"
            for k, (x, _) in enumerate(node.body.writes):
                yield f"  w{k} <- %{x}"


def _signature(body: Body) -> str:
    taken = [*body.reads, *(["scalar"] * body.n_scalars)]
    return f"({', '.join(taken)}) -> {', '.join(d for _, d in body.writes)}"


def _call(
    node: Node, names: list[str], bodies: dict[int, str], first: int
) -> Iterable[str]:
    if isinstance(node, Extern):
        yield from _extern(node, names, first)
        return
    lanes = f"{node.rows} lanes" if node.rows > 1 else "1 lane"
    yield f"call {node.call}: {lanes}{'  # ' + node.line if node.line else ''}"
    for k in range(min(first, node.rows)):
        row = node.row(k)
        args = [*(names[v] for v in row.reads), *map(_scalar, row.scalars)]
        written = ", ".join(names[v] for v in row.writes)
        over = f" over {_shape(row.dims)}" if row.dims else ""
        yield f"  {written} = {bodies[id(row.body)]}({', '.join(args)}){over}"
    if node.rows > first:
        yield f"  … {node.rows - first} more"


def _batch(graph: Graph, step: Batch, first: int) -> Iterable[str]:
    """Yield the lines of a Batch: the places of its rows, and their buffers."""
    line = step.externs[0].line
    comment = f"  # {line}" if line else ""
    flops = f": {step.flops:,} flops" if step.flops else ""
    yield f"batch {step.name}, {step.way}{flops}{comment}"
    places = {COPIED: "copied", SHARED: "shared", ADDRESSED: "addressed"}
    for operand in (*step.operands, *step.results):
        rows = [graph.buffers[b].name for b in operand.buffers]
        where = places.get(operand.stack, f"stack {operand.stack}")
        yield f"  {where} {list(operand.shape)}: {_few(rows, first)}"


def _extern(node: Extern, names: list[str], first: int) -> Iterable[str]:
    yield f"extern {node.name}: {node.reason}{'  # ' + node.line if node.line else ''}"
    yield f"  reads {_few([names[v] for v in node.reads], first) or 'nothing'}"
    yield f"  writes {_few([names[v] for v in node.writes], first) or 'nothing'}"


# ---------------------------------------------------------------- schedule


def _kernel(graph: Graph, kernel: Kernel, first: int) -> Iterable[str]:
    yield ""
    yield f"{kernel.name}: {kernel.lanes} lanes, {len(kernel.every)} variants"
    for number, variant in enumerate(kernel.every):
        if number == len(kernel.every) - len(kernel.first):
            yield "  before all others:"
        elif number == len(kernel.variants):
            yield "  when all these are done:"
        yield from (f"  {x}" for x in _variant(graph, number, variant, first))


def _run(run: Run, first: int) -> Iterable[str]:
    """Yield the blocks of a run: the number of lanes of each kernel."""
    yield f"{run.name}: block by block, {len(run.blocks)} in all"
    lanes = [", ".join(str(len(part)) for part in block) for block in run.blocks]
    yield f"  lanes of each kernel: {_few([f'({x})' for x in lanes], first)}"


def _places(graph: Graph, schedule: Schedule, first: int) -> Iterable[str]:
    """Yield the places of temps: in the arena, returned by externs, or allocated."""
    plan = schedule.memory
    temps = [(graph.buffers[b], graph.buffers[b].storage) for b in schedule.temps]
    placed = [f"{b.name} at {plan.offsets[s]}" for b, s in temps if s in plan.offsets]
    accounted = plan.returned | plan.offsets.keys()
    left = [b.name for b, s in temps if s not in accounted]
    if placed:
        yield f"  arena of {plan.size} bytes: {_few(placed, first)}"
    for title, names in (
        ("returned by externs", [b.name for b, s in temps if s in plan.returned]),
        ("allocated at each call", left),
    ):
        if names:
            yield f"  {title}: {_few(names, first)}"


def _variant(graph: Graph, number: int, v: Variant, first: int) -> Iterable[str]:
    yield f"variant {number}: {v.lanes} lanes of {', '.join(v.nodes) or 'no name'}"
    yield f"  shapes: {_few([_shape(s) for s in v.shapes], first)}"
    for s, (slot, column) in enumerate(zip(v.slots, v.columns, strict=True)):
        how = "/".join(
            word for word, on in (("read", slot.read), ("write", slot.write)) if on
        )
        lanes = _few([graph.buffers[b].name for b in column], first)
        yield f"  slot s{s}: {slot.dtype} per {slot.domain}, {how}: {lanes}"
    for k, refs in enumerate(v.scalars):
        distinct = list(dict.fromkeys(map(_scalar, refs)))
        yield f"  scalar k{k}: {_few(distinct, first)}"
        shown = symbols(refs)[:first] if graph.numbers else []
        for i, text in formulas(graph.numbers, shown).items():
            yield f"    sym{i} = {text}"
    domains = ("lane", "element", "block", "output")
    stored: dict[str, list[str]] = {domain: [] for domain in domains}
    for x, s in v.stores:
        stored[v.slots[s].domain].append(f"    s{s} <- %{x}")
    if v.reduction:
        dims = _few([_shape(d) for d in v.reduced], first)
        yield f"  reduces {v.reduction}: {dims}"
    # what a block's elements have in common is among their code
    for title, code in zip(
        domains, (v.lane_code, v.code, (), v.output_code), strict=True
    ):
        if code or stored[title]:
            yield f"  once per {title}:"
            yield from (f"    {_instr(x, v.instrs[x], 's')}" for x in code)
            yield from stored[title]


def show_refusals(plan: Schedule) -> str:
    """Return a line for each pair that does not fuse, with its reason."""
    lines = [f"{r.producer} -> {r.consumer}: {r.code}: {r.seen}" for r in plan.refusals]
    return "\n".join(lines or ["everything that could fuse did"]) + "\n"

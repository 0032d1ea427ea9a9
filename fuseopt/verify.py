"""Graph or Schedule -> nothing, or a GraphError that names the node and what is broken.

`check_graph` holds the invariants of the IR: SSA over versions of memory, well-formed
bodies, consistent buffers. `check_schedule` holds those of a Schedule, and that it does
what its Graph does, which `prove` shows.
"""

from __future__ import annotations

from collections.abc import Sequence

from .errors import GraphError
from .ir import (
    ARITHMETIC,
    ARITY,
    BY_ROWS,
    DTYPE_BYTES,
    FLOATS,
    FUNCTIONS,
    REDUCTIONS,
    VECTOR,
    Body,
    Extern,
    Graph,
    Instr,
    Kernel,
    Node,
    Schedule,
    SchedulerNode,
    Variant,
    kept,
    makes_numbers,
)
from .overlap import overlaps
from .prove import difference

KINDS = ("static", "arg", "temp", "view")
COMPARISONS = frozenset({"lt", "le", "eq", "ne", "isnan"})
TAILS = tuple(kind + rows for kind in (1, 2, 4, 8) for rows in (0, BY_ROWS))
LOGIC = frozenset({"and", "or", "xor", "not", "shl", "shr"})
#: What only floats have.
FLOAT_OPS = frozenset((*FUNCTIONS, *VECTOR, "sqrt", "vsqrt"))


def check_graph(graph: Graph) -> None:
    """Raise GraphError at the first invariant of the Graph that does not hold."""
    _check_buffers(graph)
    _check_values(graph)
    bodies: set[int] = set()
    for i, node in enumerate(graph.nodes):
        if isinstance(node, SchedulerNode):
            if id(node.body) not in bodies:
                bodies.add(id(node.body))
                _check_body(_name(i, node), node.body)
            _check_operands(graph, i, node)
    _check_versions(graph)


def check_schedule(graph: Graph, schedule: Schedule) -> None:
    """Raise GraphError at the first way in which a Schedule is malformed or not equal
    to its Graph. The Graph itself must have passed `check_graph`.
    """
    near = overlaps(graph.buffers)
    names: set[str] = set()
    payloads: list[int] = []
    for step in schedule.steps:
        if isinstance(step, Extern):
            payloads.append(step.payload)
            continue
        _require(step.name not in names, f"{step.name}: two kernels have this name")
        names.add(step.name)
        _require(bool(step.variants), f"{step.name}: a kernel with no variants")
        for number, variant in enumerate(step.every):
            _check_variant(graph, f"{step.name}, variant {number}", variant)
        _check_lanes(graph, step.name, step.variants, near)
        _check_lanes(graph, step.name, step.finish, near)
        apart = tuple(v for v in step.variants if not makes_numbers(v))
        for v in step.finish:
            _check_lanes(graph, step.name, (*apart, v), near)
    expected = [n.payload for n in graph.nodes if isinstance(n, Extern)]
    _require(
        sorted(payloads) == sorted(expected),
        f"the schedule runs the externs of calls {payloads}, the graph has {expected}",
    )
    _check_temps(graph, schedule)
    for f in schedule.foreach:
        lengths = {len(c) for c in (*f.reads, *f.scalars, *f.writes)}
        _require(len(lengths) == 1, f"{f.name}: lists of lengths {sorted(lengths)}")
    found = difference(graph, schedule, near)
    if found is not None:
        name, by = graph.buffers[found.buffer].name, "a view of it"
        if found.node is not None:
            by = _name(found.node, graph.nodes[found.node])
        raise GraphError(
            f"{by}: the schedule "
            + (f"never writes {name}" if found.untouched else f"leaves another {name}")
        )


# ---------------------------------------------------------------- words


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise GraphError(message)


def _name(i: int, node: Node) -> str:
    name = node.name if isinstance(node, Extern) else node.body.name
    return f"node {i} ({name}{', ' + node.line if node.line else ''})"


def _at(graph: Graph, v: int) -> str:
    return f"value {v} of {graph.buffers[graph.values[v]].name}"


# ---------------------------------------------------------------- graph


def _check_buffers(graph: Graph) -> None:
    sources: dict[int, str] = {}
    devices: dict[int, tuple[str, str]] = {}
    bases = {b.storage for b in graph.buffers if b.kind in ("static", "arg")}
    for b in graph.buffers:
        _require(b.dtype in DTYPE_BYTES, f"buffer {b.name}: unknown dtype {b.dtype!r}")
        _require(b.kind in KINDS, f"buffer {b.name}: unknown kind {b.kind!r}")
        _require(
            len(b.shape) == len(b.stride),
            f"buffer {b.name}: shape {list(b.shape)} but stride {list(b.stride)}",
        )
        _require(
            all(n >= 0 for n in b.shape) and b.offset >= 0,
            f"buffer {b.name}: shape {list(b.shape)}, offset {b.offset}",
        )
        other, device = devices.setdefault(b.storage, (b.name, b.device))
        _require(
            device == b.device,
            f"buffer {b.name}: on {b.device}, but {other} of its storage on {device}",
        )
        if b.kind in ("static", "arg"):
            other = sources.setdefault(b.source, b.name)
            _require(
                other == b.name,
                f"buffer {b.name}: source {b.source} is that of {other} too",
            )
        _require(
            b.kind != "view" or b.storage in bases,
            f"buffer {b.name}: a view of a storage that no input has",
        )


def _check_values(graph: Graph) -> None:
    """Tables have the right lengths, and what they index exists."""
    count = len(graph.buffers)
    for table, name in ((graph.initial, "initial"), (graph.final, "final")):
        _require(len(table) == count, f"{name} has {len(table)} entries, not {count}")
        for b, v in enumerate(table):
            owner = graph.buffers[b].name
            _require(
                -1 <= v < len(graph.values), f"{name} of buffer {owner}: no value {v}"
            )
            _require(
                v < 0 or graph.values[v] == b,
                f"{name} of buffer {owner}: value {v} is another buffer's",
            )
    for v, b in enumerate(graph.values):
        _require(0 <= b < count, f"value {v}: no buffer {b}")
    for b in graph.outputs:
        _require(0 <= b < count, f"outputs: no buffer {b}")
    for i, buffer in enumerate(graph.buffers):
        _require(
            (graph.initial[i] < 0) == (buffer.kind == "temp"),
            f"buffer {buffer.name}: {buffer.kind} with initial value "
            f"{graph.initial[i]}; temps have none, all others one",
        )


def _check_body(where: str, body: Body) -> None:
    for dtype in body.reads:
        _require(dtype in ARITHMETIC, f"{where}: reads unknown dtype {dtype!r}")
    _require(bool(body.writes), f"{where}: the body writes nothing")
    _check_instrs(where, body.instrs, body.reads, body.n_scalars)
    folds = [x for x, i in enumerate(body.instrs) if i.op in REDUCTIONS]
    last = [len(body.instrs) - 1]
    _require(
        folds == (last if body.reduction else []),
        f"{where}: a reduction is the last instruction of its body, and only there",
    )
    _require(
        body.reduction in ("", "full", "dims"), f"{where}: reduces {body.reduction!r}"
    )
    for x, dtype in body.writes:
        _require(0 <= x < len(body.instrs), f"{where}: writes missing %{x}")
        made = body.instrs[x].dtype
        _require(made == dtype, f"{where}: writes %{x}, which is {made}, as {dtype}")


def _check_instrs(
    where: str, instrs: Sequence[Instr], loads: Sequence[str], scalars: int
) -> None:
    """Arity, order, attributes and dtypes of SSA instructions."""
    for x, instr in enumerate(instrs):
        here = f"{where}: %{x} = {instr.op}"
        _require(instr.op in ARITY, f"{here}: unknown opcode")
        _require(instr.dtype in ARITHMETIC, f"{here}: unknown dtype {instr.dtype!r}")
        wanted = ARITY[instr.op]
        _require(
            len(instr.args) == wanted,
            f"{here}: {len(instr.args)} arguments, not {wanted}",
        )
        for a in instr.args:
            _require(0 <= a < x, f"{here}: argument %{a} does not come before it")
        if instr.op == "load":
            _index(here, instr, len(loads))
            stored = loads[int(instr.attr or 0)]
            _require(stored == instr.dtype, f"{here}: {instr.dtype} from {stored}")
        elif instr.op == "scalar":
            _index(here, instr, scalars)
        elif instr.op == "const":
            _require(isinstance(instr.attr, (int, float)), f"{here}: no number")
        elif instr.op == "tail":
            _require(instr.attr in (None, 0, *TAILS), f"{here}: attribute {instr.attr}")
        elif instr.op in REDUCTIONS:
            _require(instr.attr in (0, 1, 2), f"{here}: attribute {instr.attr}")
        else:
            _require(instr.attr is None, f"{here}: has attribute {instr.attr}")
        _check_dtypes(here, instr, [instrs[a].dtype for a in instr.args])


def _index(here: str, instr: Instr, count: int) -> None:
    _require(
        isinstance(instr.attr, int) and 0 <= instr.attr < count,
        f"{here}: index {instr.attr} of {count}",
    )


def _check_dtypes(here: str, instr: Instr, args: list[str]) -> None:
    said = f"{here}: {instr.dtype} of {', '.join(args)}"
    if instr.op in ("load", "scalar", "const", "cast"):
        return
    if instr.op == "tail":
        _require(instr.dtype == "b8", said)
    elif instr.op in COMPARISONS:
        _require(instr.dtype == "b8" and len(set(args)) == 1, said)
    elif instr.op == "where":
        _require(args == ["b8", instr.dtype, instr.dtype], said)
    elif instr.op == "bitcast":
        _require(DTYPE_BYTES[args[0]] == DTYPE_BYTES[instr.dtype], said)
    else:
        _require(set(args) == {instr.dtype}, said)
        _require(
            instr.dtype not in ("bf16", "f16"),
            f"{said}: 16-bit floats are stored, never computed in",
        )
        _require(instr.op not in FLOAT_OPS or instr.dtype in FLOATS, said)
        _require(
            instr.op not in LOGIC or instr.dtype not in FLOATS,
            f"{said}: logic on floats",
        )


def _check_operands(graph: Graph, i: int, node: SchedulerNode) -> None:
    body, values, buffers = node.body, graph.values, graph.buffers

    def broken(what: str) -> GraphError:
        return GraphError(f"{_name(i, node)}: {what}")

    for got, wanted, what in (
        (len(node.reads), len(body.reads), "values read"),
        (len(node.scalars), body.n_scalars, "scalars"),
        (len(node.writes), len(body.writes), "values written"),
    ):
        if got != wanted:
            raise broken(f"{got} {what}, its body has {wanted}")
    for v in (*node.reads, *node.writes):
        if not 0 <= v < len(values):
            raise broken(f"no value {v}")
    first = buffers[values[node.writes[0]]]
    shape, device = first.shape, first.device
    if body.reduction:
        operand = buffers[values[node.reads[0]]].shape
        left = kept(operand, node.dims)
        bare = tuple([n for n in shape if n != 1])
        if bare != tuple([n for n in left if n != 1]):
            raise broken(f"{list(operand)} without {list(node.dims)} is {list(left)}")
        if body.reduction == "full" and len(node.dims) != len(operand):
            raise broken("a full reduction leaves a dimension")
    elif node.dims:
        raise broken("dimensions to reduce, but a pointwise body")
    for v, (_, dtype) in zip(node.writes, body.writes, strict=True):
        b = buffers[values[v]]
        if b.dtype != dtype:
            raise broken(f"writes {dtype} to {b.name}, which is {b.dtype}")
        if b.shape != shape or b.device != device:
            raise broken("results of several shapes or devices")
    for v, dtype in zip(node.reads, body.reads, strict=True):
        b = buffers[values[v]]
        if b.dtype != dtype:
            raise broken(f"reads {dtype} from {b.name}, a {b.dtype}")
        space = operand if body.reduction else shape
        if b.shape != space and not _broadcasts(b.shape, space):
            raise broken(
                f"{b.name} of shape {list(b.shape)} does not fit {list(space)}"
            )
        if b.device != device and b.shape != ():
            raise broken(f"{b.name} is on {b.device}, the result on {device}")


def _broadcasts(shape: tuple[int, ...], space: tuple[int, ...]) -> bool:
    if len(shape) > len(space):
        return False
    ending = space[len(space) - len(shape) :]
    return all(a in (1, b) for a, b in zip(shape, ending, strict=True))


def _check_versions(graph: Graph) -> None:
    """SSA over memory: each read sees the version that its buffer holds then.

    A write through an overlapping buffer makes a version stale; what is read afterwards
    is a value that no node made. So is memory of a temp that nobody wrote.
    """
    near = overlaps(graph.buffers)
    producer: dict[int, int] = {}
    for i, node in enumerate(graph.nodes):
        for v in (*node.reads, *node.writes):
            if not 0 <= v < len(graph.values):
                raise GraphError(f"{_name(i, node)}: no value {v}")
        for v in node.writes:
            if v in producer:
                raise GraphError(f"{_name(i, node)}: {_at(graph, v)} is written twice")
            if v == graph.initial[graph.values[v]]:
                raise GraphError(
                    f"{_name(i, node)}: writes {_at(graph, v)}, which is there on entry"
                )
            producer[v] = i
    held = list(graph.initial)  # -1: unknown, any value that nobody makes
    given = set(held) - {-1}

    def see(v: int, who: str) -> None:
        b = graph.values[v]
        if held[b] == v:
            return
        if held[b] >= 0:
            wanted = _at(graph, held[b])
            raise GraphError(f"{who}: sees {_at(graph, v)} where memory has {wanted}")
        _require(
            v not in producer, f"{who}: sees {_at(graph, v)}, which is made elsewhere"
        )
        _require(
            v not in given,
            f"{who}: sees {_at(graph, v)}, which an overlapping write has changed",
        )
        held[b] = v

    for i, node in enumerate(graph.nodes):
        for v in node.reads:
            if held[graph.values[v]] != v:
                see(v, _name(i, node))
        for v in node.writes:
            b = graph.values[v]
            held[b] = v
            for other in near.get(b, ()):
                held[other] = -1
    for b, v in enumerate(graph.final):
        buffer = graph.buffers[b]
        if v >= 0:
            see(v, f"final of {buffer.name}")
        elif buffer.kind != "temp":
            _require(
                held[b] == graph.initial[b], f"final of {buffer.name}: a write is lost"
            )


# ---------------------------------------------------------------- schedule


def _check_variant(graph: Graph, where: str, v: Variant) -> None:
    dtypes = [s.dtype for s in v.slots]
    _check_instrs(where, v.instrs, dtypes, len(v.scalars))
    lane, late = set(v.lane_code), set(v.output_code)
    every = sorted((*v.lane_code, *v.code, *v.output_code))
    _require(
        every == list(range(len(v.instrs))),
        f"{where}: lane code, element code and output code do not part the "
        f"{len(v.instrs)} instructions: {every}",
    )
    for code in (v.lane_code, v.code, v.output_code):
        _require(code == tuple(sorted(code)), f"{where}: code is out of order")
    folds = {x for x, i in enumerate(v.instrs) if i.op in REDUCTIONS}
    _require(folds <= late, f"{where}: a reduction is no output code")
    _require(
        bool(folds) == bool(v.reduction) == bool(late)
        and len(v.reduced) == len(v.operands) == (v.lanes if folds else 0),
        f"{where}: the tables of its reductions do not fit",
    )
    for x, instr in enumerate(v.instrs):
        if instr.op == "load":
            domain = v.slots[int(instr.attr or 0)].domain
            _require(
                domain
                == ("lane" if x in lane else "output" if x in late else "element"),
                f"{where}: %{x} loads a slot of domain {domain} in the other code",
            )
        if x in lane:
            for a in instr.args:
                _require(a in lane, f"{where}: %{x} is lane code, but its %{a} is not")
        elif x in late and x not in folds:
            for a in instr.args:
                # a tail is what it is where it is used
                _require(
                    a in lane or a in late or v.instrs[a].op == "tail",
                    f"{where}: %{x} is output code, but its %{a} is element code",
                )
        else:
            for a in instr.args:
                _require(
                    a not in late, f"{where}: %{x} sees %{a} before elements are done"
                )
    used = {a for instr in v.instrs for a in instr.args} | {x for x, _ in v.stores}
    for x, instr in enumerate(v.instrs):
        _require(x in used, f"{where}: nobody uses %{x} = {instr.op}")
    _check_slots(where, v, lane)
    _check_columns(graph, where, v)


def _check_slots(where: str, v: Variant, lane: set[int]) -> None:
    loaded = {int(i.attr or 0) for i in v.instrs if i.op == "load"}
    stored: set[int] = set()
    for x, s in v.stores:
        _require(0 <= x < len(v.instrs), f"{where}: stores missing %{x}")
        _require(0 <= s < len(v.slots), f"{where}: stores to missing slot {s}")
        _require(s not in stored, f"{where}: slot {s} is stored twice")
        stored.add(s)
        slot, made = v.slots[s], v.instrs[x].dtype
        _require(slot.write, f"{where}: slot {s} is stored, but not writable")
        _require(made == slot.dtype, f"{where}: slot {s} is {slot.dtype}, %{x} {made}")
        _require(
            slot.domain == "output" or x not in set(v.output_code),
            f"{where}: slot {s} is stored by output code, but is of {slot.domain}",
        )
        _require(
            slot.domain != "lane" or x in lane,
            f"{where}: slot {s} is a number per lane, but %{x} one per element",
        )
    for s, slot in enumerate(v.slots):
        _require(
            slot.domain in ("lane", "element", "output"),
            f"{where}: slot {s}: {slot.domain}",
        )
        _require(
            (slot.read, slot.write) == (s in loaded, s in stored),
            f"{where}: slot {s} says read={slot.read}, write={slot.write}, but is "
            f"read={s in loaded}, written={s in stored}",
        )


def _check_columns(graph: Graph, where: str, v: Variant) -> None:
    _require(
        len(v.columns) == len(v.slots),
        f"{where}: {len(v.columns)} columns for {len(v.slots)} slots",
    )
    _require(v.lanes > 0, f"{where}: no lanes")
    for name, table in (("slot", v.columns), ("scalar", v.scalars)):
        for k, column in enumerate(table):
            _require(
                len(column) == v.lanes,
                f"{where}: the column of {name} {k} has {len(column)} entries for "
                f"{v.lanes} lanes",
            )
    for s, (slot, column) in enumerate(zip(v.slots, v.columns, strict=True)):
        for lane, index in enumerate(column):
            b, space = graph.buffers[index], v.shapes[lane]
            here = f"{where}: slot {s} of lane {lane} is {b.name}"
            _require(b.dtype == slot.dtype, f"{here}, {b.dtype} among {slot.dtype}")
            if slot.domain == "lane":
                _require(b.shape == (), f"{here}, shape {list(b.shape)} as one number")
            elif slot.domain == "output":
                left = kept(space, v.reduced[lane])
                count = b._replace(shape=left).numel
                _require(
                    b.numel in (count, 1),
                    f"{here}, shape {list(b.shape)} as results {list(left)}",
                )
            elif slot.write:
                _require(
                    b.shape == space,
                    f"{here}, shape {list(b.shape)} written over {list(space)}",
                )
            else:
                _require(
                    _broadcasts(b.shape, space),
                    f"{here}, shape {list(b.shape)} read over {list(space)}",
                )


def _check_lanes(
    graph: Graph, name: str, variants: tuple[Variant, ...], near: dict[int, list[int]]
) -> None:
    """Lanes run in any order: what one writes, no other touches."""
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
    _require(len(devices) <= 1, f"{name}: tensors on {' and '.join(sorted(devices))}")
    for b, owner in written:
        at = graph.buffers[b].name
        _require(
            owners[b] == {owner},
            f"{name}: {at} is written in (variant, lane) {owner} and touched "
            f"in {sorted(owners[b] - {owner})}",
        )
        for other in near.get(b, ()):
            _require(
                other not in owners,
                f"{name}: {at} is written in {owner} and shares memory "
                f"with {graph.buffers[other].name}, which the kernel touches too",
            )


def _check_temps(graph: Graph, schedule: Schedule) -> None:
    """Every temp in somebody's table or among the outputs has memory."""
    touched = set(graph.outputs)
    for step in schedule.steps:
        if isinstance(step, Kernel):
            for v in step.every:
                touched.update(b for column in v.columns for b in column)
        else:
            touched.update(graph.values[r] for r in step.reads)
    for b in sorted(touched):
        _require(
            graph.buffers[b].kind != "temp" or b in schedule.temps,
            f"temp {graph.buffers[b].name} is used, but has no memory",
        )

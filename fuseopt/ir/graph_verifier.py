"""Verify a Graph: raise a GraphError that names the node and the broken invariant.

The invariants are SSA over versions of memory, independent rows of a node, well-formed
bodies, and consistent buffers.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import GraphError
from . import blocks
from .alias import overlaps
from .geometry import numel
from .graph import (
    ARITHMETIC,
    ARITY,
    AVX2,
    BY_ROWS,
    DTYPE_BYTES,
    FLOATS,
    FUNCTIONS,
    REDUCTIONS,
    VECTOR,
    Body,
    Extern,
    ForeachSchedulerNode,
    Graph,
    Instr,
    Node,
    SchedulerNode,
    kept,
    read_by,
    rows_of,
    written_by,
)
from .tables import TABLES

KINDS = ("static", "arg", "temp", "view")
COMPARISONS = frozenset({"lt", "le", "eq", "ne", "isnan"})
LOOPS = (1, 2, 4, 8, AVX2 + 2, AVX2 + 4, AVX2 + 8)
TAILS = tuple(kind + rows for kind in LOOPS for rows in (0, BY_ROWS))
LOGIC = frozenset({"and", "or", "xor", "not", "shl", "shr"})
#: Instructions that use a table: the types of their arguments, and of their result.
TABLED = {"lookup": (["i32", "i32"], "f32"), "search": (["f32", "i32"], "i32")}
#: What only floats have.
FLOAT_OPS = frozenset((*FUNCTIONS, *VECTOR, "sqrt", "vsqrt"))


def check_graph(graph: Graph) -> None:
    """Raise GraphError at the first invariant of the Graph that does not hold."""
    _check_buffers(graph)
    _check_values(graph)
    bodies: set[int] = set()
    near = overlaps(graph.buffers)
    for i, node in enumerate(graph.nodes):
        if isinstance(node, Extern):
            continue
        if id(node.body) not in bodies:
            bodies.add(id(node.body))
            _check_body(name_of(i, node), node.body)
        _check_columns(graph, i, node)
        for k, row in enumerate(rows_of(node)):
            assert isinstance(row, SchedulerNode)
            _check_operands(graph, name_of(i, node, k), row)
        if node.rows > 1:
            _check_rows(graph, i, node, near)
    _check_versions(graph, near)


# ---------------------------------------------------------------- words


def require(holds: bool, message: str) -> None:
    """Raise GraphError with the message unless `holds`."""
    if not holds:
        raise GraphError(message)


def name_of(i: int, node: Node, row: int = -1) -> str:
    """Format a node, or one of its rows, for messages: index, callee, source line."""
    name = node.name if isinstance(node, Extern) else node.body.name
    several = row >= 0 and isinstance(node, ForeachSchedulerNode) and node.rows > 1
    at = f", row {row}" if several else ""
    return f"node {i}{at} ({name}{', ' + node.line if node.line else ''})"


def _at(graph: Graph, v: int) -> str:
    return f"value {v} of {graph.buffers[graph.values[v]].name}"


# ---------------------------------------------------------------- graph


def _check_buffers(graph: Graph) -> None:
    sources: dict[int, str] = {}
    devices: dict[int, tuple[str, str]] = {}
    bases = {b.storage for b in graph.buffers if b.kind in ("static", "arg")}
    for b in graph.buffers:
        require(b.dtype in DTYPE_BYTES, f"buffer {b.name}: unknown dtype {b.dtype!r}")
        require(b.kind in KINDS, f"buffer {b.name}: unknown kind {b.kind!r}")
        require(
            len(b.shape) == len(b.stride),
            f"buffer {b.name}: shape {list(b.shape)} but stride {list(b.stride)}",
        )
        require(
            all(n >= 0 for n in b.shape) and b.offset >= 0,
            f"buffer {b.name}: shape {list(b.shape)}, offset {b.offset}",
        )
        other, device = devices.setdefault(b.storage, (b.name, b.device))
        require(
            device == b.device,
            f"buffer {b.name}: on {b.device}, but {other} of its storage on {device}",
        )
        if b.kind in ("static", "arg"):
            other = sources.setdefault(b.source, b.name)
            require(
                other == b.name,
                f"buffer {b.name}: source {b.source} is that of {other} too",
            )
        require(
            b.kind != "view" or b.storage in bases,
            f"buffer {b.name}: a view of a storage that no input has",
        )


def _check_values(graph: Graph) -> None:
    """Check that tables have the right lengths, and that their indices exist."""
    count = len(graph.buffers)
    for table, name in ((graph.initial, "initial"), (graph.final, "final")):
        require(len(table) == count, f"{name} has {len(table)} entries, not {count}")
        for b, v in enumerate(table):
            owner = graph.buffers[b].name
            require(
                -1 <= v < len(graph.values), f"{name} of buffer {owner}: no value {v}"
            )
            require(
                v < 0 or graph.values[v] == b,
                f"{name} of buffer {owner}: value {v} is another buffer's",
            )
    for v, b in enumerate(graph.values):
        require(0 <= b < count, f"value {v}: no buffer {b}")
    for b in graph.outputs:
        require(0 <= b < count, f"outputs: no buffer {b}")
    for i, buffer in enumerate(graph.buffers):
        require(
            (graph.initial[i] < 0) == (buffer.kind == "temp"),
            f"buffer {buffer.name}: {buffer.kind} with initial value "
            f"{graph.initial[i]}; temps have none, all others one",
        )


def _check_body(where: str, body: Body) -> None:
    for dtype in body.reads:
        require(dtype in ARITHMETIC, f"{where}: reads unknown dtype {dtype!r}")
    require(bool(body.writes), f"{where}: the body writes nothing")
    check_instrs(where, body.instrs, body.reads, body.n_scalars)
    folds = [x for x, i in enumerate(body.instrs) if i.op in REDUCTIONS]
    last = [len(body.instrs) - 1]
    require(
        folds == (last if body.reduction else []),
        f"{where}: a reduction is the last instruction of its body, and only there",
    )
    require(
        body.reduction in ("", "full", "dims"), f"{where}: reduces {body.reduction!r}"
    )
    for x, dtype in body.writes:
        require(0 <= x < len(body.instrs), f"{where}: writes missing %{x}")
        result = body.instrs[x].dtype
        require(result == dtype, f"{where}: writes %{x}, which is {result}, as {dtype}")


def check_instrs(
    where: str, instrs: Sequence[Instr], loads: Sequence[str], scalars: int
) -> None:
    """Check arity, order, attributes and dtypes of SSA instructions."""
    for x, instr in enumerate(instrs):
        here = f"{where}: %{x} = {instr.op}"
        require(instr.op in ARITY, f"{here}: unknown opcode")
        require(instr.dtype in ARITHMETIC, f"{here}: unknown dtype {instr.dtype!r}")
        wanted = ARITY[instr.op]
        require(
            len(instr.args) == wanted,
            f"{here}: {len(instr.args)} arguments, not {wanted}",
        )
        for a in instr.args:
            require(0 <= a < x, f"{here}: argument %{a} does not come before it")
        if instr.op == "load":
            _index(here, instr, len(loads))
            stored = loads[int(instr.attr or 0)]
            require(stored == instr.dtype, f"{here}: {instr.dtype} from {stored}")
        elif instr.op == "scalar":
            _index(here, instr, scalars)
        elif instr.op == "const":
            require(isinstance(instr.attr, (int, float)), f"{here}: no number")
        elif instr.op == "tail":
            require(instr.attr in (None, 0, *TAILS), f"{here}: attribute {instr.attr}")
        elif instr.op in REDUCTIONS:
            require(instr.attr in (0, 1, 2), f"{here}: attribute {instr.attr}")
        elif instr.op in blocks.SIZED:
            require(instr.attr in blocks.SIZES, f"{here}: blocks of {instr.attr}")
        elif instr.op in TABLED:
            _index(here, instr, len(TABLES))
        else:
            require(instr.attr is None, f"{here}: has attribute {instr.attr}")
        _check_dtypes(here, instr, [instrs[a].dtype for a in instr.args])
    _check_blocks(where, instrs)


def _check_blocks(where: str, instrs: Sequence[Instr]) -> None:
    """Check that `spread` alone loads what has a number for each block, and that what
    `first` makes is stored.
    """
    if not blocks.sizes_of(instrs):
        return
    places = blocks.read_by_block(instrs)
    for x, instr in enumerate(instrs):
        for a in instr.args:
            arg, here = instrs[a], f"{where}: %{x} = {instr.op}"
            by_block = arg.op == "load" and arg.attr in places
            require(
                by_block == (instr.op == "spread"),
                f"{here} of %{a}, which has a number for each "
                f"{'block' if by_block else 'element'}",
            )
            require(arg.op != "first", f"{here} of numbers of blocks")


def _index(here: str, instr: Instr, count: int) -> None:
    require(
        isinstance(instr.attr, int) and 0 <= instr.attr < count,
        f"{here}: index {instr.attr} of {count}",
    )


def _check_dtypes(here: str, instr: Instr, args: list[str]) -> None:
    said = f"{here}: {instr.dtype} of {', '.join(args)}"
    if instr.op in ("load", "scalar", "const", "cast"):
        return
    if instr.op == "tail":
        require(instr.dtype == "b8", said)
    elif instr.op in COMPARISONS:
        require(instr.dtype == "b8" and len(set(args)) == 1, said)
    elif instr.op == "where":
        require(args == ["b8", instr.dtype, instr.dtype], said)
    elif instr.op == "index":
        require(instr.dtype == "i32", said)
    elif instr.op in TABLED:
        require((args, instr.dtype) == TABLED[instr.op], said)
    elif instr.op in blocks.FOLDS:
        require([*args, instr.dtype] == ["f32", "f32"], said)
    elif instr.op == "bitcast":
        require(DTYPE_BYTES[args[0]] == DTYPE_BYTES[instr.dtype], said)
    else:
        require(set(args) == {instr.dtype}, said)
        require(
            instr.dtype not in ("bf16", "f16"),
            f"{said}: 16-bit floats are stored, never computed in",
        )
        require(instr.op not in FLOAT_OPS or instr.dtype in FLOATS, said)
        require(
            instr.op not in LOGIC or instr.dtype not in FLOATS,
            f"{said}: logic on floats",
        )


def _check_columns(graph: Graph, i: int, node: ForeachSchedulerNode) -> None:
    """Check that a node has one column for each operand, all of equal length."""
    body, count = node.body, len(graph.values)
    for got, wanted, what in (
        (len(node.reads), len(body.reads), "values read"),
        (len(node.scalars), body.n_scalars, "scalars"),
        (len(node.writes), len(body.writes), "values written"),
    ):
        require(
            got == wanted,
            f"{name_of(i, node)}: {got} {what}, its body has {wanted}",
        )
    dims = (node.dims,) if body.reduction else ()
    require(
        bool(body.reduction) or not node.dims,
        f"{name_of(i, node)}: dimensions to reduce, but a pointwise body",
    )
    for column in (*node.reads, *node.scalars, *node.writes, *dims):
        require(
            len(column) == node.rows > 0,
            f"{name_of(i, node)}: a column of {len(column)} entries among "
            f"columns of {node.rows}",
        )
    for v in (*read_by(node), *written_by(node)):
        require(0 <= v < count, f"{name_of(i, node)}: no value {v}")


def _check_rows(
    graph: Graph, i: int, node: ForeachSchedulerNode, near: dict[int, list[int]]
) -> None:
    """Check that no row touches memory that another row writes."""
    values = graph.values
    writer: dict[int, int] = {}
    for column in node.writes:
        for row, v in enumerate(column):
            writer.setdefault(values[v], row)
    for column in (*node.writes, *node.reads):
        for row, v in enumerate(column):
            for b in (values[v], *near.get(values[v], ())):
                if writer.get(b, row) != row:
                    raise GraphError(
                        f"{name_of(i, node, row)}: touches {graph.buffers[b].name}, "
                        f"which row {writer[b]} writes"
                    )


def _check_operands(graph: Graph, where: str, node: SchedulerNode) -> None:
    body, values, buffers = node.body, graph.values, graph.buffers

    def broken(what: str) -> GraphError:
        return GraphError(f"{where}: {what}")

    first = buffers[values[node.writes[0]]]
    shape, device = first.shape, first.device
    if blocks.write_by_block(body, 0):
        shape = buffers[values[node.reads[0]]].shape
    if body.reduction:
        operand = buffers[values[node.reads[0]]].shape
        left = kept(operand, node.dims)
        bare = tuple([n for n in shape if n != 1])
        if bare != tuple([n for n in left if n != 1]):
            raise broken(f"{list(operand)} without {list(node.dims)} is {list(left)}")
        if body.reduction == "full" and len(node.dims) != len(operand):
            raise broken("a full reduction leaves a dimension")
    for k, (v, (_, dtype)) in enumerate(zip(node.writes, body.writes, strict=True)):
        b = buffers[values[v]]
        if b.dtype != dtype:
            raise broken(f"writes {dtype} to {b.name}, which is {b.dtype}")
        size = blocks.write_by_block(body, k)
        wanted = (blocks.count(numel(shape), size),) if size else shape
        if b.shape != wanted or b.device != device:
            raise broken("results of several shapes or devices")
    by_block = blocks.read_by_block(body.instrs)
    for k, (v, dtype) in enumerate(zip(node.reads, body.reads, strict=True)):
        b = buffers[values[v]]
        if k in by_block:
            wanted = (blocks.count(numel(shape), by_block[k]),)
            if b.shape != wanted or b.dtype != dtype or b.device != device:
                raise broken(f"{b.name} has no number for each block")
            continue
        if b.dtype != dtype:
            raise broken(f"reads {dtype} from {b.name}, a {b.dtype}")
        space = operand if body.reduction else shape
        if b.shape != space and not broadcasts(b.shape, space):
            raise broken(
                f"{b.name} of shape {list(b.shape)} does not fit {list(space)}"
            )
        if b.device != device and b.shape != ():
            raise broken(f"{b.name} is on {b.device}, the result on {device}")


def broadcasts(shape: tuple[int, ...], space: tuple[int, ...]) -> bool:
    """Does a tensor of this shape broadcast to an index space?"""
    if len(shape) > len(space):
        return False
    ending = space[len(space) - len(shape) :]
    return all(a in (1, b) for a, b in zip(shape, ending, strict=True))


def _check_versions(graph: Graph, near: dict[int, list[int]]) -> None:
    """Check SSA over memory: each read uses the version that its buffer holds then.

    A write through an overlapping buffer makes a version stale. Later reads then use a
    value that no node makes. The same holds for a temp that was never written.
    """
    producer: dict[int, int] = {}
    for i, node in enumerate(graph.nodes):
        for v in (*read_by(node), *written_by(node)):
            if not 0 <= v < len(graph.values):
                raise GraphError(f"{name_of(i, node)}: no value {v}")
        for v in written_by(node):
            if v in producer:
                raise GraphError(
                    f"{name_of(i, node)}: {_at(graph, v)} is written twice"
                )
            if v == graph.initial[graph.values[v]]:
                where = f"{name_of(i, node)}: writes {_at(graph, v)}"
                raise GraphError(f"{where}, which is there on entry")
            producer[v] = i
    current = list(graph.initial)  # -1: unknown, any value that no node makes
    on_entry = set(current) - {-1}

    def see(v: int, who: str) -> None:
        b = graph.values[v]
        if current[b] == v:
            return
        if current[b] >= 0:
            wanted = _at(graph, current[b])
            raise GraphError(f"{who}: sees {_at(graph, v)} where memory has {wanted}")
        require(
            v not in producer, f"{who}: sees {_at(graph, v)}, which another node makes"
        )
        require(
            v not in on_entry,
            f"{who}: sees {_at(graph, v)}, which an overlapping write has changed",
        )
        current[b] = v

    for i, node in enumerate(graph.nodes):
        for k, row in enumerate(rows_of(node)):
            for v in row.reads:
                if current[graph.values[v]] != v:
                    see(v, name_of(i, node, k))
            for v in row.writes:
                b = graph.values[v]
                current[b] = v
                for other in near.get(b, ()):
                    current[other] = -1
    for b, v in enumerate(graph.final):
        buffer = graph.buffers[b]
        if v >= 0:
            see(v, f"final of {buffer.name}")
        elif buffer.kind != "temp":
            require(
                current[b] == graph.initial[b],
                f"final of {buffer.name}: a write is lost",
            )

"""The checker: good graphs and schedules pass, each kind of damage is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from fuseopt.errors import GraphError
from fuseopt.ir.graph import (
    Extern,
    ForeachSchedulerNode,
    Graph,
    Instr,
    Kernel,
    Schedule,
    Variant,
)
from fuseopt.ir.verifier import check_graph, check_schedule
from tests.build_graphs import GraphBuilder, adaptive, momentum, planned

SHAPES = [(3, 4), (5,)]


def damage(where: Graph, field: str, index: int, value: object) -> Graph:
    items = list(getattr(where, field))
    items[index] = value
    return replace(where, **{field: tuple(items)})


def node(graph: Graph, index: int, **change: object) -> Graph:
    old = graph.nodes[index]
    assert isinstance(old, ForeachSchedulerNode)
    return damage(graph, "nodes", index, old._replace(**change))


def row(graph: Graph, index: int, k: int = 0, **change: Sequence[int]) -> Graph:
    """Other values in one row of a node."""
    old = graph.nodes[index]
    columns = {
        name: tuple(
            (*column[:k], v, *column[k + 1 :])
            for column, v in zip(getattr(old, name), values, strict=True)
        )
        for name, values in change.items()
    }
    return node(graph, index, **columns)


def made(graph: Graph, index: int) -> tuple[int, ...]:
    """What the first row of a node writes."""
    return tuple(column[0] for column in graph.nodes[index].writes)


def body(graph: Graph, index: int, **change: object) -> Graph:
    old = graph.nodes[index]
    assert isinstance(old, ForeachSchedulerNode)
    return node(graph, index, body=replace(old.body, **change))


def instr(graph: Graph, index: int, x: int, **change: object) -> Graph:
    old = graph.nodes[index]
    assert isinstance(old, ForeachSchedulerNode)
    instrs = list(old.body.instrs)
    instrs[x] = instrs[x]._replace(**change)
    return body(graph, index, instrs=tuple(instrs))


def buffer(graph: Graph, index: int, **change: object) -> Graph:
    return damage(graph, "buffers", index, graph.buffers[index]._replace(**change))


def last(graph: Graph) -> ForeachSchedulerNode:
    found = graph.nodes[-1]
    assert isinstance(found, ForeachSchedulerNode)
    return found


#: How to damage the graph of `momentum(SHAPES)` (three nodes of two rows; buffers p p m
#: m g g), and what the message must say.
GRAPHS: dict[str, tuple[Callable[[Graph], Graph], str]] = {
    "written twice": (
        lambda g: row(g, 1, writes=made(g, 0)),
        r"node 1 \(add, step.py:2\): value 6 of m0 is written twice",
    ),
    "overwrites entry": (
        lambda g: row(g, 0, writes=(g.initial[2],)),
        "there on entry",
    ),
    "reads the future": (
        lambda g: row(g, 0, reads=made(g, 1)),
        "node 0, row 0 .* sees value .* of m0 where memory has value",
    ),
    "reads the past": (
        lambda g: row(g, 1, reads=(g.initial[2], g.initial[4])),
        "node 1, row 0 .* sees value 2 of m0 where memory has",
    ),
    "other length": (
        lambda g: node(g, 1, scalars=((last(g).scalars[0][0],),)),
        "node 1 .*: a column of 1 entries among columns of 2",
    ),
    "rows that overlap": (
        lambda g: buffer(g, 5, kind="view", storage=g.buffers[2].storage),
        "node 1, row 1 .*: touches m0, which row 0 writes",
    ),
    "no such value": (lambda g: row(g, 0, reads=(99,)), "node 0 .*: no value 99"),
    "reads": (lambda g: node(g, 0, reads=()), "0 values read, its body has 1"),
    "scalars": (lambda g: node(g, 0, scalars=()), "0 scalars, its body has 1"),
    "writes": (lambda g: node(g, 0, writes=()), "0 values written, its body has 1"),
    "opcode": (lambda g: instr(g, 0, 2, op="mull"), "%2 = mull: unknown opcode"),
    "arity": (lambda g: instr(g, 0, 2, args=(0,)), "%2 = mul: 1 arguments, not 2"),
    "order": (
        lambda g: instr(g, 0, 2, args=(0, 2)),
        "argument %2 does not come before",
    ),
    "dtype": (lambda g: instr(g, 0, 2, dtype="f31"), "unknown dtype 'f31'"),
    "mixed": (lambda g: instr(g, 0, 1, dtype="f64"), "%2 = mul: f32 of f32, f64"),
    "load": (lambda g: instr(g, 0, 0, attr=1), "%0 = load: index 1 of 1"),
    "scalar": (lambda g: instr(g, 0, 1, attr=None), "%1 = scalar: index None of 1"),
    "attribute": (lambda g: instr(g, 0, 2, attr=1), "%2 = mul: has attribute 1"),
    "constant": (
        lambda g: instr(g, 0, 1, op="const", attr=None),
        "%1 = const: no number",
    ),
    "half": (
        lambda g: body(
            g,
            0,
            reads=("bf16",),
            instrs=tuple(
                i._replace(dtype="bf16")
                for i in g.nodes[0].body.instrs  # type: ignore[union-attr]
            ),
        ),
        "never computed in",
    ),
    "result": (lambda g: body(g, 0, writes=((7, "f32"),)), "writes missing %7"),
    "result dtype": (
        lambda g: body(g, 0, writes=((2, "bf16"),)),
        "writes %2, which is f32, as bf16",
    ),
    "no result": (lambda g: body(g, 0, writes=()), "writes nothing"),
    "operand dtype": (lambda g: buffer(g, 4, dtype="f64"), "reads f32 from g0, a f64"),
    "result buffer": (lambda g: buffer(g, 0, dtype="f64"), "writes f32 to p0"),
    "shape": (
        lambda g: buffer(g, 4, shape=(2, 4), stride=(4, 1)),
        r"g0 of shape \[2, 4\] does not fit \[3, 4\]",
    ),
    "device": (lambda g: buffer(g, 4, device="cuda:0"), "g0 is on cuda:0"),
    "buffer dtype": (lambda g: buffer(g, 0, dtype="q9"), "buffer p0: unknown dtype"),
    "kind": (lambda g: buffer(g, 0, kind="input"), "unknown kind 'input'"),
    "stride": (lambda g: buffer(g, 0, stride=(1,)), r"shape \[3, 4\] but stride \[1\]"),
    "source": (lambda g: buffer(g, 1, source=0), "source 0 is that of p0"),
    "two devices": (
        lambda g: buffer(g, 1, storage=0, device="cuda:0"),
        "on cuda:0, but p0 of its storage on cpu",
    ),
    "lone view": (lambda g: buffer(g, 0, kind="view"), "a storage that no input has"),
    "temp on entry": (
        lambda g: buffer(g, 0, kind="temp"),
        "temps have none, all others one",
    ),
    "lost write": (lambda g: damage(g, "final", 0, -1), "final of p0: a write is lost"),
    "old final": (
        lambda g: damage(g, "final", 0, g.initial[0]),
        "final of p0: sees value 0 of p0 where memory has",
    ),
    "foreign final": (
        lambda g: damage(g, "final", 0, 1),
        "value 1 is another buffer's",
    ),
    "short final": (
        lambda g: replace(g, final=g.final[1:]),
        "final has 5 entries, not 6",
    ),
    "outputs": (lambda g: replace(g, outputs=(17,)), "outputs: no buffer 17"),
    "values": (lambda g: damage(g, "values", 3, 17), "no buffer 17|another buffer"),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_damaged_graph(name: str) -> None:
    graph = momentum(SHAPES).graph()
    change, message = GRAPHS[name]
    with pytest.raises(GraphError, match=message):
        check_graph(change(graph))


def test_rows_have_no_order() -> None:
    g = GraphBuilder()
    p, q = g.tensors("p", [(4,), (4,)])
    grad = g.tensors("g", [(4,), (4,)])
    g.foreach("add", [p, q], grad, 1.0)
    graph = g.graph()
    with pytest.raises(GraphError, match=r"row 1 .*: touches p0, which row 0 writes"):
        check_graph(row(graph, 0, 1, reads=(made(graph, 0)[0], graph.initial[3])))


def test_a_stale_version_is_a_value_that_nobody_makes() -> None:
    g = GraphBuilder()
    flat = g.tensor("flat", (8,))
    part = g.view(flat, "part", (4,))
    g.op("mul", flat, 2.0, out=flat)
    g.op("mul", part, 2.0, out=part)
    graph = g.graph()
    with pytest.raises(GraphError, match="which an overlapping write has changed"):
        check_graph(node(graph, 1, reads=((graph.initial[part],),)))


def test_a_temp_that_nobody_wrote_may_be_read() -> None:
    g = GraphBuilder()
    p = g.tensor("p", (4,))
    g.op("add", p, g.like(p), 1.0, out=p)
    g.graph()


# ---------------------------------------------------------------- schedules


def variant(plan: Schedule, number: int = 0, **change: object) -> Schedule:
    """The plan with one variant of its first kernel changed."""
    kernel = plan.steps[0]
    assert isinstance(kernel, Kernel)
    variants = list(kernel.variants)
    variants[number] = replace(variants[number], **change)
    steps = (replace(kernel, variants=tuple(variants)), *plan.steps[1:])
    return replace(plan, steps=steps)


def first(plan: Schedule) -> Variant:
    kernel = plan.steps[0]
    assert isinstance(kernel, Kernel)
    return kernel.variants[0]


def swapped(plan: Schedule, x: int, new: Instr) -> Schedule:
    instrs = list(first(plan).instrs)
    instrs[x] = new
    return variant(plan, instrs=tuple(instrs))


def slot(plan: Schedule, s: int, **change: object) -> Schedule:
    slots = list(first(plan).slots)
    slots[s] = slots[s]._replace(**change)
    return variant(plan, slots=tuple(slots))


#: How to damage the schedule of `momentum(SHAPES)`: slots m g p, stores to m and p.
SCHEDULES: dict[str, tuple[Callable[[Schedule], Schedule], str]] = {
    "short column": (
        lambda s: variant(s, columns=((2,), *first(s).columns[1:])),
        "column of slot 0 has 1 entries for 2 lanes",
    ),
    "no column": (
        lambda s: variant(s, columns=first(s).columns[1:]),
        "2 columns for 3 slots",
    ),
    "short scalars": (
        lambda s: variant(s, scalars=(first(s).scalars[0][:1], first(s).scalars[1])),
        "column of scalar 0 has 1 entries",
    ),
    "parts": (lambda s: variant(s, code=first(s).code[1:]), "do not partition"),
    "twice": (
        lambda s: variant(s, code=(*first(s).code, first(s).lane_code[0])),
        "do not partition",
    ),
    "lane code of elements": (
        lambda s: variant(s, lane_code=tuple(range(len(first(s).instrs))), code=()),
        "loads a slot of domain element in the other code",
    ),
    "read only": (
        lambda s: slot(s, 0, write=False),
        "slot 0 is stored, but not writable",
    ),
    "never written": (lambda s: slot(s, 1, write=True), "slot 1 declares"),
    "slot dtype": (lambda s: slot(s, 2, dtype="f64"), "load: f32 from f64"),
    "domain": (lambda s: slot(s, 2, domain="row"), "slot"),
    "stored twice": (
        lambda s: variant(s, stores=(*first(s).stores, first(s).stores[0])),
        "stored twice",
    ),
    "store of nothing": (
        lambda s: variant(s, stores=((99, 0), *first(s).stores[1:])),
        "stores missing %99",
    ),
    "two lanes": (
        lambda s: variant(s, columns=((2, 2), *first(s).columns[1:])),
        "written over|is written in",
    ),
    "shape": (lambda s: variant(s, shapes=((3, 4), (4,))), r"written over \[4\]"),
    "no lanes": (
        lambda s: variant(s, shapes=(), columns=((), (), ()), scalars=((), ())),
        "no lanes",
    ),
    "another scalar": (
        lambda s: variant(s, scalars=(first(s).scalars[1], first(s).scalars[0])),
        r"node 1 \(add, step.py:2\): the schedule leaves another m0",
    ),
    "another op": (
        lambda s: swapped(s, 2, Instr("sub", (0, 1), "f32")),
        "leaves another m0",
    ),
    "nothing": (lambda s: replace(s, steps=()), "never writes m0"),
    "run twice": (
        lambda s: replace(s, steps=(*s.steps, replace(s.steps[0], name="again"))),  # type: ignore[type-var]
        "leaves another m0",
    ),
    "one name": (lambda s: replace(s, steps=s.steps * 2), "two kernels have this name"),
    "no variants": (
        lambda s: replace(s, steps=(Kernel("kernel0", ()),)),
        "no variants",
    ),
    "foreign extern": (
        lambda s: replace(s, steps=(*s.steps, Extern("e", (), (), 3, "", ""))),
        r"runs the externs of calls \[3\]",
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_damaged_schedule(name: str) -> None:
    graph, plan = planned(momentum(SHAPES))
    change, message = SCHEDULES[name]
    with pytest.raises(GraphError, match=message):
        check_schedule(graph, change(plan))


def test_kernels_in_the_wrong_order() -> None:
    g = GraphBuilder()
    p, row = g.tensors("p", [(3, 4), (4,)])
    g.op("mul", row, 2.0, out=row)
    g.op("add", p, row, out=p)
    graph, plan = planned(g)
    with pytest.raises(GraphError, match=r"node 1 .* leaves another p0"):
        check_schedule(graph, replace(plan, steps=plan.steps[::-1]))


def test_an_extern_before_what_it_reads() -> None:
    g = GraphBuilder()
    p = g.tensor("p", (4,))
    g.op("mul", p, 2.0, out=p)
    g.extern("aten.special", [p], [p])
    graph, plan = planned(g)
    with pytest.raises(GraphError, match="leaves another p"):
        check_schedule(graph, replace(plan, steps=plan.steps[::-1]))
    with pytest.raises(GraphError, match=r"calls \[\], the graph has \[0\]"):
        check_schedule(graph, replace(plan, steps=plan.steps[:1]))


def test_a_temp_without_memory() -> None:
    g = GraphBuilder()
    p = g.tensor("p", (4,))
    g.outputs.append(g.op("mul", p, 2.0))
    graph, plan = planned(g)
    with pytest.raises(GraphError, match="temp t1 is used, but has no memory"):
        check_schedule(graph, replace(plan, temps=()))


def test_overlapping_lanes_of_one_kernel() -> None:
    g = GraphBuilder()
    flat = g.tensor("flat", (8,))
    parts = [g.view(flat, f"v{k}", (4,), k) for k in (0, 2)]
    for x in parts:
        g.op("mul", x, 2.0, out=x)
    graph, plan = planned(g)
    one, two = (first(replace(plan, steps=plan.steps[k:])) for k in (0, 1))
    together = Kernel("kernel0", (one, two))
    with pytest.raises(GraphError, match=r"v0 is written in .* shares memory with v2"):
        check_schedule(graph, replace(plan, steps=(together,)))


def test_checks_of_many_lanes_are_fast_enough_to_be_left_on() -> None:
    planned(adaptive([(4,)] * 1000))

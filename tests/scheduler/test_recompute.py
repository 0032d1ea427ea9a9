"""Which results are computed again where they are read. Graphs by hand, no torch.

`planned` proves every schedule to do what its graph does.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from fuseopt.ir.graph import Kernel, Schedule, Variant
from fuseopt.scheduler import kernels
from fuseopt.scheduler.recompute import recomputed
from tests.build_graphs import GraphBuilder, planned

SHAPE = (3, 4)


def variants(plan: Schedule) -> list[list[Variant]]:
    return [list(k.variants) for k in plan.steps if isinstance(k, Kernel)]


def elements(plan: Schedule, g: GraphBuilder) -> list[set[str]]:
    """The names of the tensors that each kernel stores element by element."""
    return [
        {
            g.buffers[v.columns[k][0]].name
            for v in kernel
            for k, s in enumerate(v.slots)
            if s.write and s.domain == "element"
        }
        for kernel in variants(plan)
    ]


def add_by_norm(g: GraphBuilder, p: int, made: int) -> Schedule:
    """Schedule what adds a temp, divided by its norm, to a parameter."""
    g.op("add", p, g.op("div", made, g.reduce("norm2", made)), out=p)
    return planned(g)[1]


def rows_and_columns(g: GraphBuilder, grad: int) -> tuple[int, int]:
    """An update of a row, a column and a gradient, and its norm."""
    row, column = g.tensor("row", (3, 1)), g.tensor("column", (1, 4))
    whole = g.tensor("t", SHAPE, kind="temp")
    update = g.op("mul", g.op("mul", row, column, out=whole), grad)
    return update, g.reduce("norm2", update)


def test_an_update_of_a_row_and_a_column_is_not_stored() -> None:
    g = GraphBuilder()
    p, grad = g.tensor("p", SHAPE), g.tensor("g", SHAPE)
    update, norm = rows_and_columns(g, grad)
    g.op("add", p, g.op("div", update, norm), out=p)
    _, plan = planned(g)
    assert elements(plan, g) == [set(), {"p"}]


def test_a_cast_is_done_where_its_result_is_read() -> None:
    g = GraphBuilder()
    p, grad = g.tensor("p", SHAPE), g.tensor("g", SHAPE, "bf16")
    wide = g.op("copy", grad, out=g.tensor("wide", SHAPE, kind="temp"))
    plan = add_by_norm(g, p, wide)
    assert elements(plan, g) == [set(), {"p"}]


def test_what_takes_more_bytes_is_stored() -> None:
    """Two tensors of the result's size would be read in its place."""
    g = GraphBuilder()
    p, a, b = (g.tensor(x, SHAPE) for x in "pab")
    both = g.op("add", a, b, out=g.tensor("both", SHAPE, kind="temp"))
    plan = add_by_norm(g, p, both)
    assert elements(plan, g) == [{"both"}, {"p"}]


def test_what_the_later_kernel_writes_is_not_read_for_it() -> None:
    g = GraphBuilder()
    p, a = g.tensor("p", SHAPE), g.tensor("a", SHAPE)
    both = g.op("add", p, a, out=g.tensor("both", SHAPE, kind="temp"))
    plan = add_by_norm(g, p, both)
    assert elements(plan, g) == [{"both"}, {"p"}]


def test_functions_are_computed_once() -> None:
    g = GraphBuilder()
    p, grad = g.tensor("p", SHAPE), g.tensor("g", SHAPE)
    made = g.op("exp", grad, out=g.tensor("made", SHAPE, kind="temp"))
    plan = add_by_norm(g, p, made)
    assert elements(plan, g) == [{"made"}, {"p"}]


def test_many_quotients_are_computed_once() -> None:
    g = GraphBuilder()
    p, row = g.tensor("p", SHAPE), g.tensor("row", (1, 4))
    x = g.op("add", row, 1.5, out=g.tensor("first", SHAPE, kind="temp"))
    for _ in range(8):
        x = g.op("div", x, row)
    made = g.op("div", x, row, out=g.tensor("made", SHAPE, kind="temp"))
    plan = add_by_norm(g, p, made)
    assert elements(plan, g) == [{"made"}, {"p"}]


@pytest.mark.parametrize("changed", ["g", "row", "column"])
@pytest.mark.parametrize("when", ["before the norm", "after it", "at the end"])
def test_a_source_that_changes_before_the_later_kernel(changed: str, when: str) -> None:
    """What no longer exists cannot be read again."""
    g = GraphBuilder()
    p, grad = g.tensor("p", SHAPE), g.tensor("g", SHAPE)
    update, norm = rows_and_columns(g, grad)
    names = {g.buffers[i].name: i for i in range(len(g.buffers))}
    source = names[changed]
    if when == "before the norm":
        g.op("mul", source, 2.0, out=source)
    if when == "after it":
        g.op("div", source, norm, out=source)
    ratio = g.op("div", update, norm)
    g.op("add", p, ratio, out=p)
    if when == "at the end":
        total = g.reduce("norm2", p)
        g.op("mul", source, total, out=source)
    _, plan = planned(g)
    stored = set().union(*elements(plan, g)) - {"p", changed}
    assert bool(stored) == (when != "at the end")


def test_what_another_call_or_the_caller_reads_is_stored() -> None:
    for reader in ("extern", "caller"):
        g = GraphBuilder()
        p, grad = g.tensor("p", SHAPE), g.tensor("g", SHAPE)
        update, norm = rows_and_columns(g, grad)
        if reader == "extern":
            g.extern("svd", [update], [g.like(update)])
        else:
            g.outputs.append(update)
        g.op("add", p, g.op("div", update, norm), out=p)
        _, plan = planned(g)
        assert g.buffers[update].name in set().union(*elements(plan, g))


def test_lanes_in_lists_are_treated_alike() -> None:
    g = GraphBuilder()
    shapes = [(3, 4 + k) for k in range(5)]
    ps, grads = g.tensors("p", shapes), g.tensors("g", shapes, "bf16")
    wide = [g.tensor(f"wide{k}", s, kind="temp") for k, s in enumerate(shapes)]
    call = g._next_call()
    for a, b in zip(grads, wide, strict=True):
        g.op("copy", a, out=b, call=call)
    norms = [g.reduce("norm2", x) for x in wide]
    for p, x, norm in zip(ps, wide, norms, strict=True):
        g.op("add", p, g.op("div", x, norm), out=p)
    _, plan = planned(g)
    first, last = variants(plan)
    assert [v.lanes for v in (*first, *last)] == [5, 5]
    assert elements(plan, g)[0] == set()


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many nodes each schedule computes again."""
    counts: list[int] = []

    def counted(*args: Any) -> frozenset[int]:
        found = recomputed(*args)
        counts.append(len(found))
        return found

    monkeypatch.setattr(kernels, "recomputed", counted)
    return counts


def test_any_program_does_what_it_did(chosen: list[int]) -> None:
    """`planned` fails if a kernel reads another version of a tensor."""
    for seed in range(400):
        program(random.Random(seed))
    assert sum(x > 0 for x in chosen) > 60


def program(random_: random.Random) -> None:
    """Schedule temps of rows, columns and narrow tensors, norms, and what uses them."""
    g = GraphBuilder()
    whole = [g.tensor(f"w{k}", SHAPE, random_.choice(["f32", "bf16"])) for k in "abc"]
    whole.append(g.tensor("part", SHAPE, storage=g.buffers[whole[0]].storage, offset=6))
    rows = [g.tensor("row", (3, 1)), g.tensor("column", (1, 4)), g.tensor("x", ())]
    temps: list[int] = []
    norms: list[int] = []
    for k in range(random_.randrange(5, 14)):
        name = random_.choice(["mul", "add", "div"])
        kind = random_.random()
        if kind < 0.2 and temps:
            norms.append(g.reduce("norm2", random_.choice(temps[-3:])))
        elif kind < 0.3 and temps:
            columns = g.reduce("sum", random_.choice(temps), (0,))
            g.outputs.append(columns)
        elif kind < 0.6 or not temps:
            a, b = random_.choice([*whole, *temps]), random_.choice([*rows, *temps])
            dtype = random_.choice(["f32", "f32", "f64"])
            out = g.tensor(f"t{k}", SHAPE, dtype, kind="temp")
            temps.append(g.op(name, a, b, out=out))
        elif kind < 0.9:
            out, with_norm = random_.choice(whole), random_.choice([*rows, *norms])
            g.op("add", out, g.op("mul", random_.choice(temps), with_norm), out=out)
        else:
            out = random_.choice([*rows, *temps])
            g.op("mul", out, random_.choice([2.0, 0.5]), out=out)
    if random_.random() < 0.2 and temps:
        g.outputs.append(random_.choice(temps))
    planned(g)

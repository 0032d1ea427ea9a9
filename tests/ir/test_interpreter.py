"""The meaning of the IR: eval(graph) == eval(schedule), bit for bit, and near eager."""

from __future__ import annotations

import ctypes
import ctypes.util
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fuseopt.capture import Captured, capture  # noqa: E402
from fuseopt.capture.aten.externs import TensorRef  # noqa: E402
from fuseopt.capture.fx.inputs import static_tensors  # noqa: E402
from fuseopt.capture.scalars.host import Sym  # noqa: E402
from fuseopt.errors import GraphError  # noqa: E402
from fuseopt.ir.blocks import SIZED  # noqa: E402
from fuseopt.ir.graph import ARITY, DTYPE_BYTES, Extern, Graph, Instr, Symbol  # noqa: E402
from fuseopt.ir.interpreter import (  # noqa: E402
    ExternRunner,
    Memory,
    run_graph,
    run_schedule,
)
from fuseopt.ir.meaning import DTYPES, _fma, evaluate  # noqa: E402
from fuseopt.ir.verifier import check_graph, check_schedule  # noqa: E402
from fuseopt.scheduler import Machine, schedule  # noqa: E402
from tests.build_graphs import GraphBuilder, adaptive, momentum, planned, scaled  # noqa: E402

INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def same_bits(a: Any, b: Any) -> bool:
    """Equal in every bit, any NaN being as good as another."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = a.contiguous(), b.contiguous()
    kind = INTEGERS[a.element_size()]
    equal = a.view(kind) == b.view(kind)
    return bool((equal | (a.isnan() & b.isnan())).all())


def clones(tensors: Sequence[Any]) -> list[Any]:
    """Copies that share storage where the originals do, with the same strides."""
    storages: dict[int, Any] = {}
    result = []
    for t in tensors:
        own = t.detach().untyped_storage()
        if own._cdata not in storages:
            storages[own._cdata] = own.clone()
        copy = torch.empty(0, dtype=t.dtype)
        copy.set_(storages[own._cdata], t.storage_offset(), t.shape, t.stride())
        result.append(copy)
    return result


def inputs(graph: Graph, seed: int = 0) -> list[Any]:
    """Random memory for a graph built by hand."""
    g = torch.Generator().manual_seed(seed)
    memory: dict[int, Any] = {}
    found = {}
    for b in graph.buffers:
        if b.kind in ("static", "arg"):
            if b.storage not in memory:
                memory[b.storage] = torch.rand(256, generator=g).to(DTYPES[b.dtype])
            whole = memory[b.storage]
            found[b.source] = whole.as_strided(b.shape, b.stride, b.offset)
    return [found[k] for k in range(len(found))]


def assert_equal_runs(
    graph: Graph,
    tensors: Sequence[Any],
    scalars: Sequence[float] = (),
    externs: ExternRunner | None = None,
) -> list[Any]:
    """Run the graph and its schedules, kernel by kernel and block by block; return the
    tensors as the graph leaves them.
    """
    check_graph(graph)
    plans = [schedule(graph, machine=Machine(block)) for block in (0, 1, 1 << 20)]
    for plan in plans:
        check_schedule(graph, plan)
    expected: list[Any] = []
    for tail in (False, True):  # eager's small tensors are all tail
        expected = clones(tensors)
        outputs = run_graph(graph, expected, scalars, externs, tail=tail)
        for plan, backwards in itertools.product(plans, (False, True)):
            got = clones(tensors)
            others = run_schedule(
                graph, plan, got, scalars, externs, tail=tail, backwards=backwards
            )
            pairs = zip((*expected, *outputs), (*got, *others), strict=True)
            for k, (a, b) in enumerate(pairs):
                assert same_bits(a, b), f"tensor {k}: {a} and {b}"
    return expected


# ---------------------------------------------------------------- instructions


def test_dtypes_are_those_of_the_ir() -> None:
    assert {n: d.itemsize for n, d in DTYPES.items()} == DTYPE_BYTES


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("op", sorted(ARITY.keys() - SIZED - {"lookup", "search"}))
def test_every_opcode_has_a_meaning(op: str, dtype: str) -> None:
    x = torch.tensor([0.25, 0.5, 2.0], dtype=DTYPES[dtype])
    load = Instr("load", (), dtype, 0)
    mask = Instr("lt", (0, 0), "b8")
    if op in ("shl", "shr", "bitcast"):
        load = load._replace(dtype="i64")
        x, dtype = torch.tensor([1, 2, 3]), "i64"
        mask = Instr("lt", (0, 0), "b8")
    logic, comparison = (
        op in ("and", "or", "xor", "not"),
        op in ("lt", "le", "eq", "ne"),
    )
    first = 1 if logic or op == "where" else 0
    args = tuple([first, *([1] if logic else [0]) * 2][: ARITY[op]])
    made = "b8" if logic or comparison or op in ("tail", "isnan") else dtype
    attr = {"load": 0, "scalar": 0, "const": 1.5}.get(op)
    values = evaluate((load, mask, Instr(op, args, made, attr)), [x], [0.5])
    assert values[-1].dtype == DTYPES[made]


def test_blocks_have_a_meaning() -> None:
    x, sizes = torch.arange(100.0).view(4, 25), torch.tensor([5.0, 7.0])
    load, of_blocks = Instr("load", (), "f32", 0), Instr("load", (), "f32", 1)

    def value(op: str, of: Instr = load) -> torch.Tensor:
        code = (of, Instr(op, (0,), "f32", 64))
        return evaluate(code, [x, sizes], [], space=(4, 25))[-1]

    ends = torch.tensor([63.0] * 64 + [99.0] * 36).view(4, 25)
    starts = torch.tensor([0.0] * 64 + [64.0] * 36).view(4, 25)
    assert torch.equal(value("block_largest"), ends)
    assert torch.equal(value("block_least"), starts)
    assert value("first").tolist() == [0.0, 64.0]
    spread = value("spread", of_blocks)
    assert torch.equal(spread, torch.where(starts > 0, 7.0, 5.0))


def test_tables_have_a_meaning() -> None:
    x = torch.tensor([-1.0, 0.0, 1.0, math.nan])
    load, part = Instr("load", (), "f32", 0), Instr("const", (), "i32", 1)
    codes = Instr("search", (0, 1), "i32", 0)
    code = (load, part, codes, Instr("lookup", (2, 1), "f32", 0))
    *_, found, numbers = evaluate(code, [x], [])
    assert found.tolist() == [0, 127, 255, 0]
    assert numbers[1:3].tolist() == [0.0, 1.0]


def test_functions_follow_ieee_where_python_raises() -> None:
    x = torch.tensor([0.0, -1.0, math.inf, math.nan, 1000.0], dtype=torch.float64)
    load = Instr("load", (), "f64", 0)
    for op in ("log", "log1p", "exp", "expm1", "sqrt", "sin", "tanh"):
        got = evaluate((load, Instr(op, (0,), "f64")), [x], [])[-1]
        assert torch.allclose(got, getattr(torch, op)(x), equal_nan=True), op
    got = evaluate((load, Instr("pow", (0, 0), "f64")), [x], [])[-1]
    assert torch.allclose(got, torch.pow(x, x), equal_nan=True)


def test_max_and_min_keep_nan() -> None:
    a = torch.tensor([math.nan, 1.0, 2.0])
    b = torch.tensor([1.0, math.nan, 3.0])
    loads = (Instr("load", (), "f32", 0), Instr("load", (), "f32", 1))
    for op, function in (("max", torch.maximum), ("min", torch.minimum)):
        got = evaluate((*loads, Instr(op, (0, 1))), [a, b], [])[-1]
        assert same_bits(got, function(a, b))


def test_a_result_of_another_dtype_is_an_error() -> None:
    with pytest.raises(GraphError, match="%1 = neg"):
        evaluate(
            (Instr("load", (), "f32", 0), Instr("neg", (0,), "f64")),
            [torch.ones(2)],
            [],
        )


def _library_fma(dtype: Any) -> Callable[..., float]:
    path = ctypes.util.find_library("m")
    if path is None:
        pytest.skip("no libm to compare with")
    library = ctypes.CDLL(path)
    kind = ctypes.c_double if dtype == torch.float64 else ctypes.c_float
    function = library.fma if dtype == torch.float64 else library.fmaf
    function.restype, function.argtypes = kind, [kind] * 3
    return function


@pytest.mark.parametrize("case", ["any bits", "normal", "cancelling", "nearly"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_fma_is_exact(dtype: Any, case: str) -> None:
    g = torch.Generator().manual_seed(0)
    n = 3000
    if case == "any bits":
        kind, bits = INTEGERS[dtype.itemsize], 8 * dtype.itemsize - 1
        a, b, c = (
            torch.randint(-(2**bits), 2**bits - 1, (n,), generator=g, dtype=torch.int64)
            .to(kind)
            .view(dtype)
            for _ in range(3)
        )
    else:
        a, b, c = (torch.randn(n, generator=g, dtype=dtype) for _ in range(3))
        if case == "cancelling":
            c = -(a * b)
        elif case == "nearly":
            c = -(a * b) * (1 + c * 2.0**-20)
    function = _library_fma(dtype)
    columns = (a.tolist(), b.tolist(), c.tolist())
    exact = [function(*x) for x in zip(*columns, strict=True)]
    assert same_bits(_fma(a, b, c), torch.tensor(exact, dtype=dtype))


# ---------------------------------------------------------------- graphs by hand


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "f16"])
@pytest.mark.parametrize("build", [momentum, adaptive])
def test_scheduling_changes_no_bit(build: Any, dtype: str) -> None:
    g = build([(3, 4), (5,), (), (0, 2)], dtype=dtype)
    graph = g.graph()
    assert_equal_runs(graph, inputs(graph))


def test_two_groups_and_dtypes() -> None:
    g = momentum([(3, 4), (5,)])
    momentum([(7,)], lr=0.3, g=g, name="second_")
    adaptive([(7,), (3,)], dtype="bf16", g=g, name="third_")
    graph = g.graph()
    assert_equal_runs(graph, inputs(graph))


def test_views_externs_temps_and_symbols() -> None:
    g = GraphBuilder()
    flat = g.tensor("flat", (8,))
    q = g.tensor("q", (4,))
    parts = [g.view(flat, f"v{k}", (4,), k) for k in (0, 4, 2)]
    for x in parts:
        g.op("mul", x, Symbol(0), out=x)
    made = g.like(q, "made")
    g.extern("aten.double", [parts[2]], [made])
    g.op("add", q, made, 0.5, out=q)
    g.outputs.append(g.op("mul", q, 2.0))

    def double(node: Extern, memory: Memory) -> None:
        memory.adopt(made, memory.tensor(parts[2]) * 2)

    graph = g.graph()
    before = inputs(graph)
    after = assert_equal_runs(graph, before, [3.0], double)
    expected, other = clones(before)
    for start in (0, 4, 2):
        expected[start : start + 4] *= 3.0
    other += 0.5 * (expected[2:6] * 2)
    assert same_bits(after[0], expected)
    assert torch.allclose(after[1], other)


def test_an_extern_needs_somebody_to_run_it() -> None:
    g = GraphBuilder()
    p = g.tensor("p", (4,))
    g.extern("aten.special", [p], [p])
    graph, _ = planned(g)
    with pytest.raises(GraphError, match="given no externs"):
        run_graph(graph, inputs(graph))


# ---------------------------------------------------------------- captured steps


def runner(captured: Captured, numbers: Sequence[Any]) -> ExternRunner:
    """Run the ATen calls that capture kept."""
    buffers = captured.graph.buffers

    def run(node: Extern, memory: Memory) -> None:
        call = captured.calls[node.payload]

        def value(x: Any) -> Any:
            if isinstance(x, TensorRef):
                return memory.tensor(x.buffer)
            if isinstance(x, Sym):
                return numbers[x.index]
            if type(x) in (list, tuple):
                return type(x)(map(value, x))
            return torch.device("cpu") if str(x) == "meta" else x

        with torch.no_grad():
            got = call.func(
                *map(value, call.args), **{k: value(v) for k, v in call.kwargs.items()}
            )
        flat = [got] if isinstance(got, torch.Tensor) else list(got or ())
        for b, t in zip(call.outputs, flat, strict=True):
            if buffers[b].kind == "temp":
                memory.adopt(b, t)

    return run


class Checking:
    """A backend that runs eager beside both interpreters, and compares all three."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.graphs: list[Graph] = []

    def __call__(self, gm: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            captured = capture(gm, args)
            pool = [*static_tensors(gm).values()]
            pool += [args[i] for i in captured.tensor_args]
            numbers = captured.evaluate(args, pool.__getitem__)
            externs = runner(captured, numbers)
            got = assert_equal_runs(captured.graph, pool, numbers, externs)
            self.graphs.append(captured.graph)
            result = gm(*args)
            for k, (mine, eager) in enumerate(zip(got, pool, strict=True)):
                close = torch.allclose(
                    mine.double(), eager.double(), rtol=self.tolerance, atol=1e-4
                )
                assert close, f"tensor {k}: {mine} and eager's {eager}"
            return result

        return run


SHAPES = [(3, 5), (7,), (2, 2, 2)]
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "momentum": ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adamw": ("AdamW", {"amsgrad": True, "maximize": True}),
    "nadam": ("NAdam", {"weight_decay": 0.1}),
    "rmsprop": ("RMSprop", {"centered": True, "momentum": 0.9}),
    "rprop": ("Rprop", {}),
    "tensor-lr": ("SGD", {"lr": "tensor"}),
}


@pytest.mark.family(6)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_real_optimizers(name: str) -> None:
    torch._dynamo.reset()
    kind, options = OPTIMIZERS[name]
    g = torch.Generator().manual_seed(0)
    dtypes = [torch.float32, torch.float32, torch.bfloat16]
    params = [
        torch.randn(s, generator=g).to(d).requires_grad_()
        for s, d in zip(SHAPES, dtypes, strict=True)
    ]
    options = {"lr": 0.01, **options}
    if options["lr"] == "tensor":
        options["lr"] = torch.tensor(0.01)
    optimizer = getattr(torch.optim, kind)(
        [{"params": params[:1]}, {"params": params[1:], "lr": options["lr"] * 2}],
        foreach=True,
        **options,
    )
    # near, not equal: Dynamo writes some foreach calls out as others
    checking = Checking(tolerance=2**-6)
    step = torch.compile(optimizer.step, backend=checking, fullgraph=False)
    for _ in range(2):
        for p in params:
            p.grad = torch.randn(p.shape, generator=g).to(p.dtype)
        step()
    assert checking.graphs


def test_a_step_with_externs() -> None:
    torch._dynamo.reset()
    checking = Checking(tolerance=1e-5)

    @torch.compile(backend=checking)
    def step(p: Any, q: Any, g: Any) -> Any:
        scale = torch.cumsum(g, 0)[-1]
        p.add_(g / scale, alpha=-0.1)
        q[0].mul_(2)
        q.t().add_(1)
        p[1:3].copy_(q[0, :2])
        return p.sum()

    with torch.no_grad():
        step(torch.rand(5), torch.rand(2, 3), torch.rand(5))
    (graph,) = checking.graphs
    assert any(isinstance(n, Extern) for n in graph.nodes)


# ---------------------------------------------------------------- blocks


def test_blocks_and_their_arena_are_as_they_are_planned() -> None:
    g = scaled(5000, 2000, 40)
    graph = g.graph()
    tensors = [torch.rand(n) for n in (5000, 2000, 40)]
    assert_equal_runs(graph, tensors)
    plan = schedule(graph, machine=Machine(1))
    expected, got = clones(tensors), clones(tensors)
    run_schedule(graph, plan, expected)
    everywhere = dict.fromkeys(plan.memory.offsets, 0)
    broken = replace(plan, memory=replace(plan.memory, offsets=everywhere))
    run_schedule(graph, broken, got)
    assert not all(map(same_bits, expected, got))

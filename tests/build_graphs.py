"""Build Graphs by hand, without torch, under the conventions of capture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fuseopt.ir.alias import may_share
from fuseopt.ir.columns import columns
from fuseopt.ir.graph import (
    Body,
    Buffer,
    Extern,
    Graph,
    Kernel,
    Literal,
    Row,
    ScalarRef,
    Schedule,
    SchedulerNode,
    Symbol,
    kept,
)
from fuseopt.ir.verifier import check_graph, check_schedule
from fuseopt.lowering.pointwise import (
    STRUCTURAL,
    STRUCTURAL_OPS,
    Number,
    Operand,
    Tensor,
    lower,
)
from fuseopt.lowering.reductions import lower_reduction
from fuseopt.scheduler import schedule

#: An operand: a buffer by its number, a literal, or a scalar of the host.
Arg = int | float | Symbol


def dense(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor whose last dimension is contiguous."""
    stride, step = [], 1
    for n in reversed(shape):
        stride.append(step)
        step *= max(n, 1)
    return tuple(reversed(stride))


class GraphBuilder:
    """Adds buffers and nodes; `graph()` checks and returns what it built.

    Buffers are ints, floats are literals: `g.op("mul", p, 2.0, out=p)`.
    """

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.values: list[int] = []
        self.nodes: list[Row] = []
        self.current: list[int] = []
        self.initial: list[int] = []
        self.outputs: list[int] = []
        self._bodies: dict[object, Body] = {}
        self._folds: dict[object, Body] = {}
        self._literals: dict[str, Literal] = {}
        self._by_storage: dict[int, list[int]] = {}
        self._inputs = 0
        self._calls = 0
        self._externs = 0

    # -------------------------------------------------------------- buffers

    def tensor(
        self,
        name: str,
        shape: Sequence[int] = (4,),
        dtype: str = "f32",
        kind: str = "static",
        device: str = "cpu",
        stride: Sequence[int] | None = None,
        offset: int = 0,
        storage: int | None = None,
    ) -> int:
        index = len(self.buffers)
        self.buffers.append(
            Buffer(
                name,
                dtype,
                tuple(shape),
                dense(shape) if stride is None else tuple(stride),
                offset,
                index if storage is None else storage,
                kind,
                self._inputs if kind in ("static", "arg") else -1,
                device,
            )
        )
        self._by_storage.setdefault(self.buffers[-1].storage, []).append(index)
        self._inputs += kind in ("static", "arg")
        value = -1 if kind == "temp" else self._value(index)
        self.current.append(value)
        self.initial.append(value)
        return index

    def tensors(
        self, name: str, shapes: Sequence[Sequence[int]], dtype: str = "f32"
    ) -> list[int]:
        return [self.tensor(f"{name}{i}", s, dtype) for i, s in enumerate(shapes)]

    def view(self, base: int, name: str, shape: Sequence[int], offset: int = 0) -> int:
        """Another view of an input's memory."""
        b = self.buffers[base]
        return self.tensor(
            name, shape, b.dtype, "view", b.device, None, offset, b.storage
        )

    def like(self, buffer: int, name: str = "") -> int:
        """A temp of a buffer's shape and dtype."""
        b = self.buffers[buffer]
        name = name or f"t{len(self.buffers)}"
        return self.tensor(name, b.shape, b.dtype, "temp", b.device)

    # -------------------------------------------------------------- nodes

    def op(
        self, name: str, *args: Arg, out: int | None = None, call: int | None = None
    ) -> int:
        """One pointwise call. Without `out`, the result is a temp like the first."""
        if out is None:
            out = self.like(next(a for a in args if type(a) is int))
        if call is None:
            call = self._next_call()
        operands: list[Operand] = []
        reads: list[int] = []
        scalars: list[ScalarRef] = []
        for a in args:
            if type(a) is int:
                b = self.buffers[a]
                operands.append(Tensor(b.dtype, b.shape == ()))
                reads.append(self._read(a))
                continue
            ref = a if isinstance(a, Symbol) else self.literal(float(a))
            value = ref.value if isinstance(ref, Literal) else None
            fixed = value in STRUCTURAL or name in STRUCTURAL_OPS
            operands.append(Number(value if fixed else None))
            scalars.append(ref)
        dtype = self.buffers[out].dtype
        body = self._body(name, tuple(operands), dtype)
        self.nodes.append(
            SchedulerNode(
                body,
                tuple(reads),
                tuple(scalars),
                (self._write(out),),
                call,
                f"step.py:{call}",
            )
        )
        return out

    def foreach(
        self,
        name: str,
        first: Sequence[int],
        *rest: Sequence[Arg] | Arg,
        inplace: bool = True,
    ) -> list[int]:
        """One call over lists; an operand that is no list is the same for all."""
        call = self._next_call()
        columns = [
            list(r) if isinstance(r, (list, tuple)) else [r] * len(first) for r in rest
        ]
        return [
            self.op(
                name, x, *(c[i] for c in columns), out=x if inplace else None, call=call
            )
            for i, x in enumerate(first)
        ]

    def reduce(
        self, kind: str, x: int, dims: Sequence[int] | None = None, out: int = -1
    ) -> int:
        """One reduction of a buffer over `dims`, all of them if None."""
        b = self.buffers[x]
        taken = tuple(range(len(b.shape))) if dims is None else tuple(dims)
        body = self._folds.setdefault(
            (kind, b.dtype, dims is None), lower_reduction(kind, b.dtype, dims is None)
        )
        if out < 0:
            dtype = body.writes[0][1]
            name = f"t{len(self.buffers)}"
            out = self.tensor(name, kept(b.shape, taken), dtype, "temp", b.device)
        read = self._read(x)
        call = self._next_call()
        line = f"step.py:{call}"
        write = self._write(out)
        self.nodes.append(SchedulerNode(body, (read,), (), (write,), call, line, taken))
        return out

    def extern(
        self,
        name: str,
        reads: Sequence[int],
        writes: Sequence[int],
        reason: str = "test",
        ordered: bool = False,
    ) -> None:
        got = tuple(self._read(b) for b in reads)
        made = tuple(self._write(b) for b in writes)
        payload = self._externs
        self._externs += 1
        self.nodes.append(
            Extern(name, got, made, payload, reason, "step.py:0", ordered)
        )

    def literal(self, value: float) -> Literal:
        return self._literals.setdefault(repr(value), Literal(value))

    # -------------------------------------------------------------- result

    def graph(self, check: bool = True) -> Graph:
        final = [
            v if b.kind != "temp" and v != first else -1
            for b, v, first in zip(
                self.buffers, self.current, self.initial, strict=True
            )
        ]
        for b in self.outputs:
            final[b] = self.current[b]
        graph = Graph(
            tuple(self.buffers),
            tuple(self.values),
            columns(self.nodes, self.values, self.buffers),
            tuple(self.initial),
            tuple(final),
            tuple(self.outputs),
        )
        if check:
            check_graph(graph)
        return graph

    def _next_call(self) -> int:
        self._calls += 1
        return self._calls

    def _body(self, name: str, operands: tuple[Operand, ...], dtype: str) -> Body:
        key = (name, operands, dtype)
        if key not in self._bodies:
            body = lower(name, operands, dtype, dtype)
            assert body is not None, name
            self._bodies[key] = body
        return self._bodies[key]

    def _value(self, buffer: int) -> int:
        self.values.append(buffer)
        return len(self.values) - 1

    def _read(self, b: int) -> int:
        if self.current[b] < 0:
            self.current[b] = self._value(b)
        return self.current[b]

    def _write(self, b: int) -> int:
        self.current[b] = value = self._value(b)
        own = self.buffers[b]
        for other in self._by_storage[own.storage]:
            if other != b and may_share(self.buffers[other], own):
                self.current[other] = self._value(other)
        return value


def momentum(
    shapes: Sequence[Sequence[int]],
    lr: float = 0.1,
    beta: float = 0.9,
    dtype: str = "f32",
    g: GraphBuilder | None = None,
    name: str = "",
) -> GraphBuilder:
    """`buf = beta * buf + grad; p -= lr * buf`, as foreach calls."""
    g = g or GraphBuilder()
    p = g.tensors(f"{name}p", shapes, dtype)
    buf = g.tensors(f"{name}m", shapes, dtype)
    grad = g.tensors(f"{name}g", shapes, dtype)
    g.foreach("mul_rounded", buf, beta)
    g.foreach("add", buf, grad, 1.0)
    g.foreach("add", p, buf, -lr)
    return g


def adaptive(
    shapes: Sequence[Sequence[int]],
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    dtype: str = "f32",
    g: GraphBuilder | None = None,
    name: str = "",
) -> GraphBuilder:
    """Two moments, a step counter per lane, and bias corrections from it."""
    g = g or GraphBuilder()
    p = g.tensors(f"{name}p", shapes, dtype)
    m = g.tensors(f"{name}m", shapes, dtype)
    v = g.tensors(f"{name}v", shapes, dtype)
    grad = g.tensors(f"{name}g", shapes, dtype)
    steps = g.tensors(f"{name}step", [()] * len(shapes))
    g.foreach("add", steps, 1.0)
    g.foreach("mul_rounded", p, 1 - lr * 0.01)
    g.foreach("lerp", m, grad, 1 - beta1)
    g.foreach("mul_rounded", v, beta2)
    g.foreach("addcmul", v, grad, grad, 1 - beta2)
    call = g._next_call()
    first = [_power(g, beta1, s, call) for s in steps]
    second = [_power(g, beta2, s, call + 1) for s in steps]
    g._next_call()
    for temps in (first, second):
        g.foreach("sub", temps, 1.0)
        g.foreach("neg", temps)
    g.foreach("sqrt", second)
    g.foreach("div", first, lr)
    g.foreach("reciprocal", first)
    g.foreach("neg", first)
    denominator = g.foreach("sqrt", v, inplace=False)
    g.foreach("div", denominator, second)
    g.foreach("add", denominator, eps)
    g.foreach("div", denominator, first)
    g.foreach("addcdiv", p, m, denominator)
    return g


def _power(g: GraphBuilder, base: float, step: int, call: int) -> int:
    return g.op("pow", base, step, out=g.like(step), call=call)


def scaled(*sizes: int) -> GraphBuilder:
    """Each tensor is brought to norm one by way of a temp: two kernels."""
    g = GraphBuilder()
    for n, size in enumerate(sizes):
        p = g.tensor(f"p{n}", (size,))
        update = g.op("mul", p, 0.5)
        ratio = g.op("div", g.reduce("norm2", p), g.reduce("norm2", update))
        g.op("mul", update, ratio, out=update)
        g.op("add", p, update, out=p)
    return g


def planned(g: GraphBuilder) -> tuple[Graph, Schedule]:
    """The checked graph of a builder, and its checked schedule."""
    graph = g.graph()
    plan = schedule(graph)
    check_schedule(graph, plan)
    return graph, plan


def kernels(plan: Schedule) -> list[Kernel]:
    return [s for s in plan.steps if isinstance(s, Kernel)]


def codes(plan: Schedule) -> set[str]:
    """The reasons for which something was not fused."""
    return {r.code for r in plan.refusals}


def opcodes(plan: Schedule) -> Iterator[str]:
    for kernel in kernels(plan):
        for v in kernel.variants:
            yield from (i.op for i in v.instrs)


def same_variant(a: Kernel, b: Kernel) -> bool:
    """Are two kernels the same text: equal but for their lanes?"""
    empty = {"columns": (), "scalars": (), "shapes": (), "nodes": ()}
    return [replace(v, **empty) for v in a.variants] == [
        replace(v, **empty) for v in b.variants
    ]

"""Extend the captured step of models to all lanes of the models.

In the new nodes, each lane of a model has a row in place of the model's row, with its
own buffers, values and numbers. All lanes share whatever belongs to no lane, such as a
tensor learning rate or `1 - beta`. The models' buffers remain, but nothing reads or
writes them; their numbers become NOTHING.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..capture.aten.externs import Call, TensorRef
from ..capture.scalars.device import NumberRef
from ..capture.trace import Captured
from ..errors import CaptureError
from ..ir.expressions import Apply, Arg, Expr, Item, Sym, syms
from ..ir.graph import (
    Buffer,
    Column,
    Extern,
    ForeachSchedulerNode,
    Graph,
    Node,
    ScalarRef,
    SchedulerNode,
    Symbol,
    rows_of,
    span,
)
from .block_numbers import block_sizes, layout_for
from .whole_views import owners_of_views

#: The owner of buffers, rows and numbers that belong to no lane.
COMMON = -1
#: A number that nothing uses.
NOTHING = Apply(float, (1.0,), {})
#: Sizes and strides.
Layout = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Extended:
    """The captured step of all lanes.

    `copies`: (buffer that the step returns, m) -> the buffer of lane m of its model.
    `numbers`: the same for numbers of models. `order`: the tensors of a call, as
    (source in the captured step, COMMON or m). `lane_numbers`: (argument, m) of the
    numbers of lanes that a call passes after all arguments. `owners`, `number_owners`:
    the model of each buffer and number, or COMMON. The owners of `captured` are the
    lanes of all models, one model after the other.
    """

    captured: Captured
    order: tuple[tuple[int, int], ...]
    copies: Mapping[tuple[int, int], int]
    numbers: Mapping[tuple[int, int], int]
    lane_numbers: tuple[tuple[int, int], ...]
    owners: Sequence[int]
    number_owners: Sequence[int]


class _Owners:
    """The model that owns each buffer, row and expression of a step, or COMMON. `rows`:
    those of all nodes, in order; `owners`: the model of each.
    """

    def __init__(
        self, captured: Captured, source: Sequence[int], given: Mapping[int, int]
    ) -> None:
        self.graph = graph = captured.graph
        self.buffers = [COMMON] * len(graph.buffers)
        base: dict[int, int] = {}
        for b, buffer in enumerate(graph.buffers):
            if buffer.kind in ("static", "arg"):
                self.buffers[b] = base[buffer.storage] = source[buffer.source]
            elif buffer.kind == "view":
                self.buffers[b] = base.get(buffer.storage, COMMON)
        self.exprs: list[int] = []
        for expr in captured.graph.numbers:
            if isinstance(expr, Item):
                self.exprs.append(source[expr.position])
            elif isinstance(expr, Arg):
                self.exprs.append(given.get(expr.position, COMMON))
            else:
                operands = [self.exprs[i] for i in syms((expr.args, expr.kwargs))]
                self.exprs.append(self._one(operands, "a number"))
        self.rows = [row for n in graph.nodes for row in rows_of(n)]
        self.owners = [COMMON] * len(self.rows)
        while self._spread():
            pass
        self._own_unused_views()

    def _own_unused_views(self) -> None:
        """Give a view that no call uses the owner of its storage's other buffers."""
        graph = self.graph
        touched = {graph.values[v] for n in self.rows for v in (*n.reads, *n.writes)}
        holders: dict[int, set[int]] = {}
        for b in touched:
            holders.setdefault(graph.buffers[b].storage, set()).add(self.buffers[b])
        for b, buffer in enumerate(graph.buffers):
            owners = holders.get(buffer.storage, ())
            if buffer.kind == "temp" and b not in touched and len(owners) == 1:
                (self.buffers[b],) = owners

    def _spread(self) -> bool:
        """Pass over the rows once more; return True if an owner changed."""
        graph, changed = self.graph, False
        readers: dict[int, set[int]] = {}
        for k, node in enumerate(self.rows):
            written = [graph.values[v] for v in node.writes]
            read = [graph.values[v] for v in node.reads]
            owners = [self.buffers[b] for b in (*read, *written)]
            if isinstance(node, SchedulerNode):
                owners += [
                    self.exprs[s.expr] for s in node.scalars if isinstance(s, Symbol)
                ]
            owner = self._one(owners, node.line)
            if owner != self.owners[k]:
                self.owners[k], changed = owner, True
            for b in written:
                if owner != self.buffers[b]:
                    if graph.buffers[b].kind != "temp":
                        raise CaptureError(
                            f"a lane changes memory that belongs to none\n{node.line}"
                        )
                    self.buffers[b], changed = owner, True
            for b in read:
                readers.setdefault(b, set()).add(owner)
        for b, owner in owners_of_views(graph.buffers, self.buffers, COMMON):
            self.buffers[b], changed = owner, True
        if changed:
            return True
        for b, users in readers.items():
            # a temp that only one model reads belongs to that model
            own_lane = next(iter(users))
            temp = graph.buffers[b].kind == "temp"
            if temp and self.buffers[b] == COMMON != own_lane and len(users) == 1:
                self.buffers[b], changed = own_lane, True
        return changed

    @staticmethod
    def _one(owners: Sequence[int], line: str) -> int:
        lanes = set(owners) - {COMMON}
        if len(lanes) > 1:
            raise CaptureError(f"one call uses tensors of several lanes\n{line}")
        return lanes.pop() if lanes else COMMON


def extend(
    captured: Captured,
    source: Sequence[int],
    led: Mapping[int, int],
    late: frozenset[int],
    layouts: Mapping[int, Sequence[Layout]],
    given: Mapping[int, int],
    n_args: int,
    hollow: frozenset[int] = frozenset(),
) -> Extended:
    """Extend the captured step of models to their lanes.

    `source[s]`: the model of source s, or COMMON. `given[k]`: the model of argument k,
    a number, of `n_args` arguments. `led[model]`: the number of its lanes. `late`: the
    sources whose tensors may change at each call, which come last. `layouts[model]`:
    for lanes of several sizes, the layout of the model's parameter, then of its lanes'
    parameters. `hollow`: sources that are not tensors of a call. Raises CaptureError if
    a call mixes lanes, or if lanes of several sizes have more than arithmetic on
    elements.
    """
    return _Extension(captured, source, led, late, layouts, given, n_args, hollow).run()


class _Extension:
    def __init__(
        self,
        captured: Captured,
        source: Sequence[int],
        led: Mapping[int, int],
        late: frozenset[int],
        layouts: Mapping[int, Sequence[Layout]],
        given: Mapping[int, int],
        n_args: int,
        hollow: frozenset[int],
    ) -> None:
        self.captured = captured
        self.graph = captured.graph
        self.source = source
        self.led = led
        self.owners = _Owners(captured, source, given)
        self.layouts = layouts
        self.n_args = n_args
        self.lane_numbers: list[tuple[int, int]] = []
        self.blocks = block_sizes(captured.graph)
        self._check_layouts()
        order = [(s, COMMON) for s, owner in enumerate(source) if owner == COMMON]
        owned = [(s, x) for s, x in enumerate(source) if s not in hollow]
        order += [(s, m) for s, owner in owned for m in range(self._count(owner))]
        order.sort(key=lambda place: place[0] in late)
        self.order = tuple(order)
        self.statics = sum(s not in late for s, _ in order)
        self.place = {place: k for k, place in enumerate(order)}
        self.buffers: list[Buffer] = []
        self.values = list(self.graph.values)
        self.initial = list(self.graph.initial)
        self.final = list(self.graph.final)
        self.new_buffer: dict[tuple[int, int], int] = {}
        self.new_value: dict[tuple[int, int], int] = {}
        self.calls: list[Call] = list(captured.calls)
        self.numbers: list[Expr] = []
        self.new_expr: dict[tuple[int, int], int] = {}

    def _count(self, owner: int) -> int:
        return 0 if owner == COMMON else self.led[owner]

    def run(self) -> Extended:
        self._copy_buffers()
        self._copy_values()
        self._copy_scalars()
        nodes: list[Node] = []
        owners = iter(self.owners.owners)
        for node in self.graph.nodes:
            if isinstance(node, Extern):
                owner = next(owners)
                nodes += [node] if owner == COMMON else []
                nodes += [self._extern(node, m) for m in range(self._count(owner))]
            else:
                extended = self._node(node, [next(owners) for _ in range(node.rows)])
                nodes += [extended] if extended.rows else []
        owner_of = self.owners.buffers
        outputs = [b for b in self.graph.outputs if owner_of[b] == COMMON]
        copies: dict[tuple[int, int], int] = {}
        for b in self.graph.outputs:
            for m in range(self._count(owner_of[b])):
                copies[b, m] = self.new_buffer[b, m]
                outputs.append(copies[b, m])
        captured = self.captured
        place = self.place
        graph = Graph(
            tuple(self.buffers),
            tuple(self.values),
            tuple(nodes),
            tuple(self.initial),
            tuple(self.final),
            tuple(dict.fromkeys(outputs)),
            tuple(self.numbers),
        )
        twins = [x for x in captured.twins if (x[0], COMMON) in place]
        lanes = [(model, m) for model, n in self.led.items() for m in range(n)]
        number = {lane: k for k, lane in enumerate(lanes)}
        of_lanes = {
            new: number[owner_of[b], m] for (b, m), new in self.new_buffer.items()
        }
        extension = replace(
            captured,
            graph=graph,
            calls=tuple(self.calls),
            statics=tuple(f"static{k}" for k in range(self.statics)),
            tensor_args=tuple(range(len(self.order) - self.statics)),
            twins=tuple((place[a, COMMON], place[b, COMMON]) for a, b in twins),
            owners=of_lanes,
        )
        numbers = self.new_expr
        return Extended(
            extension,
            self.order,
            copies,
            numbers,
            tuple(self.lane_numbers),
            tuple(owner_of),
            tuple(self.owners.exprs),
        )

    # ---------------------------------------------------------------- sizes

    def _check_layouts(self) -> None:
        """Raise CaptureError if a step of lanes of several sizes depends on sizes."""
        graph, owners = self.graph, self.owners
        for node, owner in zip(owners.rows, owners.owners, strict=True):
            if owner not in self.layouts:
                continue
            touched = [graph.values[v] for v in (*node.reads, *node.writes)]
            common = [b for b in touched if owners.buffers[b] == COMMON]
            if (
                isinstance(node, Extern)
                or node.body.reduction
                or any(graph.buffers[b].numel != 1 for b in common)
            ):
                raise CaptureError(
                    f"the step of lanes of several sizes depends on sizes\n{node.line}"
                )
        for k, (b, owner) in enumerate(zip(graph.buffers, owners.buffers, strict=True)):
            if owner in self.layouts and b.numel != 1 and k not in self.blocks:
                if (b.shape, b.stride) != self.layouts[owner][0]:
                    raise CaptureError("lanes of several sizes change their shapes")
                if b.offset and b.kind not in ("static", "arg"):
                    raise CaptureError("lanes of several sizes use parts of tensors")
        for x in graph.outputs if self.layouts else ():
            if owners.buffers[x] == COMMON and graph.buffers[x].shape:
                raise CaptureError("the step returns a tensor that belongs to no lane")

    def _layout(self, k: int, b: Buffer, owner: int, m: int) -> Buffer:
        """Return the model's buffer k, now `b`, with the sizes of its lane m."""
        if owner not in self.layouts or (b.numel == 1 and k not in self.blocks):
            return b
        shape, stride = layout_for(self.layouts[owner][1 + m], self.blocks.get(k, 0))
        return b._replace(shape=shape, stride=stride)

    # ---------------------------------------------------------------- memory

    def _copy_buffers(self) -> None:
        graph, owners = self.graph, self.owners.buffers
        storages = max((b.storage for b in graph.buffers), default=0)
        holders: dict[int, set[int]] = {}  # storage -> the owners of its buffers
        ends: dict[int, int] = {}
        for b, buffer in enumerate(graph.buffers):
            holders.setdefault(buffer.storage, set()).add(owners[b])
            ends[buffer.storage] = max(ends.get(buffer.storage, 0), span(buffer)[1])
        for buffer, owner in zip(graph.buffers, owners, strict=True):
            if owner == COMMON:
                self.buffers.append(self._placed(buffer, COMMON))
            else:
                self.buffers.append(buffer._replace(kind="temp"))
        new_storage: dict[tuple[int, int], int] = {}
        for b, buffer in enumerate(graph.buffers):
            owner = owners[b]
            for m in range(self._count(owner)):
                storage = buffer.storage
                if len(holders[storage]) > 1:
                    # a stack of numbers of several lanes
                    raise CaptureError("lanes share memory inside the step")
                key = (storage, m)
                if key not in new_storage:
                    storages += 1
                    new_storage[key] = storages
                self.new_buffer[b, m] = len(self.buffers)
                copy = self._layout(b, self._placed(buffer, m), owner, m)
                self.buffers.append(copy._replace(storage=new_storage[key]))

    def _placed(self, buffer: Buffer, m: int) -> Buffer:
        if buffer.kind not in ("static", "arg"):
            return buffer
        k = self.place[buffer.source, m]
        kind = "static" if k < self.statics else "arg"
        return buffer._replace(source=k, kind=kind)

    def _copy_values(self) -> None:
        graph, owners = self.graph, self.owners.buffers
        for v, b in enumerate(graph.values):
            for m in range(self._count(owners[b])):
                self.new_value[v, m] = len(self.values)
                self.values.append(self.new_buffer[b, m])
        for b in range(len(graph.buffers)):
            if owners[b] != COMMON:
                self.initial[b] = self.final[b] = -1
            for m in range(self._count(owners[b])):
                for new, old in (
                    (self.initial, graph.initial),
                    (self.final, graph.final),
                ):
                    v = old[b]
                    new.append(-1 if v < 0 else self.new_value[v, m])

    # ---------------------------------------------------------------- numbers

    def _copy_scalars(self) -> None:
        """Write the program of numbers, then a copy of each model's for each lane."""
        numbers, owners, exprs = self.graph.numbers, self.owners.exprs, self.numbers
        for expr, owner in zip(numbers, owners, strict=True):
            moved = isinstance(expr, Item)
            if owner != COMMON:
                exprs.append(NOTHING)
            else:
                exprs.append(self._expr(expr, COMMON) if moved else expr)
        for i, expr in enumerate(numbers):
            for m in range(self._count(owners[i])):
                self.new_expr[i, m] = len(exprs)
                exprs.append(self._expr(expr, m))

    def _expr(self, expr: Expr, m: int) -> Expr:
        if isinstance(expr, Item):
            return Item(self.place[expr.position, m], expr.name if m == COMMON else "")
        if isinstance(expr, Apply):
            args, kwargs = self._mapped(expr.args, m), self._mapped(expr.kwargs, m)
            return Apply(expr.function, args, kwargs)
        self.lane_numbers.append((expr.position, m))
        return Arg(self.n_args + len(self.lane_numbers) - 1, "")

    def _sym(self, index: int, m: int) -> int:
        return self.new_expr.get((index, m), index)

    def _mapped(self, x: Any, m: int) -> Any:
        """Return the arguments of lane m, in place of its model's."""
        if isinstance(x, Sym):
            return Sym(self._sym(x.index, m), x.is_float)
        if isinstance(x, (TensorRef, NumberRef)):
            return x._replace(buffer=self.new_buffer.get((x.buffer, m), x.buffer))
        if type(x) in (list, tuple):
            return type(x)(self._mapped(y, m) for y in x)
        if isinstance(x, dict):
            return {k: self._mapped(v, m) for k, v in x.items()}
        return x

    # ---------------------------------------------------------------- nodes

    def _node(
        self, node: ForeachSchedulerNode, owners: Sequence[int]
    ) -> ForeachSchedulerNode:
        """Return a node with a row for each lane in place of its model's row."""
        rows = [
            (k, m)
            for k, owner in enumerate(owners)
            for m in ((COMMON,) if owner == COMMON else range(self._count(owner)))
        ]
        value = self.new_value

        def column(values: Column) -> Column:
            return tuple([value.get((values[k], m), values[k]) for k, m in rows])

        def scalar(ref: ScalarRef, m: int) -> ScalarRef:
            return Symbol(self._sym(ref.expr, m)) if isinstance(ref, Symbol) else ref

        return node._replace(
            reads=tuple(map(column, node.reads)),
            scalars=tuple(
                [tuple([scalar(c[k], m) for k, m in rows]) for c in node.scalars]
            ),
            writes=tuple(map(column, node.writes)),
            dims=tuple([node.dims[k] for k, _ in rows]) if node.dims else (),
        )

    def _extern(self, node: Extern, m: int) -> Extern:
        """Return the call of lane m, in place of its model's."""
        if node.ordered:
            raise CaptureError(f"{node.name} draws random numbers\n{node.line}")
        call = self.captured.calls[node.payload]
        buffer, value = self.new_buffer, self.new_value
        copy = call._replace(
            args=self._mapped(call.args, m),
            kwargs=self._mapped(call.kwargs, m),
            outputs=tuple(buffer[b, m] for b in call.outputs),
            fresh=frozenset(buffer[b, m] for b in call.fresh),
        )
        self.calls.append(copy)
        return node._replace(
            reads=tuple([value.get((v, m), v) for v in node.reads]),
            writes=tuple([value[v, m] for v in node.writes]),
            payload=len(self.calls) - 1,
        )

"""A captured step of a few lanes, lanes like them -> the captured step of all lanes.

Every row of a node that belongs to a lane gets a twin for each lane that this one
leads, right behind it, with buffers, values and numbers of its own. What belongs to no
lane (a tensor learning rate, `1 - beta`) stays as it is, one for all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ..capture.aten.externs import Call, TensorRef
from ..capture.scalars.device import NumberRef
from ..capture.trace import Captured
from ..errors import CaptureError
from ..ir.expressions import Apply, Expr, Item, Sym, syms
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

#: The owner of what belongs to no lane.
COMMON = -1
#: Sizes and strides.
Layout = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Extended:
    """The captured step of all lanes.

    `copies`: (buffer that the step returns, number of a lane that its lane leads) ->
    buffer. The tensors of a call are those of `order`: (source of the captured few,
    COMMON for its own or the number of the led lane).
    """

    captured: Captured
    order: tuple[tuple[int, int], ...]
    copies: Mapping[tuple[int, int], int]


class _Owners:
    """Which lane owns each buffer, row and expression of a captured step. `rows` are
    those of all nodes, in order, and `owners` has the lane of each.
    """

    def __init__(self, captured: Captured, source: Sequence[int]) -> None:
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
            elif isinstance(expr, Apply):
                known = [self.exprs[i] for i in syms((expr.args, expr.kwargs))]
                self.exprs.append(self._one(known, "a number"))
            else:
                self.exprs.append(COMMON)
        self.rows = [row for n in graph.nodes for row in rows_of(n)]
        self.owners = [COMMON] * len(self.rows)
        while self._spread():
            pass
        self._take_along()

    def _take_along(self) -> None:
        """Views inside the step that no call touches go with those that one does."""
        graph = self.graph
        touched = {graph.values[v] for n in self.rows for v in (*n.reads, *n.writes)}
        holders: dict[int, set[int]] = {}
        for b in touched:
            holders.setdefault(graph.buffers[b].storage, set()).add(self.buffers[b])
        for b, buffer in enumerate(graph.buffers):
            own = holders.get(buffer.storage, ())
            if buffer.kind == "temp" and b not in touched and len(own) == 1:
                (self.buffers[b],) = own

    def _spread(self) -> bool:
        """One more pass over the rows; True if something got another owner."""
        graph, changed = self.graph, False
        readers: dict[int, set[int]] = {}
        for k, node in enumerate(self.rows):
            written = [graph.values[v] for v in node.writes]
            read = [graph.values[v] for v in node.reads]
            own = [self.buffers[b] for b in (*read, *written)]
            if isinstance(node, SchedulerNode):
                own += [
                    self.exprs[s.expr] for s in node.scalars if isinstance(s, Symbol)
                ]
            owner = self._one(own, node.line)
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
        if changed:
            return True
        for b, users in readers.items():
            # memory that one lane alone looks at is its own
            own_lane = next(iter(users))
            temp = graph.buffers[b].kind == "temp"
            if temp and self.buffers[b] == COMMON != own_lane and len(users) == 1:
                self.buffers[b], changed = own_lane, True
        return changed

    @staticmethod
    def _one(owners: Sequence[int], line: str) -> int:
        found = set(owners) - {COMMON}
        if len(found) > 1:
            raise CaptureError(f"one call uses tensors of several lanes\n{line}")
        return found.pop() if found else COMMON


def extend(
    captured: Captured,
    source: Sequence[int],
    led: Mapping[int, int],
    late: frozenset[int],
    layouts: Mapping[int, Sequence[Layout]],
) -> Extended:
    """Extend a captured step to the lanes that its own ones lead.

    `source[s]`: the lane whose tensor source s is, or COMMON. `led[lane]`: how many
    lanes it leads. `late`: the sources that may be other tensors at each call, which
    stand last. `layouts[lane]`: of its parameter and of those that it leads, where
    these are of other sizes. Raises CaptureError where a call mixes lanes, and where
    a lane that leads others of other sizes does more than arithmetic on elements.
    """
    captured = replace(captured, graph=separated(captured.graph))
    return _Extension(captured, source, led, late, layouts).run()


def separated(graph: Graph) -> Graph:
    """The same, where tensors of a call that lie beside each other in one storage, as
    gradients do that one collective has made, each have a storage of their own.

    Whether they overlap is asked before each call, as of any two tensors.
    """
    members: dict[int, list[int]] = {}
    for b, buffer in enumerate(graph.buffers):
        members.setdefault(buffer.storage, []).append(b)
    buffers = list(graph.buffers)
    storages = max(members, default=0)
    for every in members.values():
        for apart in _beside(graph.buffers, every)[1:]:
            storages += 1
            for b in apart:
                buffers[b] = buffers[b]._replace(storage=storages)
    return replace(graph, buffers=tuple(buffers))


def _beside(buffers: Sequence[Buffer], every: Sequence[int]) -> list[list[int]]:
    """The buffers of one storage: each tensor of a call with the views of it. All of
    them in one, where these do not lie beside each other.
    """
    if len(every) == 1:
        return [[*every]]
    spans = {b: span(buffers[b]) for b in every}
    tensors = [b for b in every if buffers[b].kind in ("static", "arg")]
    tensors.sort(key=spans.__getitem__)
    if any(spans[b][0] < spans[a][1] for a, b in pairwise(tensors)):
        return [[*every]]
    found = {b: [b] for b in tensors}
    starts = [spans[b][0] for b in tensors]
    for b in set(every) - set(tensors):
        first, last = spans[b]
        own = tensors[bisect_right(starts, first) - 1] if tensors else b
        if own == b or not (spans[own][0] <= first < last <= spans[own][1]):
            return [[*every]]
        found[own].append(b)
    return [*found.values()]


class _Extension:
    def __init__(
        self,
        captured: Captured,
        source: Sequence[int],
        led: Mapping[int, int],
        late: frozenset[int],
        layouts: Mapping[int, Sequence[Layout]],
    ) -> None:
        self.captured = captured
        self.graph = captured.graph
        self.source = source
        self.led = led
        self.owners = _Owners(captured, source)
        self.layouts = layouts
        self._check_layouts()
        order = [(s, COMMON) for s in range(len(source))]
        order += [(s, m) for s, own in enumerate(source) for m in range(self._led(own))]
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

    def _led(self, owner: int) -> int:
        return 0 if owner == COMMON else self.led[owner]

    def run(self) -> Extended:
        self._copy_buffers()
        self._copy_values()
        self._copy_scalars()
        nodes: list[Node] = []
        owners = iter(self.owners.owners)
        for node in self.graph.nodes:
            if isinstance(node, Extern):
                nodes.append(node)
                nodes += [self._extern(node, m) for m in range(self._led(next(owners)))]
            else:
                nodes.append(self._node(node, [next(owners) for _ in range(node.rows)]))
        outputs = list(self.graph.outputs)
        copies: dict[tuple[int, int], int] = {}
        for b in self.graph.outputs:
            for m in range(self._led(self.owners.buffers[b])):
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
        made = replace(
            captured,
            graph=graph,
            calls=tuple(self.calls),
            statics=tuple(f"static{k}" for k in range(self.statics)),
            tensor_args=tuple(range(len(self.order) - self.statics)),
            twins=tuple(
                (place[a, COMMON], place[b, COMMON]) for a, b in captured.twins
            ),
        )
        return Extended(made, self.order, copies)

    # ---------------------------------------------------------------- sizes

    def _check_layouts(self) -> None:
        """What lanes of several sizes do must mean the same at any size."""
        graph, owners = self.graph, self.owners
        for node, own in zip(owners.rows, owners.owners, strict=True):
            if own not in self.layouts:
                continue
            touched = [graph.values[v] for v in (*node.reads, *node.writes)]
            shared = [b for b in touched if owners.buffers[b] == COMMON]
            if (
                isinstance(node, Extern)
                or node.body.reduction
                or any(graph.buffers[b].numel != 1 for b in shared)
            ):
                raise CaptureError(
                    f"what lanes of several sizes do depends on sizes\n{node.line}"
                )
        for b, own in zip(graph.buffers, owners.buffers, strict=True):
            if own in self.layouts and b.numel != 1:
                if (b.shape, b.stride) != self.layouts[own][0]:
                    raise CaptureError("lanes of several sizes change their shapes")
                if b.offset and b.kind not in ("static", "arg"):
                    raise CaptureError("lanes of several sizes see parts of tensors")
        for x in graph.outputs if self.layouts else ():
            if owners.buffers[x] == COMMON and graph.buffers[x].shape:
                raise CaptureError("the step returns a tensor that belongs to no lane")

    def _layout(self, b: Buffer, own: int, m: int) -> Buffer:
        """A lane's buffer, with the sizes of one that it leads."""
        if own not in self.layouts or b.numel == 1:
            return b
        shape, stride = self.layouts[own][1 + m]
        return b._replace(shape=shape, stride=stride)

    # ---------------------------------------------------------------- memory

    def _copy_buffers(self) -> None:
        graph, owners = self.graph, self.owners.buffers
        storages = max((b.storage for b in graph.buffers), default=0)
        holders: dict[int, set[int]] = {}  # the owners of a storage's buffers
        ends: dict[int, int] = {}
        for b, buffer in enumerate(graph.buffers):
            holders.setdefault(buffer.storage, set()).add(owners[b])
            ends[buffer.storage] = max(ends.get(buffer.storage, 0), span(buffer)[1])
        for buffer in graph.buffers:
            self.buffers.append(self._placed(buffer, COMMON))
        fresh: dict[tuple[int, int], int] = {}
        for b, buffer in enumerate(graph.buffers):
            own = owners[b]
            for m in range(self._led(own)):
                storage = buffer.storage
                if len(holders[storage]) > 1:
                    # a stack of numbers of several lanes
                    raise CaptureError("lanes share memory inside the step")
                key = (storage, m)
                if key not in fresh:
                    storages += 1
                    fresh[key] = storages
                self.new_buffer[b, m] = len(self.buffers)
                copy = self._layout(self._placed(buffer, m), own, m)
                self.buffers.append(copy._replace(storage=fresh[key]))

    def _placed(self, buffer: Buffer, m: int) -> Buffer:
        if buffer.kind not in ("static", "arg"):
            return buffer
        k = self.place[buffer.source, m]
        kind = "static" if k < self.statics else "arg"
        return buffer._replace(source=k, kind=kind)

    def _copy_values(self) -> None:
        graph, owners = self.graph, self.owners.buffers
        for v, b in enumerate(graph.values):
            for m in range(self._led(owners[b])):
                self.new_value[v, m] = len(self.values)
                self.values.append(self.new_buffer[b, m])
        for b in range(len(graph.buffers)):
            for m in range(self._led(owners[b])):
                for now, known in (
                    (self.initial, graph.initial),
                    (self.final, graph.final),
                ):
                    v = known[b]
                    now.append(-1 if v < 0 else self.new_value[v, m])

    # ---------------------------------------------------------------- numbers

    def _copy_scalars(self) -> None:
        """The same program, and behind it the numbers of the lanes that are led."""
        known, owners, exprs = self.graph.numbers, self.owners.exprs, self.numbers
        for expr in known:
            moved = isinstance(expr, Item)
            exprs.append(self._expr(expr, COMMON) if moved else expr)
        for i, expr in enumerate(known):
            for m in range(self._led(owners[i])):
                self.new_expr[i, m] = len(exprs)
                exprs.append(self._expr(expr, m))

    def _expr(self, expr: Expr, m: int) -> Expr:
        if isinstance(expr, Item):
            return Item(self.place[expr.position, m], expr.name if m == COMMON else "")
        if isinstance(expr, Apply):
            args, kwargs = self._mapped(expr.args, m), self._mapped(expr.kwargs, m)
            return Apply(expr.function, args, kwargs)
        return expr

    def _sym(self, index: int, m: int) -> int:
        return self.new_expr.get((index, m), index)

    def _mapped(self, x: Any, m: int) -> Any:
        """Arguments of lane m for those of the one that leads it."""
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
        """A node with the rows of lanes that are led, behind those that lead them."""
        rows = [
            (k, m)
            for k, own in enumerate(owners)
            for m in (COMMON, *range(self._led(own)))
        ]
        value = self.new_value

        def column(known: Column) -> Column:
            return tuple([value.get((known[k], m), known[k]) for k, m in rows])

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
        """The call of a lane that is led."""
        if node.ordered:
            raise CaptureError(f"{node.name} draws random numbers\n{node.line}")
        call = self.captured.calls[node.payload]
        buffer, value = self.new_buffer, self.new_value
        made = Call(
            call.func,
            self._mapped(call.args, m),
            self._mapped(call.kwargs, m),
            tuple(buffer[b, m] for b in call.outputs),
            frozenset(buffer[b, m] for b in call.fresh),
        )
        self.calls.append(made)
        return node._replace(
            reads=tuple([value.get((v, m), v) for v in node.reads]),
            writes=tuple([value[v, m] for v in node.writes]),
            payload=len(self.calls) - 1,
        )

"""Translate a graph on wrapper subclasses into a graph on their inner tensors.

torch.compile requires of a traceable wrapper subclass that its inner calls depend only
on the inner tensors and the context of `__tensor_flatten__`. Contents must not matter.
So fuseopt runs the graph once, call by call, on fake tensors. The calls that reach the
inner tensors are the graph that fuseopt compiles (`capture/fx/inner_calls.py`). At each
call fuseopt compares the class, the context and the sizes; if one differs, it
translates the graph again.

Numbers that change between calls are replaced by recognizable values, which differ from
run to run. All runs must make the same inner calls. Otherwise fuseopt refuses the
graph, and eager runs the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from .. import compat
from ..capture.aten.externs import tensors_in
from ..capture.aten.ops import op_info
from ..capture.fx.inner_calls import InnerCall, InnerCalls, Number, Ref
from ..capture.fx.inputs import static_tensors
from ..capture.fx.patterns import restore
from ..capture.fx.wrappers import Layout, layout_of, take
from ..errors import EagerOnly, FuseoptError
from ..runtime.commit import Pending
from ..runtime.step import CompiledStep

Run = Callable[..., Any]
#: Functions that make a tensor of numbers alone.
CREATIONS = (*compat.MAKE_TENSOR, torch.zeros, torch.ones, torch.full)
#: The scale and the first fraction of the replacement numbers of each run. Code that
#: branches on the size of a number takes another path in one of these runs.
SCALES = (
    (1.0, 0.3819660112501051),
    (-1e4, 0.2360679774997897),
    (1e-6, 0.1458980337503),
)
#: The fraction that separates consecutive replacement numbers, modulo 1.
APART = 0.6180339887498949


class _Kept(NamedTuple):
    """A result that is one of the call's tensors. `place`: its index among them."""

    place: int


class _Made(NamedTuple):
    """A new result with some number of inner tensors. `layout`: None for a plain
    tensor.
    """

    layout: Layout | None
    tensors: int


class _Inside(NamedTuple):
    """A graph whose placeholders are the inner tensors, then numbers.

    `written`: the indices of wrappers that the graph changes. `results`: how the
    graph's outputs, in order, become the results; None for one that is passed through.
    """

    gm: GraphModule
    written: list[int]
    results: Any


def holds_wrappers(gm: GraphModule, args: Sequence[Any]) -> bool:
    """Does a graph have a traceable wrapper subclass among its tensors?"""
    return any(
        compat.is_wrapper(type(t))
        for t in [*static_tensors(gm).values(), *args]
        if isinstance(t, torch.Tensor)
    )


class InnerTensorGraph:
    """A graph on wrapper subclasses, compiled for the inner tensors.

    `compile_(gm, args)` compiles the inner graph. `refused(error, args)` returns a
    function that runs the outer graph if a later call has different wrappers that
    fuseopt refuses. Raises EagerOnly.
    """

    def __init__(
        self,
        gm: GraphModule,
        args: Sequence[Any],
        compile_: Callable[[GraphModule, Sequence[Any]], Run],
        refused: Callable[[EagerOnly, Sequence[Any]], Run],
    ) -> None:
        self.gm = gm
        self.compile, self.refused = compile_, refused
        self.pending: Pending | None = None
        self.places = [k for k, x in enumerate(args) if isinstance(x, torch.Tensor)]
        self.others = [k for k, x in enumerate(args) if not isinstance(x, torch.Tensor)]
        self._make(args)

    def _make(self, args: Sequence[Any]) -> None:
        try:
            self._compile(args)
        except EagerOnly as error:
            tensors = self._tensors(args)
            kinds = {type(t).__name__ for t in tensors if compat.is_wrapper(type(t))}
            names = " and ".join(sorted(kinds))
            raise EagerOnly(
                f"it has wrapper subclasses ({names}), and {error}"
            ) from error

    def _tensors(self, args: Sequence[Any]) -> list[torch.Tensor]:
        own = static_tensors(self.gm).values()
        return [*own, *(args[k] for k in self.places)]

    def _compile(self, args: Sequence[Any]) -> None:
        tensors = self._tensors(args)
        self.layouts = [*map(layout_of, tensors)]
        self.inside = _inside(self.gm, tensors, self.layouts, self.places, args)
        if compat.autocasts():
            _refuse_casts(self.inside.gm)
        leaves = self._leaves(tensors)
        assert leaves is not None
        rest = [args[k] for k in self.others]
        self.run = self.compile(self.inside.gm, [*leaves, *rest])
        self._put_off()

    def put_off_to(self, pending: Pending) -> bool:
        """Defer the step's launch; see CompiledStep."""
        self.pending = pending
        return self._put_off()

    def _put_off(self) -> bool:
        if self.pending is None or not isinstance(self.run, CompiledStep):
            return False
        return self.run.put_off_to(self.pending)

    def forget(self) -> None:
        """Forget the last call; see CompiledStep."""
        if isinstance(self.run, CompiledStep):
            self.run.forget()

    def _leaves(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return the inner tensors; None if the wrappers have changed."""
        leaves: list[torch.Tensor] = []
        for t, layout in zip(tensors, self.layouts, strict=True):
            if not take(t, layout, leaves):
                return None
        return leaves

    def __call__(self, *args: Any) -> Any:
        tensors = self._tensors(args)
        leaves = self._leaves(tensors)
        if leaves is None:
            try:
                self._make(args)
            except EagerOnly as error:
                return self.refused(error, args)(*args)
            leaves = self._leaves(tensors)
            assert leaves is not None
        made = iter(self.run(*leaves, *(args[k] for k in self.others)))
        compat.bump_versions([tensors[k] for k in self.inside.written])

        def result(x: Any) -> Any:
            if isinstance(x, _Kept):
                return tensors[x.place]
            if isinstance(x, _Made):
                if x.layout is None:
                    return next(made)
                return x.layout.make(lambda: next(made))
            if isinstance(x, (list, tuple)):
                return type(x)(map(result, x))
            return next(made) if isinstance(x, Number) else x

        return result(self.inside.results)


def _inside(
    gm: GraphModule,
    tensors: Sequence[torch.Tensor],
    layouts: Sequence[Layout | None],
    places: Sequence[int],
    args: Sequence[Any],
) -> _Inside:
    restore(gm)
    runs = [_Run(gm, tensors, layouts, places, args, *x) for x in SCALES]
    one = runs[0]
    if any(
        one.calls.calls != x.calls.calls or one.results != x.results for x in runs[1:]
    ):
        raise EagerOnly("the inner calls of a wrapper subclass depend on a number")
    numbers = len(args) - len(places)
    graph, nodes = one.calls.graph(one.given, numbers)
    scalars = one.calls.scalars
    graph.output(
        tuple(
            scalars[x.index] if isinstance(x, Number) else nodes[x.index]
            for x in one.outputs
        )
    )
    made = GraphModule(torch.nn.Module(), graph)
    return _Inside(made, one.written, one.results)


def _refuse_casts(gm: GraphModule) -> None:
    """Raise EagerOnly for a cast of an inner tensor.

    Autocast may cache the cast of a wrapper, though the wrapper changes.
    """
    cast = torch.ops.aten._to_copy.default
    for node in gm.graph.find_nodes(op="call_function", target=cast):
        if node.args[0].op in ("placeholder", "get_attr"):
            raise EagerOnly("autocast may cache a cast of their inner tensors")


class _Run:
    """One run of a graph on fake tensors.

    `given`: the number of tensors of the call, with each wrapper's inner tensors
    counted. `outputs`: the outputs of the inner graph.
    """

    def __init__(
        self,
        gm: GraphModule,
        tensors: Sequence[torch.Tensor],
        layouts: Sequence[Layout | None],
        places: Sequence[int],
        args: Sequence[Any],
        scale: float,
        begin: float,
    ) -> None:
        self.scale, self.begin = scale, begin
        self.mode = mode = compat.fake_mode()
        leaves: list[torch.Tensor] = []
        for t, layout in zip(tensors, layouts, strict=True):
            take(t, layout, leaves)
        hollow = [mode.from_tensor(t.detach()) for t in leaves]
        if len({*map(id, hollow)}) < len(hollow):
            raise EagerOnly("two wrapper subclasses hold the same tensor")
        self.given = len(hollow)
        following = iter(hollow)
        self.stand_ins = [
            next(following) if layout is None else layout.make(lambda: next(following))
            for layout in layouts
        ]
        self.calls = InnerCalls(hollow)
        # computed numbers, by their function and arguments
        self.same: dict[Any, int] = {}
        self.env: dict[Node, Any] = {}
        #: for each node that is a changing number: its index, and its first value
        self.number_of: dict[Node, int] = {}
        self.hints: dict[Node, Any] = {}
        before = [t._version for t in self.stand_ins]
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            self._enter(gm, places, args)
            for node in gm.graph.nodes:
                if node.op.startswith("call"):
                    self._call(node)
        self.written = [
            k
            for k, (t, version) in enumerate(zip(self.stand_ins, before, strict=True))
            if layouts[k] is not None and t._version != version
        ]
        self._check(layouts, hollow)
        self.outputs: list[Ref | Number] = []
        (result,) = gm.graph.find_nodes(op="output")
        self.results = self._result(result.args[0])

    def _enter(
        self, gm: GraphModule, places: Sequence[int], args: Sequence[Any]
    ) -> None:
        names = [*static_tensors(gm)]
        statics = dict(zip(names, self.stand_ins, strict=False))
        for node in gm.graph.find_nodes(op="get_attr"):
            if str(node.target) not in statics:
                raise EagerOnly(f"the graph has an unknown constant ({node.target})")
            self.env[node] = statics[str(node.target)]
        at = {k: i + len(names) for i, k in enumerate(places)}
        for k, node in enumerate(gm.graph.find_nodes(op="placeholder")):
            if k in at:
                self.env[node] = self.stand_ins[at[k]]
            else:
                self._number(node, compat.hint_of(args[k]))

    def _number(self, node: Node, hint: Any) -> int:
        """Register a number that changes between calls, and its replacement."""
        if isinstance(hint, bool) or not isinstance(hint, (int, float)):
            raise EagerOnly(f"{node.target} is a {type(hint).__name__}")
        k = len(self.calls.values)
        other = (self.begin + k * APART) % 1
        if isinstance(hint, int):
            other = (1 << 20) + (k << 10) + int(other * (1 << 10))
        else:
            other = self.scale * (other + 1 / 64)
        self.hints[node], self.env[node] = hint, other
        self.number_of[node] = self.calls.number(other)
        return self.number_of[node]

    # ---------------------------------------------------------------- calls

    def _call(self, node: Node) -> None:
        if node.target is compat.GRAD_SWITCH:
            return
        args, kwargs = self._map(node.args), self._map(node.kwargs)
        given = tensors_in((args, [*kwargs.values()]))
        moves = any(x in self.number_of for x in node.all_input_nodes)
        try:
            if node.op == "call_method" and node.target == "item":
                self._item(node, args[0])
            elif node.target in CREATIONS:
                self._constant(node, args, kwargs)
            elif moves and not given:
                self._compute(node)
            elif not given:
                raise EagerOnly(f"the graph calls {node.target} without a tensor")
            else:
                with self.calls:
                    self.env[node] = self._run(node, args, kwargs)
        except FuseoptError:
            raise
        except Exception as error:
            text = str(error).partition("\n")[0]
            raise EagerOnly(
                f"{node.target} of wrapper subclasses cannot be recorded: "
                f"{type(error).__name__}: {text}"
            ) from error

    @staticmethod
    def _run(node: Node, args: Any, kwargs: Any) -> Any:
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.op == "call_module":
            raise EagerOnly(f"the graph calls a module ({node.target})")
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _item(self, node: Node, t: torch.Tensor) -> None:
        """Record a number that is read from a plain tensor."""
        if id(t) not in self.calls.index:
            raise EagerOnly("a number is read from a wrapper subclass")
        place = self._number(node, 2.0 if t.is_floating_point() else 2)
        call = InnerCall("item", (self.calls.noted(t),), {}, number=place)
        self.calls.calls.append(call)

    def _constant(self, node: Node, args: Any, kwargs: Any) -> None:
        """Record a tensor that is made of numbers alone."""
        noted = self.calls.noted(args), self.calls.noted(kwargs)
        made = self.mode.from_tensor(self._run(node, args, kwargs))
        self.env[node] = made
        self.calls.make(node.target, *noted, made)

    def _compute(self, node: Node) -> None:
        """Record a number that is computed from other numbers alone."""
        if node.op != "call_function":
            raise EagerOnly(f"method {node.target} of a number")

        def of(x: Any, known: dict[Node, Any]) -> Any:
            if isinstance(x, Node):
                return known[x] if x in known else self.env[x]
            if isinstance(x, (list, tuple)):
                return type(x)(of(y, known) for y in x)
            return x

        places = {x: Number(k) for x, k in self.number_of.items()}
        names = [*node.kwargs]
        args, hints = (
            (of(node.args, x), of([*node.kwargs.values()], x))
            for x in (places, self.hints)
        )
        own = args[0], dict(zip(names, args[1], strict=True))
        hint = self._run(node, hints[0], dict(zip(names, hints[1], strict=True)))
        key = node.target, repr(own)
        if key in self.same:
            self.hints[node] = hint
            self.number_of[node] = self.same[key]
            self.env[node] = self.calls.values[self.same[key]]
            return
        place = self.same[key] = self._number(node, hint)
        self.calls.calls.append(InnerCall(node.target, *own, number=place))

    def _map(self, x: Any) -> Any:
        if isinstance(x, Node):
            return self.env[x]
        if isinstance(x, (list, tuple)):
            return type(x)(map(self._map, x))
        if isinstance(x, dict):
            return {k: self._map(v) for k, v in x.items()}
        if isinstance(x, slice):
            return slice(self._map(x.start), self._map(x.stop), self._map(x.step))
        return x

    # ---------------------------------------------------------------- afterwards

    def _check(
        self, layouts: Sequence[Layout | None], hollow: Sequence[torch.Tensor]
    ) -> None:
        """Raise EagerOnly if wrappers hold other tensors than before, or for random
        calls.
        """
        now: list[torch.Tensor] = []
        for t, layout in zip(self.stand_ins, layouts, strict=True):
            if not take(t, layout, now):
                raise EagerOnly(f"the step makes another {type(t).__name__} of one")
        if [*map(id, now)] != [*map(id, hollow)]:
            raise EagerOnly("a wrapper subclass holds new tensors after the step")
        for call in self.calls.calls:
            if (
                isinstance(call.func, compat.OVERLOAD)
                and op_info(call.func).schema.seeded
            ):
                raise EagerOnly(f"{call.func} draws random numbers")

    def _result(self, x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(map(self._result, x))
        if not isinstance(x, Node):
            return x
        if x in self.number_of:
            self.outputs.append(Number(self.number_of[x]))
            return self.outputs[-1]
        value = self.env[x]
        if isinstance(value, (list, tuple)):
            raise EagerOnly("the graph returns a list")
        if not isinstance(value, torch.Tensor):
            return value
        for k, t in enumerate(self.stand_ins):
            if value is t:
                return _Kept(k)
        layout = layout_of(value)
        leaves: list[torch.Tensor] = []
        take(value, layout, leaves)
        for t in leaves:
            if id(t) not in self.calls.index:
                raise EagerOnly("the step returns a new tensor")
            self.outputs.append(Ref(self.calls.index[id(t)]))
        return _Made(layout, len(leaves))

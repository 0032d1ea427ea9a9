"""Run a step's real Python once, and record what it calls as an FX graph.

A mode of torch's for functions sees each call of torch's API, each read and write of an
attribute of a tensor. Nothing is computed: the result of a call is a tensor of the
right layout, without contents, and a node of the graph. All lanes are recorded.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.overrides import TorchFunctionMode

from fuseopt.compat.symbol_uses import ARITHMETIC, FIRST_ONLY, VALUES

from . import layouts, small
from .held import TENSORS
from .numbers import Expr, FloatNumber, IntNumber, Number, Refused, evaluate, is_number

HERE = __file__.rpartition("/")[0]
_MISSING = object()


class Recording(TorchFunctionMode):
    """One recording. `outcomes`: expressions that must have these values again."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = Graph()
        self.anchor = Node(self.graph, "end", "output", "output", ((),), {})
        self.graph._root.prepend(self.anchor)
        self.first: Node | None = None  # placeholders come before it
        #: of each placeholder: its place, or the number's expression
        self.inputs: list[int | Expr] = []
        self.outcomes: list[tuple[Expr, Any]] = []
        self.made = 0
        self.calls = 0
        self.held: Any = None
        self.leaves: list[Any] = []
        self.place: dict[int, int] = {}
        self.nodes: dict[int, Node] = {}  # of tensors, by id
        self.layout: dict[int, int] = {}
        self.alive: list[Any] = []
        self.layouts = layouts.Layouts()
        self.log = small.Log()
        self.profile: Any = None
        self._numbers: dict[Any, Any] = {}
        self._now: dict[Any, Any] = {}  # of symbols and expressions, in this call
        self._items: dict[Any, Any] = {}
        self._asked: set[Any] = set()
        self._kinds: dict[Any, Any] = {}
        self._lines: dict[Any, str] = {}
        self._ours: dict[Any, bool] = {}
        self._settled: dict[Any, Any] = {}

    def take(self, held: Any) -> None:
        """The tensors and numbers that are there before the step."""
        self.held, self.leaves, self.place = held, held.leaves, held.place

    # ---------------------------------------------------------------- nodes

    def node(self, op: str, target: Any, args: Any, kwargs: Any) -> Node:
        """Append a node."""
        self.made += 1
        new = Node(self.graph, f"n{self.made}", op, target, args, kwargs)
        new.meta["stack_trace"] = self._line()
        self.anchor.prepend(new)
        if self.first is None:
            self.first = new
        return new

    def _input(self, place: int | Expr, name: str) -> Node:
        new = Node(self.graph, name, "placeholder", name, (), {})
        (self.first or self.anchor).prepend(new)
        self.inputs.append(place)
        return new

    def _line(self) -> str:
        frame: Any = sys._getframe(2)
        while (ours := self._ours.get(frame.f_code)) is not False:
            if ours is None:
                code = frame.f_code
                self._ours[code] = code.co_filename.startswith(HERE)
                continue
            frame = frame.f_back
        key = frame.f_code, frame.f_lineno
        line = self._lines.get(key)
        if line is None:
            code = frame.f_code
            line = self._lines[key] = (
                f'  File "{code.co_filename}", line {frame.f_lineno}, '
                f"in {code.co_name}\n    {frame.f_lineno}"
            )
        return line

    def node_of(self, t: Any) -> Node:
        """The node of a tensor. Raises Refused for one that belongs to nobody."""
        node = self.nodes.get(id(t))
        if node is None:
            place = self.place.get(id(t))
            if place is None:
                raise Refused("the step uses a tensor that the optimizer does not hold")
            node = self.nodes[id(t)] = self._input(place, f"t{place}")
            self.log.leaf(t, place, self.held.names.get(place))
        return node

    def know(self, t: Any, node: Node, layout: int) -> None:
        """A call has made a tensor."""
        self.nodes[id(t)] = node
        self.layout[id(t)] = layout
        self.alive.append(t)

    def layout_of(self, t: Any) -> int:
        """The number of a tensor's layout."""
        found = self.layout.get(id(t))
        if found is None:
            found = self.layout[id(t)] = self.layouts.number(t)
            self.alive.append(t)
        return found

    # ---------------------------------------------------------------- numbers

    def number(self, value: Any, place: int) -> Any:
        """The number at a place of the optimizer's."""
        kind = FloatNumber if type(value) is float else IntNumber
        return kind(
            self, value, Expr(leaf=place), lambda: self._input(place, f"x{place}")
        )

    def item(self, t: Any) -> Any:
        """The number that is read from a tensor; of equal contents it is one."""
        symbol = self.log.symbols.get(id(t))
        known = self._items.get(symbol)
        if known is not None:
            return known
        kind = FloatNumber if t.is_floating_point() else IntNumber
        if symbol is None:
            node = self.node("call_method", "item", (self.node_of(t),), {})
            return kind(self, None, Expr(function=_nobody), lambda: node)
        expr = Expr(item=symbol)
        number = kind(self, None, expr, lambda: self._input(expr, f"i{symbol}"))
        self._items[symbol] = number
        return number

    def apply(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """A function of numbers: another number."""
        key: list[Any] = [function]
        for x in args:
            if is_number(x):
                key.append(id(x))
            elif type(x) in (int, float, bool):
                key.append((type(x), repr(x)))
            else:
                raise Refused(f"it computes {function} of a {type(x).__name__}")
        known = self._numbers.get(tuple(key))
        if known is not None:
            return known[0]
        unknown = any(is_number(x) and x._value is None for x in args)
        value: Any = None
        if unknown:
            kinds = [_dummy(x) for x in args]
            try:
                result_type = type(function(*kinds))
            except (ArithmeticError, ValueError) as error:
                raise Refused(f"{function} of a number: {error}") from error
        else:
            value = function(*(x.value if is_number(x) else x for x in args))
            result_type = type(value)
        if result_type not in (int, float):
            raise Refused(f"{function} of a number gives a {result_type.__name__}")

        def make() -> Node:
            operands = tuple([x.fx if is_number(x) else x for x in args])
            return self.node("call_function", function, operands, {})

        expr = Expr(
            function=function, args=[x.expr if is_number(x) else x for x in args]
        )
        kind = FloatNumber if result_type is float else IntNumber
        new = kind(self, value, expr, make)
        self._numbers[tuple(key)] = new, args  # keep the ids of args
        return new

    def value_of(self, expr: Expr) -> Any:
        """The value now of a number that was read from tensors."""
        known = self._now
        return evaluate(
            expr, self.leaves, lambda s: self.log.item(s, self.leaves, known), known
        )

    def outcome(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """What a question about numbers gives now, which must be so at later calls."""
        values = [x.value if is_number(x) else x for x in args]
        answer = function(*values)
        key = (
            function,
            *[id(x) if is_number(x) else (type(x), repr(x)) for x in args],
        )
        if key not in self._asked:
            self._asked.add(key)
            exprs = [x.expr if is_number(x) else x for x in args]
            self.outcomes.append((Expr(function=function, args=exprs), answer))
            self.alive.append(args)
        return answer

    def fixed(self, number: Number) -> Any:
        """The value of a number, which must be so at later calls."""
        value = number.value
        if id(number) not in self._settled:
            self._settled[id(number)] = number
            self.outcomes.append((number.expr, value))
        return value

    # ---------------------------------------------------------------- calls

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        profile = self.profile
        if profile is not None:
            sys.setprofile(None)
        try:
            self.calls += 1
            kind = self._kinds.get(func)
            if kind is None:
                kind = self._kinds[func] = layouts.kind_of(func)
            return self._call(kind, func, args, kwargs or {})
        finally:
            if profile is not None:
                sys.setprofile(profile)

    def _call(self, kind: Any, func: Any, args: Any, kwargs: Any) -> Any:
        what, name = kind
        if what == "fact" or what == "switch":
            return func(*args, **kwargs)
        if what == "grad":
            (t,) = args
            if id(t) not in self.place:
                return None
            return t.grad
        if what == "read":
            return self._read(name, args[0])
        if what == "data":
            return self._record("detach", func, args, kwargs, "method")
        if what == "view":
            return self._record("getattr", getattr, (*args, name), {}, "function")
        if what == "refused":
            raise Refused(f"it calls {name} of a tensor")
        return self._record(name, func, args, kwargs, what)

    def _read(self, name: str, t: Any) -> Any:
        """A number, or the truth, of a tensor."""
        self.node_of(t)
        if t.dtype.is_complex:
            raise Refused("it reads a complex number")
        if t.dtype is torch.bool and name == "item":
            raise Refused("it reads a bool from a tensor")
        if t.dtype is torch.bool:
            raise Refused("it branches on contents of a tensor")
        number = self.item(t)
        if name == "item":
            return number
        if name == "__bool__":
            return bool(self.outcome(bool, (number,)))
        value = self.fixed(number)
        return {"__float__": float, "__int__": int, "__index__": operator.index}[name](
            value
        )

    def _record(self, name: str, func: Any, args: Any, kwargs: Any, method: str) -> Any:
        tensors: list[Any] = []
        numbers = False

        def look(x: Any) -> Any:
            """An argument, as nodes; its part of the key of the result's layout."""
            nonlocal numbers
            kind = type(x)
            if kind in TENSORS:
                tensors.append(x)
                node = self.nodes.get(id(x))
                return node or self.node_of(x), self.layout_of(x)
            if kind is FloatNumber or kind is IntNumber:
                numbers = True
                return x, kind
            if kind is list or kind is tuple:
                if not x:
                    return x, kind
                nodes, keys = zip(*[look(y) for y in x], strict=True)
                return kind(nodes), (kind, keys)
            if kind is float:
                return x, kind
            if isinstance(x, torch.Tensor):
                raise Refused(f"it uses a {kind.__name__}")
            if kind is torch.Size:
                return x, (kind, tuple(x))
            if kind is slice:
                nodes, keys = zip(
                    *[look(y) for y in (x.start, x.stop, x.step)], strict=True
                )
                return slice(*nodes), (kind, keys)
            if kind not in layouts.PLAIN:
                raise Refused(f"it gives {name} a {kind.__name__}")
            return x, (kind, x)

        given = [look(x) for x in args]
        named = {k: look(x) for k, x in kwargs.items()}
        made_anew = name == "detach" or name.endswith("_like") or name[:4] == "new_"
        if torch.is_grad_enabled() and not made_anew:
            if any(t.requires_grad for t in tensors):
                raise Refused("it records gradients")
        operands = tuple([x for x, _ in given])
        keywords = {k: x for k, (x, _) in named.items()}
        if numbers:
            operands, keywords = self._settle(name, operands, keywords)
        if method == "method":
            node = self.node("call_method", name, operands, keywords)
        else:
            target = layouts.operator_of(name, func)
            node = self.node("call_function", target, operands, keywords)
        if method == "method" and name[-1] == "_" and name[-2] != "_":
            result = args[0]
            self.nodes[id(result)] = node
        else:
            key = (func, name, *[k for _, k in given])
            key += tuple([(k, v) for k, (_, v) in named.items()])
            run = torch.Tensor.detach if name == "detach" else func
            result = self.layouts.result(key, run, args, kwargs)
            result = self._results(result, node, args, kwargs)
        if self.log.symbols or not tensors:
            self.log.call(name, func, args, kwargs, result, tensors)
        return result

    def _results(self, how: Any, node: Node, args: Any, kwargs: Any) -> Any:
        """Tensors for what the layout of a result says."""
        kind, what = how
        if kind == "given":
            result = layouts.flat((args, kwargs))[what]
            self.nodes[id(result)] = node
            return result
        if kind == "tensor":
            result = self.layouts.make(what)
            self.know(result, node, what)
            return result
        if kind == "many":
            results = []
            every = layouts.flat((args, kwargs))
            for i, inner in enumerate(what[1]):
                if inner[0] == "given":
                    results.append(every[inner[1]])
                elif inner[0] == "tensor":
                    part = self.node("call_function", operator.getitem, (node, i), {})
                    results.append(self._results(inner, part, args, kwargs))
                else:
                    results.append(self._results(inner, node, args, kwargs))
            return what[0](results)
        return what

    def _settle(self, name: str, operands: Any, keywords: Any) -> tuple[Any, Any]:
        """Numbers are nodes where arithmetic has operands, and values elsewhere."""
        name = name.removeprefix("_foreach_").strip("_")
        if name[:1] in "ri" and name[1:] in ARITHMETIC:
            name = name[1:]

        def node(x: Any) -> Any:
            if is_number(x):
                return x.fx
            return type(x)(map(node, x)) if type(x) in (list, tuple) else x

        def value(x: Any) -> Any:
            if is_number(x):
                return x.fix()
            if type(x) is slice:
                return slice(value(x.start), value(x.stop), value(x.step))
            return type(x)(map(value, x)) if type(x) in (list, tuple) else x

        if name in VALUES:
            place, key = VALUES[name]
            return tuple(
                [node(x) if i == place else value(x) for i, x in enumerate(operands)]
            ), {k: node(x) if k == key else value(x) for k, x in keywords.items()}
        if name in FIRST_ONLY or name == "rpow":
            first = node(operands[0])
            return (first, *map(value, operands[1:])), {
                k: value(x) for k, x in keywords.items()
            }
        use = node if name in ARITHMETIC else value
        return tuple(map(use, operands)), {k: use(x) for k, x in keywords.items()}

    # ---------------------------------------------------------------- the end

    def close(self, outputs: list[Any]) -> None:
        """End the graph: it returns these tensors."""
        self.anchor.args = (tuple([self.nodes[id(t)] for t in outputs]),)

    def release(self) -> None:
        """Let go of all that only a recording that goes on needs."""
        self.__dict__.clear()


def _nobody() -> Any:
    raise Refused("it branches on contents of a tensor")


def _dummy(x: Any) -> Any:
    """A number of the type of an operand, where its value is not known."""
    if not is_number(x):
        return x
    if x._value is not None:
        return x._value
    return 1.5 if x.is_float else 2

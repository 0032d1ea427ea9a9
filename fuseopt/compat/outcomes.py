"""Evaluate symbolic numbers in a trace as Python does, and guard the result.

A step branches on its numbers (`if lr == 0`, `step % 10`), and uses some directly (in a
text, as the exponent of a tensor). Dynamo evaluates formulas of real numbers, which it
simplifies: `(lr + 1) - 1 == 0` is then no longer a comparison of floats. Here Python
computes the result from the present numbers, in the order of the step. The guard
computes it again at each call. So one compilation serves all numbers with the same
results.

Relies on what Dynamo records at the nodes of its graph.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from .counters import is_counted
from .hooks import add_lambda, found_at, guard_again, guard_here, name_of
from .names import find
from .tracing import tracing


def in_range(item: Any, *bounds: int) -> bool:
    """Does a range hold a number?"""
    return item in range(*bounds)


#: Modules whose functions are deterministic.
HOMES = ("_operator", "operator", "math", "builtins")
#: Dynamo's replacements of Python's own functions.
WRITTEN: dict[Any, Callable[..., Any]] = {
    torch.sym_not: operator.not_,
    torch.sym_float: float,
    torch.sym_int: int,
    torch.sym_max: torch.sym_max,
    torch.sym_min: torch.sym_min,
    in_range: in_range,
    **{
        function: getattr(math, name)
        for name in (
            *("sqrt", "cos", "cosh", "sin", "sinh", "tan", "tanh", "asin", "acos"),
            *("atan", "log2"),
        )
        if (function := find("torch:_sym_" + name, None)) is not None
    },
}
#: The same number, as a node's value or as an argument.
Number = int | float | bool
NUMBERS = (int, float, bool)
KNOWN = "fuseopt_number"
#: The types of a number that is a symbol.
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Unknown(Exception):
    """A node is no number that follows from numbers of the host."""


def source_of(node: Node) -> Any:
    """Return the source of a number of the host that is a node; None if it is none."""
    if node.op == "call_method" and node.target == "item":
        (node, *more) = node.args  # type: ignore[assignment]
        graph_arg = node.meta.get("grapharg") if isinstance(node, Node) else None
        as_tensor = getattr(graph_arg, "pass_arg_as_tensor", False)
        return graph_arg.source if as_tensor and not more else None  # type: ignore[union-attr]
    if node.op != "placeholder":
        return None
    graph_arg = node.meta.get("grapharg")
    symbolic = isinstance(
        node.meta.get("example_value"), (torch.SymInt, torch.SymFloat)
    )
    return getattr(graph_arg, "source", None) if symbolic else None


def function_of(node: Node) -> Callable[..., Any] | None:
    """Return the function of numbers that a node calls, as in Python."""
    target: Any = node.target
    if node.op == "call_method":
        named = isinstance(target, str) and target.startswith("__")
        return getattr(operator, target, None) if named else None
    if node.op != "call_function":
        return None
    if target in WRITTEN:
        return WRITTEN[target]
    home = getattr(target, "__module__", None)
    return target if home in HOMES else None


def number_of(tx: Any, x: Any) -> Number:
    """Return the value of a node or argument in this call. Raises Unknown."""
    if not isinstance(x, Node):
        if type(x) in NUMBERS:
            return x  # type: ignore[no-any-return]
        raise Unknown
    if KNOWN not in x.meta:
        x.meta[KNOWN] = _number_of(tx, x)
    number = x.meta[KNOWN]
    if number is Unknown:
        raise Unknown
    return number  # type: ignore[no-any-return]


def _number_of(tx: Any, node: Node) -> Any:
    source = source_of(node)
    if source is not None:
        value = found_at(tx, source)
        return value if type(value) in NUMBERS else Unknown
    function = function_of(node)
    if function is None:
        return Unknown
    try:
        args = [_argument(tx, x) for x in node.args]
        kwargs = {k: _argument(tx, x) for k, x in node.kwargs.items()}
        value = function(*args, **kwargs)
    except Exception:  # the step raises it, if it gets there
        return Unknown
    return value if type(value) in NUMBERS else Unknown


def _argument(tx: Any, x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return type(x)(_argument(tx, y) for y in x)
    return number_of(tx, x)


# ---------------------------------------------------------------- guards


class _Condition:
    """Condition that a number computed from others keeps its value."""

    def __init__(self, node: Node) -> None:
        self.sources: dict[str, Any] = {}
        self.names: dict[str, Any] = {}
        self.lines: list[str] = []
        self._done: dict[Node, str] = {}
        self.result = self._text(node)

    def _text(self, x: Any) -> str:
        if isinstance(x, (list, tuple)):
            inside = "".join(f"{self._text(y)}, " for y in x)
            return f"({inside})" if isinstance(x, tuple) else f"[{inside}]"
        if not isinstance(x, Node):
            return self._named(x)
        if x not in self._done:
            self._done[x] = self._node(x)
        return self._done[x]

    def _node(self, node: Node) -> str:
        source = source_of(node)
        if source is not None:
            name = name_of(source)
            self.sources[name] = source
            return f"s{[*self.sources].index(name)}"
        given = [self._text(x) for x in node.args]
        given += [f"{k}={self._text(x)}" for k, x in node.kwargs.items()]
        name = f"n{len(self.lines)}"
        function = self._named(function_of(node))
        self.lines.append(f"    {name} = {function}({', '.join(given)})")
        return name

    def _named(self, x: Any) -> str:
        if type(x) in (int, bool):
            return repr(x)
        name = f"c{len(self.names)}"
        self.names[name] = x
        return name

    def key(self) -> tuple[Any, ...]:
        """Return a key, equal for equal conditions on the same sources."""
        names = [
            (k, type(x), repr(x)) if isinstance(x, (int, float)) else (k, id(x))
            for k, x in self.names.items()
        ]
        return *self.sources, *self.lines, self.result, *names

    def function(self, value: Number, read: Callable[[Number], Number]) -> Any:
        """Return a function that tests whether the number of the sources reads as
        `value`.
        """
        given = ", ".join(f"s{i}" for i in range(len(self.sources)))
        # equal, of one type, and zeros of one sign
        same = f"type(x) is kind and x == {self._named(value)}"
        if type(value) is float and value == 0:
            same += f" and copysign(1, x) == {math.copysign(1, value)}"
        text = "\n".join(
            [
                f"def holds({given}):",
                "    try:",
                *(f"    {line}" for line in self.lines),
                f"        x = read({self.result})",
                f"        return {same}",
                "    except Exception:",
                "        return False  # it is for the step to raise it",
            ]
        )
        more = {"kind": type(value), "read": read, "copysign": math.copysign}
        names: dict[str, Any] = {**self.names, **more}
        exec(compile(text, "<a branch of a step>", "exec"), names)
        return names["holds"]


def _itself(x: Number) -> Number:
    return x


def guard_number(
    tx: Any, node: Node, read: Callable[[Number], Number] = _itself
) -> Number:
    """Return the value of a node in this call, and guard it.

    `read`: the property of the number that the step uses. Raises Unknown if the number
    does not follow from numbers of the host.
    """
    value = read(number_of(tx, node))
    condition = _Condition(node)
    if not condition.sources:
        return value
    # each iteration of a loop has a separate node; the condition is kept, so that the
    # ids in its key stay valid
    guarded = vars(tx.output).setdefault("fuseopt_numbers", {})
    key = read, type(value), repr(value), *condition.key()
    if key in guarded:
        guard_again(guarded[key][0])
        return value
    holds = condition.function(value, read)
    names, sources = [*condition.sources], [*condition.sources.values()]
    for name, source in condition.sources.items():
        tracing.restricted |= is_counted(found_at(tx, source), name)
    what = f"{node.target} of {', '.join(names)} is {value}"

    def create(builder: Any, guard: Any) -> None:
        if len(sources) == 1:
            manager = builder.get_guard_manager(guard)
            add_lambda(manager, holds, [what], guard.user_stack)
            return
        text = f"({', '.join(names)},)"
        values_of = compile(text, "<numbers of a step>", "eval")
        scope = builder.scope["G"]

        def all_hold(local: Any) -> bool:
            try:
                return bool(holds(*eval(values_of, {"L": local, "G": scope})))
            except Exception:
                return False  # one of them is no longer there

        root = builder.guard_manager.root
        add_lambda(root, all_hold, [what], guard.user_stack)

    guarded[key] = guard_here(sources[0], create), condition
    return value


# ---------------------------------------------------------------- for the trace


def constant_of(value: Any) -> Any:
    """Return Dynamo's variable of a constant."""
    return find("torch._dynamo.variables.constant:ConstantVariable").create(value)


def settled(tx: Any, value: Any) -> Any:
    """Return a guarded constant for a number of the host in a variable, else None."""
    node = node_of(value)
    if node is None:
        return None
    try:
        return constant_of(guard_number(tx, node))
    except Unknown:
        return None


def truth(tx: Any, value: Any) -> bool | None:
    """Return the truth of a number of the host, guarded, for a branch; else None."""
    node = node_of(value)
    if node is None:
        return None
    try:
        return bool(guard_number(tx, node, bool))
    except Unknown:
        return None


def is_among(tx: Any, item: Any, items: Any, is_range: bool = False) -> Any:
    """Return a guarded constant, whether a list holds a number; None if uncertain.

    With `is_range`, `items` are the bounds of a range.
    """
    try:
        listed = [x.as_proxy() for x in items]
        number = item.as_proxy()
        args = (number, *listed) if is_range else (listed, number)
        function: Any = in_range if is_range else operator.contains
        proxy = tx.output.create_proxy("call_function", function, args, {})
        answer = guard_number(tx, proxy.node)
    except (Unknown, NotImplementedError):
        return None
    tx.output.remove_node(proxy.node)
    return constant_of(answer)


def node_of(value: Any) -> Node | None:
    """Return the node of a variable of Dynamo that is a symbol, else None."""
    number = getattr(value, "sym_num", None)
    if not isinstance(number, SYMBOLS):
        return None
    node: Node = value.as_proxy().node
    return node

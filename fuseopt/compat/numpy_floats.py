"""Follow a number of type numpy.float64 through a trace as the float that it equals.

numpy.float64 is a subclass of float with different operators. Its sum, difference,
product, negation and comparison agree with float to the bit. Where torch reads a
number, it treats numpy.float64 as a float. The rest differs: a quotient by zero is
infinite, and `//`, `%`, `**` and `round` round differently. A comparison returns no
bool, there are further attributes, and `torch.tensor` infers another dtype.

An optimizer's shadow holds floats in place of such numbers. The hooks here follow the
values that Dynamo computes from them, and end the trace at a use outside of the list of
safe uses. The step may not store numpy's result, which would have another type.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node, Proxy

from .hooks import all_kinds
from .leaving import refuse
from .names import attribute_of, find
from .outcomes import WRITTEN, Unknown, guard_number, node_of
from .patch_state import patch_state
from .patches import Hook, Patcher, patch
from .symbols import FLOATS
from .tensors import OVERLOAD
from .tracing import traces_step, tracing

#: Attribute of an OutputGraph with the nodes that depend on numpy.float64 numbers.
FOLLOWED = "fuseopt_numpy"
NUMBER, TRUTH = "number", "truth"
#: Arithmetic of two numbers that agrees for both types; it returns a numpy.float64.
ARITHMETIC = frozenset(
    [
        *(operator.add, operator.sub, operator.mul, operator.truediv),
        *(operator.iadd, operator.isub, operator.imul, operator.itruediv),
        *(operator.neg, operator.pos, operator.abs, abs),
        *(torch.sym_max, torch.sym_min),
    ]
)
QUOTIENTS = frozenset({operator.truediv, operator.itruediv})
COMPARISONS = frozenset(
    [
        *(operator.lt, operator.le, operator.gt, operator.ge),
        *(operator.eq, operator.ne),
    ]
)
#: Functions that read a number as a float, and return a Python number.
PLAIN = frozenset(
    [
        *(x for x in WRITTEN if x not in (torch.sym_max, torch.sym_min)),
        *(
            getattr(math, name)
            for name in (
                *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "pow"),
                *("sqrt", "cos", "sin", "tan", "cosh", "sinh", "tanh", "acos", "asin"),
                *("atan", "atan2", "hypot", "copysign", "fabs", "fmod", "degrees"),
                *("radians", "erf", "erfc", "asinh", "acosh", "atanh", "cbrt"),
            )
            if hasattr(math, name)
        ),
    ]
)
#: Operators of a tensor and a number: all that torch implements in C, or by such.
WITH_TENSORS = frozenset(
    [
        *(ARITHMETIC | COMPARISONS),
        *(operator.pow, operator.ipow),
    ]
)
#: Python functions to which a step may pass such a number. Numeric functions come back
#: as nodes, which are checked there.
BUILTINS = frozenset(
    [
        *(ARITHMETIC | COMPARISONS | WITH_TENSORS),
        *(operator.not_, operator.truth, float, int, bool, max, min, list, tuple),
        *(operator.setitem, setattr),
    ]
)
#: Python functions that read a container other than item by item.
OF_CONTENTS = frozenset({str, repr, format, print, hash, operator.mod})
#: Functions of torch that infer a tensor's dtype from the type of data.
DATA = frozenset({"asarray", "tensor", "as_tensor", "from_numpy", "frombuffer"})
DATA_METHODS = frozenset({"new_tensor", "new", "item", "tolist", "numpy"})
#: Callables that convert numbers by their schema.
OPERATORS = (OVERLOAD, type(torch.ops.aten.add))
IN_C = (types.MethodDescriptorType, types.WrapperDescriptorType)
MENDED = "float(...) of it, where it is set, lets the step be compiled"


def is_numpy_float(x: Any) -> bool:
    """Is it of type numpy.float64, and of no derived class?"""
    return type(x) is _numpy_float()


@functools.cache
def _found() -> Any:
    return sys.modules["numpy"].float64


def _numpy_float() -> Any:
    """Return the class; without numpy, one that has no objects."""
    return _found() if "numpy" in sys.modules else _Nothing


class _Nothing:
    pass


def may_follow_numpy() -> bool:
    """Can numbers of type numpy.float64 be followed through a trace?"""
    return NUMPY_FLOATS.available()


# ---------------------------------------------------------------- hooks


@patch(
    "numpy-floats",
    "a rate that is a numpy.float64 is followed through a step as the float it equals",
    "a step whose groups hold a numpy.float64 runs in eager",
    needs=(FLOATS,),
)
def NUMPY_FLOATS(patcher: Patcher) -> None:
    """Follow such numbers from where they are held to all uses of them."""
    builder = find("torch._dynamo.variables.builder:VariableBuilder")
    tracer = find("torch._dynamo.output_graph:SubgraphTracer")
    output = find("torch._dynamo.output_graph:OutputGraph")
    builtin = find("torch._dynamo.variables.builtin:BuiltinVariable")
    symbol = find("torch._dynamo.variables.tensor:SymNodeVariable")
    numpys = find("torch._dynamo.variables.misc:NumpyVariable")
    base = find("torch._dynamo.symbolic_convert:InstructionTranslatorBase")
    translator = find("torch._dynamo.symbolic_convert:InstructionTranslator")
    attribute_of(translator, "current_tx")

    def build(original: Hook, self: Any, value: Any) -> Any:
        variable = original(self, value)
        if type(value) is float and traces_step() and _stands_for_numpy(value):
            node = node_of(variable.realize())
            if node is None:
                how = "in a way that Dynamo does not trace with numbers that move"
                _refuse(self.tx, how if tracing.constants else "as a constant")
            vars(self.tx.output).setdefault(FOLLOWED, {})[node] = NUMBER
        return variable

    patcher.around(builder, "__call__", build, "self", "value")

    def create(
        original: Hook, self: Any, kind: str, target: Any, *more: Any, **named: Any
    ) -> Any:
        followed = _followed(self.output_graph)
        gives = ""
        if followed and more:
            tx = self.output_graph.current_tx
            gives = _result_kind(
                tx, followed, kind, target, more[0], more[1:2] or ({},)
            )
        proxy = original(self, kind, target, *more, **named)
        if gives:
            followed[proxy.node] = gives
        return proxy

    patcher.around(tracer, "create_proxy", create, "self", "kind", "target", "args")

    def call(original: Hook, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if _may_meet(tx):
            _check_builtin(tx, self.fn, [*args, *kwargs.values()])
        return original(self, tx, args, kwargs)

    patcher.around(builtin, "call_function", call, "self", "tx", "args", "kwargs")

    def compared(original: Hook, tx: Any, args: Any, kwargs: Any) -> Any:
        if _may_meet(tx):
            _check_builtin(tx, operator.eq, args)
        return original(tx, args, kwargs)

    # the table of operators holds the method from before the hook
    handlers = find("torch._dynamo.symbolic_convert:compare_op_handlers")
    for name in ("==", "!="):
        patcher.handler(handlers, name, compared)

    def of_numpy(original: Hook, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if _may_meet(tx) and any(_kind_of(tx, x) for x in _items(args, kwargs)):
            _refuse(tx, "in a numpy function")
        return original(self, tx, args, kwargs)

    patcher.around(numpys, "call_function", of_numpy, "self", "tx", "args", "kwargs")

    def attribute(original: Hook, self: Any, tx: Any, name: str, *more: Any) -> Any:
        if _kind_of(tx, self):
            _refuse(tx, f"for its {name!r}")
        return original(self, tx, name, *more)

    def evaluate(original: Hook, self: Any, *more: Any) -> Any:
        if traces_step():
            tx = translator.current_tx()
            if _kind_of(tx, self) == NUMBER:
                _refuse(tx, "as a constant")
        return original(self, *more)

    read = attribute_of(symbol, "tp_getattro_impl", "var_getattr")
    for kind in (symbol, *(set(all_kinds(symbol)) - {symbol})):
        for name, hook in ((read, attribute), ("call_method", attribute)):
            if kind is symbol or name in vars(kind):
                patcher.around(kind, name, hook, "self", "tx", "name")
        if "evaluate_expr" in vars(kind):
            patcher.around(kind, "evaluate_expr", evaluate, "self")

    def text(original: Hook, self: Any, *args: Any) -> Any:
        if _may_meet(self) and _kind_of(self, self.stack[-1]):
            _refuse(self, "in a text")
        return original(self, *args)

    patcher.around(base, "_format_value", text, "self")

    def finish(original: Hook, self: Any, tx: Any, rv: Any, *more: Any) -> Any:
        if any(_kind_of(tx, x) or _is_followed_tensor(tx, x) for x in rv):
            _refuse(tx, "to store or to return what it computes from it")
        return original(self, tx, rv, *more)

    patcher.around(output, "compile_and_call_fx_graph", finish, "self", "tx", "rv")


def _is_followed_tensor(tx: Any, variable: Any) -> bool:
    """Is it a tensor in which a graph passes such a number?"""
    followed = _followed(tx.output)
    proxy = getattr(variable, "proxy", None)
    if not followed or not isinstance(proxy, Proxy):
        return False
    node = proxy.node
    return node.target is torch.scalar_tensor and node.args[0] in followed


def _refuse(tx: Any, how: str) -> None:
    refuse(tx, f"it uses a numpy.float64 {how}; {MENDED}")


def _stands_for_numpy(value: float) -> bool:
    """Does a traced shadow hold this float in place of a numpy.float64?"""
    return any(shadow.stands_for_numpy(value) for shadow in _shadows())


def _shadows() -> Iterator[Any]:
    for owner in tracing.given:
        reference = patch_state.shadows.get(owner)
        shadow = None if reference is None else reference()
        if shadow is not None:
            yield shadow


def _followed(output: Any) -> Any:
    return vars(output).get(FOLLOWED) if traces_step() else None


def _may_meet(tx: Any) -> bool:
    """May the trace meet such a number?"""
    return traces_step() and any(shadow.numpy for shadow in _shadows())


def _kind_of(tx: Any, variable: Any) -> str:
    """Return the kind of a variable of Dynamo that depends on such a number, or ""."""
    if not traces_step():
        return ""
    realized = variable
    realized = getattr(variable, "is_realized", None)
    if realized is not None:
        if not realized() and type(variable.original_value()) is not float:
            return ""
        realized = variable.realize()
    followed = _followed(tx.output)
    node = node_of(realized) if followed else None
    return "" if node is None else followed.get(node, "")


def _items(*given: Any) -> Iterator[Any]:
    """Yield variables of Dynamo, and the items of containers among them, one level
    deep.
    """
    for some in given:
        for x in some.values() if isinstance(some, dict) else some:
            yield x
            yield from _inside(x)


def _inside(x: Any) -> Any:
    """Return the items of a list, a tuple or a dict of Dynamo."""
    realized = getattr(x, "is_realized", None)
    if realized is not None and not realized():
        return ()  # held by the optimizer, and not realized yet
    items = getattr(x.realize(), "items", ())
    if isinstance(items, dict):
        return [*items.values()]
    return items if isinstance(items, (list, tuple)) else ()


# ---------------------------------------------------------------- safe uses


def _result_kind(
    tx: Any, followed: Any, kind: str, target: Any, args: Any, kwargs: Any
) -> str:
    """Return the kind of the result of a call with such numbers.

    It is NUMBER, TRUTH, or "" for any other. Ends the trace if the call may treat them
    differently from floats.
    """
    leaves = [x for x in _leaves((args, kwargs)) if isinstance(x, Proxy)]
    kinds = {followed[x.node] for x in leaves if x.node in followed}
    if not kinds:
        return ""
    name = getattr(target, "__name__", str(target))
    if TRUTH in kinds:
        if target is torch.sym_not:
            return ""
        _refuse(tx, f"in a comparison whose result {name!r} gets")
    if all(_is_number(x) for x in leaves):
        if kind == "call_function" and target in ARITHMETIC:
            if target in QUOTIENTS:
                _check_divisor(tx, args[1])
            return NUMBER
        if kind == "call_function" and target in COMPARISONS:
            return TRUTH
        if kind == "call_function" and target in PLAIN:
            return ""
    if kind == "call_function":
        if target in WITH_TENSORS and any(not _is_number(x) for x in leaves):
            return ""
        if _is_torchs(target, name):
            return ""
    first = args[0] if args else None
    if kind == "call_method" and isinstance(first, Proxy) and not _is_number(first):
        method = getattr(torch.Tensor, str(target), None)
        if isinstance(method, IN_C) and target not in DATA_METHODS:
            return ""
    _refuse(tx, f"in {name!r}")
    raise AssertionError("Dynamo continued a trace after its end")


def _leaves(x: Any) -> Iterator[Any]:
    if isinstance(x, (list, tuple)):
        for y in x:
            yield from _leaves(y)
    elif isinstance(x, dict):
        yield from _leaves([*x.values()])
    elif isinstance(x, slice):
        yield from _leaves([x.start, x.stop, x.step])
    else:
        yield x


def _is_number(x: Proxy) -> bool:
    value = x.node.meta.get("example_value")
    symbols = torch.SymInt, torch.SymFloat, torch.SymBool
    return isinstance(value, (*symbols, int, float, bool))


def _is_torchs(target: Any, name: str) -> bool:
    """Is it a function of torch in C, which reads a numpy.float64 as any float?

    An operator of torch.ops gets a double, as in its schema.
    """
    if isinstance(target, OPERATORS):
        return True
    return (
        isinstance(target, types.BuiltinFunctionType)
        and getattr(torch, name, None) is target
        and name not in DATA
        and not (name.startswith("sparse_") and name.endswith("_tensor"))
    )


def _check_divisor(tx: Any, divisor: Any) -> None:
    """Guard that a divisor is not zero: Python raises an error where numpy divides.

    A divisor that was read from a tensor is divided as in numpy.
    """
    node = divisor.node if isinstance(divisor, Proxy) else divisor
    try:
        known = bool(guard_number(tx, node, bool) if isinstance(node, Node) else node)
    except Unknown:
        return
    if not known:
        _refuse(tx, "in a quotient by zero")


def _check_builtin(tx: Any, function: Any, given: list[Any]) -> None:
    """End the trace if a Python function distinguishes such a number from a float."""
    kinds = [_kind_of(tx, x) for x in given]
    name = getattr(function, "__name__", str(function))
    if not any(kinds):
        if function in OF_CONTENTS:
            for x in given:
                if any(_kind_of(tx, y) for y in _inside(x)):
                    _refuse(tx, f"in {name!r}")
        return
    if function in (operator.is_, operator.is_not):
        others = [x for x, kind in zip(given, kinds, strict=True) if not kind]
        if len(others) == 1 and not _is_comparable(others[0]):
            return  # a number never is such an object
    elif function is isinstance and len(given) == 2 and kinds[0] == NUMBER:
        if _is_alike(given[1]):
            return
    elif function in COMPARISONS:
        if all(k or _is_comparable(x) for k, x in zip(kinds, given, strict=True)):
            return
    elif function in BUILTINS:
        return
    _refuse(tx, f"in {name!r}")


def _is_comparable(x: Any) -> bool:
    """Is it a number or a tensor? numpy compares itself with other objects, too."""
    x = x.realize()
    if x.is_python_constant():
        return type(x.as_python_constant()) in (int, float, bool)
    return isinstance(getattr(x, "proxy", None), Proxy)


def _is_alike(kinds: Any) -> bool:
    """Does isinstance agree for both types with these classes?"""
    try:
        classes = kinds.realize().as_python_constant()
        return isinstance(0.5, classes) == isinstance(_numpy_float()(0.5), classes)
    except Exception:
        return False

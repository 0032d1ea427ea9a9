"""Refuse code for which Dynamo's trace differs from Python, where no guard helps.

If the trace of a step meets such code, the trace ends and the step runs in eager. Its
bits are eager's, and fuseopt reports the line to the user.
"""

from __future__ import annotations

import collections
import functools
import inspect
import operator
import os
import sys
import threading
import weakref
from typing import Any

from torch.optim import Optimizer

from .guards import guard
from .hooks import is_ours
from .leaving import refuse
from .names import Missing, attribute_of, either, find
from .patch_state import patch_state
from .patches import Hook, Patcher
from .tracing import traces_own, traces_step, tracing

#: Methods that a class may define without a change to comparison or arithmetic.
HARMLESS = frozenset(
    [
        *("__new__", "__init__", "__doc__", "__str__", "__repr__", "__format__"),
        *("__reduce__", "__reduce_ex__", "__getnewargs__", "__dir__", "__sizeof__"),
    ]
)
VALUES = (bool, int, float, complex, str, bytes)
#: Functions whose first result Dynamo keeps.
KEPT_ANSWERS = tuple(
    getattr(sys, name)
    for name in ("getrecursionlimit", "get_int_max_str_digits")
    if hasattr(sys, name)  # the latter is not in every Python 3.10
)
WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
CONTAINERS = (dict, list, collections.OrderedDict, collections.defaultdict)


def acts_otherwise(value: Any) -> bool:
    """Is it a number or a text that defines its own operators?"""
    return operates(type(value))


def operates(kind: type) -> bool:
    """Is it a class of numbers or texts that define their own operators?"""
    if kind in VALUES or not issubclass(kind, VALUES):
        return False
    base = next(x for x in kind.__mro__ if x in VALUES)
    operators = vars(base).keys() - HARMLESS
    derived = (x for x in kind.__mro__[: kind.__mro__.index(base)])
    return any(operators & vars(x).keys() for x in derived)


@guard("refused-values", "values that Dynamo takes for others are refused")
def VALUES_REFUSED(patcher: Patcher) -> None:
    """Refuse a value that Dynamo mistakes for another value, or for a constant."""
    kind = find("torch._dynamo.variables.builder:VariableBuilder")

    def build(original: Hook, self: Any, value: Any) -> Any:
        why = _untraceable(value) if is_ours(self.tx) else ""
        if any(value is x for x in KEPT_ANSWERS) and is_ours(self.tx):
            # unwrap ends its loop at the recursion limit, of any value
            now = getattr(self.tx.output, "current_tx", self.tx)
            if now.f_code is not inspect.unwrap.__code__:
                why = f"it calls sys.{value.__name__}"
        if not why and traces_step():
            if type(value) in CONTAINERS or isinstance(value, Optimizer):
                why = _is_copied(self.tx, value)
            elif hasattr(type(value), "__next__"):
                why = f"it reads a {type(value).__name__}, which yields its items once"
        if why:
            refuse(self.tx, why)
        return original(self, value)

    patcher.around(kind, "__call__", build, "self", "value")


@guard("refused-made-values", "numbers with operators that a step makes are refused")
def MADE_VALUES(patcher: Patcher) -> None:
    """Refuse to make a number or a text of a class that defines its own operators."""
    classes = find("torch._dynamo.variables.user_defined:UserDefinedClassVariable")

    def call(original: Hook, self: Any, tx: Any, *args: Any) -> Any:
        kind = self.value
        if is_ours(tx) and isinstance(kind, type) and operates(kind):
            refuse(tx, f"it makes a {kind.__name__}, which defines its own operators")
        return original(self, tx, *args)

    patcher.around(classes, "call_function", call, "self", "tx")


def _is_copied(tx: Any, value: Any) -> str:
    """Return why a step may not use an optimizer with a shadow, or a container of it.

    The shadow has a copy of the container. Returns None for other values.
    """
    root = tx.output.local_scope.get("self")
    for holder in (root, *getattr(root, "optimizers", ())):
        ref = patch_state.shadows.get(holder) if isinstance(holder, Optimizer) else None
        shadow = None if ref is None else ref()
        if shadow is None:
            continue
        if shadow.copies(value):
            return (
                f"it finds a {type(value).__name__} of its optimizer by a second "
                "reference"
            )
        if shadow.stands_for(value):
            return "it reaches its optimizer by a second reference"
    return ""


def _untraceable(value: Any) -> str:
    """Return why a step that uses a value must run in eager, or ""."""
    if acts_otherwise(value):
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        return f"it uses a {name}, which defines its own operators"
    if isinstance(value, threading.local):
        return "it uses a thread-local object (threading.local)"
    if value is os.environ or value is os.getenv:
        return "it reads environment variables"
    kind = type(value)
    if isinstance(value, WEAK):
        return f"it uses a {kind.__name__}, whose items end with what it holds"
    if kind is collections.deque and value.maxlen is not None:
        return "it uses a deque with a maximum length"
    if kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"):
        return "it uses a numpy bool"
    if issubclass(kind, dict) and hasattr(kind, "__missing__"):
        makes = next(c for c in kind.__mro__ if "__missing__" in vars(c))
        if makes.__module__ not in ("collections", "builtins"):
            return f"it uses a {kind.__name__}, which makes missing items"
    return ""


@guard("refused-numpy", "random numbers of numpy's are refused")
def RANDOM(patcher: Patcher) -> None:
    """Refuse random numbers of numpy: Dynamo draws different ones in their place."""
    kind = find("torch._dynamo.variables.misc:NumpyVariable")

    def call(original: Hook, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        owner = type(getattr(self.value, "__self__", None))
        homes = owner.__module__, getattr(self.value, "__module__", None) or ""
        if is_ours(tx) and any(home.startswith("numpy.random") for home in homes):
            refuse(tx, "it draws random numbers with numpy")
        return original(self, tx, args, kwargs)

    patcher.around(kind, "call_function", call, "self", "tx", "args", "kwargs")


@guard("refused-arrays", "numbers of numpy's that a step computes are refused")
def ARRAYS(patcher: Patcher) -> None:
    """Refuse a number of numpy that a step computes and that outlives its graph.

    Dynamo would turn it into an array.
    """
    output = find("torch._dynamo.output_graph:OutputGraph")
    array = find("torch._dynamo.variables.tensor:NumpyNdarrayVariable")

    def finish(original: Hook, self: Any, tx: Any, rv: Any, *more: Any) -> Any:
        ours = traces_own() and is_ours(tx)
        if ours and any(isinstance(x, array) and x.ndim == 0 for x in rv):
            refuse(tx, "it keeps a numpy number, which Dynamo turns into an array")
        return original(self, tx, rv, *more)

    patcher.around(output, "compile_and_call_fx_graph", finish, "self", "tx", "rv")


@guard("refused-draws", "random numbers of Python's are refused")
def DRAWS(patcher: Patcher) -> None:
    """Refuse draws from Python's generators, and making or reading a generator.

    Dynamo keeps the state that a `random.Random` has while it traces: each call would
    draw the same numbers and reset the generator. Dynamo shows a backend any drawn
    number as a tensor of float32, and passes it in one of float64.
    """
    builder = find("torch._dynamo.variables.builder:VariableBuilder")
    source = find("torch._dynamo.source:RandomValueSource")
    held = find("torch._dynamo.variables.misc:RandomVariable")
    made = find("torch._dynamo.variables.misc:RandomClassVariable")

    def draw(original: Hook, self: Any, value: Any) -> Any:
        if isinstance(self.source, source) and is_ours(self.tx):
            refuse(self.tx, "it draws random numbers with Python")
        return original(self, value)

    def use(original: Hook, self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if is_ours(tx):
            refuse(tx, "it uses a Python random generator (random.Random)")
        return original(self, tx, *args, **kwargs)

    patcher.around(builder, "wrap_unspecialized_primitive", draw, "self", "value")
    patcher.around(held, "call_method", use, "self", "tx")
    patcher.around(made, "call_function", use, "self", "tx")


@guard("refused-calls", "calls whose effects Dynamo loses are refused")
def CALLS(patcher: Patcher) -> None:
    """Refuse a call whose effect on a container Dynamo loses."""

    def refusing(names: tuple[str, ...]) -> Hook:
        def call(original: Hook, self: Any, tx: Any, name: str, *args: Any) -> Any:
            if name in names and self.source is not None and is_ours(tx):
                refuse(tx, f"it calls {name}, which Dynamo does not follow")
            return original(self, tx, name, *args)

        return call

    lists = find("torch._dynamo.variables.lists:ListVariable")
    ordered = either(
        "torch._dynamo.variables.user_defined:OrderedDictVariable",
        "torch._dynamo.variables.dicts:ConstDictVariable",  # before torch 2.13
    )
    hook = refusing(("__iadd__", "__imul__"))
    patcher.around(lists, "call_method", hook, "self", "tx", "name")
    hook = refusing(("move_to_end",))
    patcher.around(ordered, "call_method", hook, "self", "tx", "name")


@guard("refused-constants", "what was refused is not computed as a constant instead")
def CONSTANTS(patcher: Patcher) -> None:
    """Call no function in Dynamo with a result of a refused trace.

    Dynamo does so if all arguments are constants, including modules and classes.
    """
    home = find("torch._dynamo.variables.builtin")
    builtin = find("torch._dynamo.variables.builtin:BuiltinVariable")

    def may(original: Hook, *args: Any, **kwargs: Any) -> bool:
        return not tracing.refusal and bool(original(*args, **kwargs))

    patcher.around(home, "check_unspec_or_constant_args", may)
    patcher.around(builtin, "has_constant_handler", may)


@guard("refused-attributes", "what code makes of modules and classes is refused")
def MADE(patcher: Patcher) -> None:
    """Refuse attributes from a module's `__getattr__` or a metaclass, and items of a
    class.

    Dynamo calls such code while it traces, and its guards call it at each step.
    """
    kind = find("torch._dynamo.variables.misc:PythonModuleVariable")
    classes = find("torch._dynamo.variables.user_defined:UserDefinedClassVariable")

    def of_module(original: Hook, self: Any, tx: Any, name: str) -> Any:
        if is_ours(tx) and (made := _made_by_module(self, name)):
            refuse(tx, made)
        return original(self, tx, name)

    def of_class(original: Hook, self: Any, tx: Any, name: str) -> Any:
        if is_ours(tx) and (made := _made_by_class(self.value, name)):
            refuse(tx, made)
        return original(self, tx, name)

    def load(original: Hook, self: Any, name: str) -> Any:
        # from torch 2.14 on, Dynamo calls such code where a trace is refused below
        holder = self.stack[-1].realize()
        if isinstance(holder, kind):
            of_module(_nothing, holder, self, name)
        elif isinstance(holder, classes):
            of_class(_nothing, holder, self, name)
        return original(self, name)

    def call(original: Hook, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn is operator.getitem and args and is_ours(tx):
            holder = args[0].realize()
            if isinstance(holder, classes) and _makes_items(holder.value):
                refuse(tx, f"{holder.value.__name__} computes its items in code")
        return original(self, tx, args, kwargs)

    builtin = find("torch._dynamo.variables.builtin:BuiltinVariable")
    patcher.around(builtin, "call_function", call, "self", "tx", "args", "kwargs")
    base = find("torch._dynamo.symbolic_convert:InstructionTranslatorBase")
    if "generic_getattr" in base._load_attr.__code__.co_names:
        patcher.around(base, "_load_attr", load, "self", "attr")
    read = attribute_of(kind, "tp_getattro_impl", "var_getattr")
    patcher.around(kind, read, of_module, "self", "tx", "name")
    patcher.around(kind, "call_obj_hasattr", of_module, "self", "tx", "name")
    read = attribute_of(classes, "tp_getattro_impl", "var_getattr")
    patcher.around(classes, read, of_class, "self", "tx", "name")


def _nothing(*args: Any) -> None:
    pass


def _makes_items(value: Any) -> bool:
    """Does user code compute the items of a class?"""
    made = getattr(value, "__class_getitem__", None)
    return inspect.isfunction(getattr(made, "__func__", made)) and (
        value.__module__.partition(".")[0] not in sys.stdlib_module_names
    )


def _made_by_module(module: Any, name: str) -> str:
    """Return the reason if a module's `__getattr__` makes an attribute, else ""."""
    held = vars(module.value)
    if name in held or "__getattr__" not in held or module.is_torch:
        return ""
    return f"{held['__name__']} makes its {name} itself"


def _made_by_class(value: Any, name: str) -> str:
    """Return the reason if a metaclass makes an attribute, else ""."""
    above: Any = type(value)
    homes = (c.__module__.partition(".")[0] for c in above.__mro__ if name in vars(c))
    home = next(homes, "")
    if not home or home in ("builtins", "abc", "enum", "torch"):
        return ""
    return f"{above.__name__} makes {name} of {value.__name__}"


@guard("refused-identities", "the identity of a container is refused")
def IDENTITIES(patcher: Patcher) -> None:
    """Refuse reads of a container's identity: a shadow may have a copy of it."""
    builtin = find("torch._dynamo.variables.builtin:BuiltinVariable")

    def call(original: Hook, self: Any, tx: Any, *args: Any) -> Any:
        kinds = [x.realize().python_type() for x in args]
        if is_ours(tx) and any(
            issubclass(kind, (dict, list, Optimizer)) for kind in kinds
        ):
            refuse(tx, "it reads the id of a container")
        return original(self, tx, *args)

    patcher.around(builtin, "call_id", call, "self", "tx")


@guard("refused-addresses", "the address and the version of a tensor are refused")
def ADDRESSES(patcher: Patcher) -> None:
    """Refuse reads of a tensor's address or version, which are no constants."""
    kind = find("torch._dynamo.variables.tensor:TensorVariable")

    def refused(original: Hook, self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if traces_own():
            what = original.__name__.removeprefix("method_").removeprefix("attr_")
            refuse(tx, f"it reads {what!r} of a tensor")
        return original(self, tx, *args, **kwargs)

    for name in ("method_data_ptr", "method_const_data_ptr", "method_attr__version"):
        if hasattr(kind, name):
            patcher.around(kind, name, refused, "self")
    if not hasattr(kind, "method_data_ptr"):
        raise Missing("TensorVariable has no method_data_ptr")


@guard("refused-caches", "functions with a cache are refused")
def CACHES(patcher: Patcher) -> None:
    """Refuse functions behind functools.lru_cache, except torch's own.

    torch's caches hold what is the same for a whole process, such as its list of
    functions with a device.
    """
    kind = find("torch._dynamo.variables.functions:WrapperUserFunctionVariable")

    def call(original: Hook, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        cached = isinstance(self.wrapper_obj, functools._lru_cache_wrapper)
        home = getattr(self.wrapper_obj, "__module__", None) or ""
        if is_ours(tx) and cached and home.partition(".")[0] != "torch":
            refuse(tx, "it calls a function that has a cache")
        return original(self, tx, args, kwargs)

    patcher.around(kind, "call_function", call, "self", "tx", "args", "kwargs")

"""What Dynamo is made to guard besides what it guards, where it traces a step.

Of a step's own code Dynamo takes more for settled than its guards ask for: that a name
is absent, in what order a dict has its keys, which object something is, which function
a class holds. Each hook here notes such a fact where the trace takes it, as a guard of
Dynamo's own that its compiled guards ask at each call; a fact that no guard can hold
ends the trace, and the step runs in eager. torch.optim's own code asks for none of
these, and its traces are left alone.

Checked with torch 2.13, and by name with 2.11. Where what a hook relies on is missing,
that hook is left out, and Dynamo guards what it guards by itself.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import enum
import functools
import importlib
import inspect
import operator
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .dynamo import refuse, traces_own, traces_step
from .plain import OPTIM

Hook = Callable[..., Any]


def trace_guarded() -> None:
    """Put the hooks in place; they act where a step is traced for our backend."""
    for install in (
        _guard_misses,
        _guard_builtins,
        _guard_classes,
        _refuse_symbols,
        _guard_contents,
        _guard_identity,
        _guard_places,
        _guard_methods,
        _trace_groups,
        _guard_metadata,
        _keep_kinds,
        _refuse_texts,
        _refuse_random,
        _refuse_addresses,
        _refuse_caches,
    ):
        with contextlib.suppress(ImportError, AttributeError):
            install()


def _asks(tx: Any) -> bool:
    """Is this a trace of ours, of code that is not torch.optim's?"""
    if not traces_step():
        return False
    now = getattr(tx.output, "current_tx", tx)
    return traces_own() or not now.f_code.co_filename.startswith(OPTIM)


def _around(owner: Any, name: str, hook: Hook) -> None:
    """Let `hook(original, self, ...)` stand in the place of a method."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    setattr(owner, name, method)


def _install(source: Any, *kinds: Any) -> None:
    """Guard what is found at a source, in these ways."""
    if source is None:
        return
    guards = importlib.import_module("torch._dynamo.guards")
    for kind in kinds:
        with contextlib.suppress(NotImplementedError):
            guards.install_guard(source.make_guard(kind))


#: What a class may define without that its values are compared or computed otherwise.
HARMLESS = frozenset(
    [
        *("__new__", "__init__", "__doc__", "__str__", "__repr__", "__format__"),
        *("__reduce__", "__reduce_ex__", "__getnewargs__", "__dir__", "__sizeof__"),
    ]
)
VALUES = (bool, int, float, complex, str, bytes)


def acts_otherwise(value: Any) -> bool:
    """Is it a number or a text with operators of its own?"""
    kind = type(value)
    if kind in VALUES or not isinstance(value, VALUES):
        return False
    base = next(x for x in kind.__mro__ if x in VALUES)
    operators = vars(base).keys() - HARMLESS
    derived = (x for x in kind.__mro__[: kind.__mro__.index(base)])
    return any(operators & vars(x).keys() for x in derived)


def _name(source: Any) -> str:
    """The expression that gives what is at a source."""
    return str(source.name() if callable(source.name) else source.name)


def _found(tx: Any, source: Any) -> Any:
    """What is at a source; None if it cannot be said."""
    if source is None:
        return None
    scope = {"L": tx.output.local_scope, "G": tx.output.global_scope}
    try:
        return eval(_name(source), scope)
    except Exception:
        return None


def _ask(tx: Any, what: str, holds: Callable[[], bool]) -> None:
    """Guard that `holds()` at each call; of one graph, once under a name."""
    asked = vars(tx.output).setdefault("fuseopt_asked", set())
    if what in asked:
        return
    asked.add(what)
    source = importlib.import_module("torch._dynamo.source").GlobalStateSource()

    def create(builder: Any, guard: Any) -> None:
        add = builder.guard_manager.root.add_lambda_guard
        try:
            add(lambda _: holds(), [what], guard.user_stack)
        except TypeError:  # as before torch 2.13
            add(lambda _: holds(), [what])

    _install(source, create)


def _all_kinds(base: type) -> Iterator[type]:
    yield base
    derived: list[type] = base.__subclasses__()
    for kind in derived:
        yield from _all_kinds(kind)


# ---------------------------------------------------------------- what is absent


def _guard_misses() -> None:
    """A name that an object lacks, and a key that a dict lacks, stay absent."""
    from torch._dynamo.exc import ObservedAttributeError
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.variables.base import VariableTracker

    def look(original: Hook, self: Any, tx: Any, name: str) -> Any:
        try:
            return original(self, tx, name)
        except ObservedAttributeError:
            if _asks(tx) and self.source is not None:
                kind = functools.partial(GuardBuilder.HASATTR, attr=name)
                _install(self.source, kind)
            raise

    def ask(original: Hook, self: Any, tx: Any, name: str) -> Any:
        found = original(self, tx, name)
        if _asks(tx) and self.source is not None:
            _install(self.source, functools.partial(GuardBuilder.HASATTR, attr=name))
        return found

    for kind in set(_all_kinds(VariableTracker)):
        if "var_getattr" in vars(kind):
            _around(kind, "var_getattr", look)
        if "call_obj_hasattr" in vars(kind):
            _around(kind, "call_obj_hasattr", ask)


def _guard_builtins() -> None:
    """A name that Python's own functions have is none of the module."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    def load(original: Hook, self: Any, name: Any) -> Any:
        if _asks(self):
            around = self.f_globals
            what = f"{name!r} is no name of {around.get('__name__')!r}"
            _ask(self, what, lambda: name not in around)
        return original(self, name)

    _around(InstructionTranslatorBase, "load_builtin_from_argval", load)


# ---------------------------------------------------------------- what containers hold


def _guard_contents() -> None:
    """A dict that is looked into has the same keys, in the same order.

    So has the dict of an object's attributes that is looked into as such.
    """
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    tables = (dict, collections.OrderedDict, collections.defaultdict)

    def build(original: Hook, self: Any, value: Any) -> Any:
        asked = _asks(self.tx)
        if asked and value in self.tx.output.side_effects:
            # one object in two places: Dynamo asks of the first alone what it holds
            first = self.tx.output.side_effects[value].source
            if first is not None and first != self.source:
                _install(first, GuardBuilder.ID_MATCH)
                _install(self.source, GuardBuilder.ID_MATCH)
        if asked and acts_otherwise(value):
            kind = type(value).__name__
            refuse(self.tx, f"it uses a {kind}, which has operators of its own")
        if asked and (value is os.environ or value is os.getenv):
            refuse(self.tx, "it reads variables of the environment")
        if asked and type(value) is collections.deque and value.maxlen is not None:
            refuse(self.tx, "it uses a deque that has a greatest length")
        made = original(self, value)
        if asked:
            _note_class(self.tx, value)
            if type(value) in tables:
                self.tx.output.guard_on_key_order.add(self.source)
                _install(self.source, GuardBuilder.DICT_KEYS_MATCH)
                if type(value) is collections.OrderedDict and len(value) > 1:
                    _guard_order(self.tx, self.source, value)
            elif isinstance(value, torch.Tensor):
                _note_tensor(made, value)
        return made

    def attributes(original: Hook, self: Any, tx: Any) -> Any:
        if _asks(tx) and self.source is not None:
            source = AttrSource(self.source, "__dict__")
            tx.output.guard_on_key_order.add(source)
            _install(source, GuardBuilder.DICT_KEYS_MATCH)
        return original(self, tx)

    _around(VariableBuilder, "__call__", build)
    _around(UserDefinedObjectVariable, "get_dict_vt", attributes)


def _guard_order(tx: Any, source: Any, value: Any) -> None:
    """Guard the order of an OrderedDict, which the dict within it does not have."""
    keys = list(value)
    if not all(isinstance(key, (str, int)) for key in keys):
        refuse(tx, "it looks into an OrderedDict with keys of many kinds")

    def ordered(builder: Any, guard: Any) -> None:
        name = _name(source)
        found = compile(name, name, "eval")
        around = builder.scope["G"]

        def same(local: Any) -> bool:
            return list(eval(found, {"L": local, "G": around})) == keys

        add = builder.guard_manager.root.add_lambda_guard
        parts = [f"list({name}) == {keys}"]
        try:
            add(same, parts, guard.user_stack)
        except TypeError:  # as before torch 2.13
            add(same, parts)

    _install(source, ordered)


class Classes:
    """What classes hold, by identity: do they hold it still?

    Nothing of it is kept alive. Numbers and texts may change, for Dynamo guards these.
    """

    def __init__(self) -> None:
        self._kinds: dict[int, weakref.ref[type]] = {}
        self._held: dict[int, tuple[int, list[str], list[int], list[int]]] = {}
        self._gone: list[Any] = []
        self._weak: list[Any] = []

    def note(self, kind: type) -> None:
        for one in kind.__mro__:
            if id(one) not in self._kinds and not _steady(one):
                self._kinds[id(one)] = weakref.ref(one)
                self._held[id(one)] = self._look(one)
                for value in vars(one).values():
                    with contextlib.suppress(TypeError):
                        self._weak.append(weakref.ref(value, self._gone.append))

    @staticmethod
    def _look(kind: type) -> tuple[int, list[str], list[int], list[int]]:
        own = vars(kind)
        values = [
            id(type(x) if isinstance(x, (*VALUES, type(None))) else x)
            for x in own.values()
        ]
        codes = [id(getattr(_bare(x), "__code__", None)) for x in own.values()]
        return id(kind.__mro__), [*own], values, codes

    def same(self) -> bool:
        if self._gone:
            return False
        for number, kind in self._kinds.items():
            found = kind()
            if found is None or self._look(found) != self._held[number]:
                return False
        return True


def _bare(x: Any) -> Any:
    """The function in a property, a class method, a static method."""
    return getattr(x, "fget", None) or getattr(x, "__func__", x)


def _steady(kind: type) -> bool:
    """Is it a class of Python's own, of torch's, or of numpy's?"""
    top = kind.__module__.partition(".")[0]
    return top in sys.stdlib_module_names or top in ("torch", "numpy", "builtins")


def _note_class(tx: Any, value: Any) -> None:
    """Guard what the class of an object holds, and a class itself."""
    kind = value if isinstance(value, type) else type(value)
    if _steady(kind):
        return
    classes = vars(tx.output).get("fuseopt_classes")
    if classes is None:
        classes = Classes()
        tx.output.fuseopt_classes = classes
        _ask(tx, "classes hold what they held", classes.same)
    classes.note(kind)


def _guard_classes() -> None:
    """An object that a step makes is of a class that holds what it held."""
    from torch._dynamo.variables.user_defined import UserDefinedClassVariable

    def call(original: Hook, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if _asks(tx):
            _note_class(tx, self.value)
        return original(self, tx, args, kwargs)

    _around(UserDefinedClassVariable, "call_function", call)


# ---------------------------------------------------------------- which object it is


def _guard_identity() -> None:
    """What is compared with `is` remains the object that it was."""
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.symbolic_convert import compare_op_handlers
    from torch._dynamo.variables.builtin import BuiltinVariable
    from torch._dynamo.variables.constant import ConstantVariable

    def call(original: Hook, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn in (operator.is_, operator.is_not) and _asks(tx):
            sides = [x.realize() for x in args]
            if not any(isinstance(x, ConstantVariable) for x in sides):
                for x in sides:
                    _install(x.source, GuardBuilder.ID_MATCH)
        if self.fn in (isinstance, issubclass) and len(args) == 2 and _asks(tx):
            _guard_instances(tx, args[1])
        return original(self, tx, args, kwargs)

    _around(BuiltinVariable, "call_function", call)
    # the table of operators has the method as it was
    for name in ("is", "is not"):
        compare_op_handlers[name] = compare_op_handlers[name].__self__.call_function


def _guard_places() -> None:
    """Two places hold one object still, or another one still.

    Dynamo reads the state of a parameter by its place among the keys, and leaves out
    the guard that this key is that parameter: a state that was dropped and made anew
    stands last, and each other one was taken for its neighbour's. Nor does it ask which
    of the parameters an attribute is.
    """
    guards: Any = importlib.import_module("torch._dynamo.guards")
    left_out = guards.is_from_optimizer_source

    @functools.wraps(left_out)
    def asked(source: Any) -> bool:
        return not traces_step() and bool(left_out(source))

    guards.is_from_optimizer_source = asked


#: Classes of classes that answer for themselves, but the same at each time.
STEADY = (type, enum.EnumMeta, torch._C._TensorMeta)


def _guard_instances(tx: Any, kinds: Any) -> None:
    """Who is an instance of a class, or a subclass, remains so."""
    try:
        given = kinds.as_python_constant()
    except NotImplementedError:
        return
    left = [given]
    while left:
        kind = left.pop()
        if isinstance(kind, tuple):
            left += kind
            continue
        asked = getattr(type(kind), "__instancecheck__", type.__instancecheck__)
        if asked is abc.ABCMeta.__instancecheck__:
            # whoever registers with any of them changes this
            token = abc.get_cache_token()
            same = functools.partial(_is_token, token)
            _ask(tx, f"no class registers: {token}", same)
        elif isinstance(kind, type) and not any(
            asked is x.__instancecheck__ for x in (*STEADY, type(torch.nn.Parameter))
        ):
            refuse(tx, f"it asks {kind.__name__} who is an instance")


def _is_token(known: object) -> bool:
    return abc.get_cache_token() == known


# ---------------------------------------------------------------- what is called


def _guard_methods() -> None:
    """A method that is called has the code that it had, and is found where it was."""
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import TypeDictSource
    from torch._dynamo.variables.functions import UserMethodVariable
    from torch._dynamo.variables.user_defined import (
        UserDefinedClassVariable,
        UserDefinedObjectVariable,
    )

    def walk(original: Hook, self: Any, tx: Any, name: str) -> Any:
        found = original(self, tx, name)
        if _asks(tx):
            # of the classes that lack the name, Dynamo leaves out the first
            on_class = isinstance(self, UserDefinedClassVariable)
            kind = self.value if on_class else type(self.value)
            source = self.source if on_class else self.cls_source
            if name not in vars(kind) and source is not None:
                lacks = functools.partial(GuardBuilder.DICT_NOT_CONTAINS, key=name)
                _install(TypeDictSource(source), lacks)
        return found

    def call(original: Hook, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if _asks(tx):
            source = getattr(self, "source_fn", None)
            if _found(tx, source) is self.fn:
                _install(source, GuardBuilder.CLOSURE_MATCH)
        return original(self, tx, args, kwargs)

    _around(UserMethodVariable, "call_function", call)
    _around(UserDefinedClassVariable, "get_source_by_walking_mro", walk)
    _around(UserDefinedObjectVariable, "get_source_by_walking_mro", walk)


def _trace_groups() -> None:
    """`_init_group` of a class that is not torch's is traced like any method.

    Dynamo calls it for real, and guards nothing that it reads.
    """
    from torch._dynamo.variables.optimizer import OptimizerVariable
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    def call(
        original: Hook, self: Any, tx: Any, name: str, args: Any, kwargs: Any
    ) -> Any:
        if name == "_init_group" and traces_own():
            function = inspect.unwrap(getattr(type(self.value), name, None) or call)
            code = getattr(function, "__code__", None)
            if code is None or not code.co_filename.startswith(OPTIM):
                plain = UserDefinedObjectVariable.call_method
                return plain(self, tx, name, args, kwargs)
        return original(self, tx, name, args, kwargs)

    _around(OptimizerVariable, "call_method", call)


# ---------------------------------------------------------------- what tensors are


#: What is asked of a tensor and answered by Python, as methods of Dynamo's variables.
METADATA = (
    *("attr_ndim", "attr_dtype", "attr_device", "attr_layout", "attr_is_cuda"),
    *("attr_shape", "attr_is_quantized", "attr_is_sparse", "attr_is_nested", "size"),
    *("stride", "numel", "dim", "is_floating_point", "is_complex", "is_contiguous"),
    *("type", "get_device", "element_size", "__len__", "__iter__"),
)


def _guard_metadata() -> None:
    """A tensor that Dynamo knows by its identity alone is as it was when asked."""
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.tensor import TensorVariable

    def asked(original: Hook, self: Any, *args: Any, **kwargs: Any) -> Any:
        if traces_own():
            _guard_inputs(self.proxy.node, GuardBuilder.TENSOR_MATCH)
        return original(self, *args, **kwargs)

    def wants_gradient(original: Hook, self: Any, tx: Any) -> Any:
        if _asks(tx) and self.source is not None:
            source = AttrSource(self.source, "requires_grad")
            _install(source, GuardBuilder.CONSTANT_MATCH)
        return original(self, tx)

    def attribute(original: Hook, self: Any, tx: Any, name: str) -> Any:
        found = original(self, tx, name)
        known = f"attr_{name}" in METADATA or name in ("grad", "requires_grad")
        if traces_own() and not known and isinstance(found, ConstantVariable):
            source = self.source and AttrSource(self.source, name)
            value = found.as_python_constant()
            if source is None or _found(tx, source) is not value:
                refuse(tx, f"it reads {name!r} of a tensor")
            _install(source, GuardBuilder.CONSTANT_MATCH)
        return found

    def method(original: Hook, self: Any, tx: Any, name: str, *args: Any) -> Any:
        found = original(self, tx, name, *args)
        if (
            traces_own()
            and name not in METADATA
            and isinstance(found, ConstantVariable)
        ):
            if found.as_python_constant() is not None:
                refuse(tx, f"it calls {name!r} of a tensor")
        return found

    _around(TensorVariable, "var_getattr", attribute)
    _around(TensorVariable, "call_method", method)
    _around(TensorVariable, "method_attr_requires_grad", wants_gradient)
    for name in METADATA:
        if hasattr(TensorVariable, f"method_{name}"):
            _around(TensorVariable, f"method_{name}", asked)


SOURCE, GUARDED = "fuseopt_source", "fuseopt_guarded"


def _guard_inputs(node: Any, kind: Any) -> None:
    """Guard the parameters and the state that a tensor is computed from."""
    left = [node]
    while left:
        now = left.pop()
        if not now.meta.get(GUARDED):
            now.meta[GUARDED] = True
            _install(now.meta.get(SOURCE), kind)
            left += now.all_input_nodes


KIND = "fuseopt_kind"


def _note_tensor(made: Any, value: torch.Tensor) -> None:
    """Note what Dynamo does not of a tensor that stands in its graph as it is."""
    proxy = getattr(made, "proxy", None)
    if proxy is None or proxy.node.op != "get_attr":
        return
    proxy.node.meta.setdefault(SOURCE, made.source)
    if made.python_type() is not type(value):
        proxy.node.meta[KIND] = type(value)


def _keep_kinds() -> None:
    """A parameter of a class of its own is of that class; its class stays the same."""
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.variables.tensor import TensorVariable

    def kind(original: Hook, self: Any) -> Any:
        if traces_step():
            node = self.proxy.node
            while node.op == "call_method" and node.target.endswith("_"):
                node = node.args[0]
            _install(self.source, GuardBuilder.TYPE_MATCH)
            if KIND in node.meta:
                return node.meta[KIND]
        return original(self)

    _around(TensorVariable, "python_type", kind)


# ---------------------------------------------------------------- what nothing guards


def _refuse_texts() -> None:
    """No text is made of a number that moves: Dynamo would keep it as it is."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.tensor import SymNodeVariable

    def text(original: Hook, self: Any, *args: Any) -> Any:
        if _asks(self) and isinstance(self.stack[-1].realize(), SymNodeVariable):
            refuse(self, "it makes text of a number that changes")
        return original(self, *args)

    _around(InstructionTranslatorBase, "_format_value", text)


def _refuse_symbols() -> None:
    """A number that moves is not looked for in a list: Dynamo would not find it."""
    from torch._dynamo.variables.lists import BaseListVariable
    from torch._dynamo.variables.tensor import SymNodeVariable

    def contains(original: Hook, self: Any, tx: Any, item: Any) -> Any:
        if _asks(tx):
            both = [item, *self.items]
            if any(isinstance(x.realize(), SymNodeVariable) for x in both):
                refuse(tx, "it looks for a number that changes, or among such numbers")
        return original(self, tx, item)

    for kind in set(_all_kinds(BaseListVariable)):
        if "sq_contains" in vars(kind):
            _around(kind, "sq_contains", contains)


def _refuse_random() -> None:
    """What numpy draws is not what Dynamo draws in its place."""
    from torch._dynamo.variables.misc import NumpyVariable

    def call(original: Hook, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        owner = type(getattr(self.value, "__self__", None))
        homes = owner.__module__, getattr(self.value, "__module__", None) or ""
        if _asks(tx) and any(home.startswith("numpy.random") for home in homes):
            refuse(tx, "it draws random numbers of numpy's")
        return original(self, tx, args, kwargs)

    _around(NumpyVariable, "call_function", call)


def _refuse_addresses() -> None:
    """Where a tensor lies, and how often it was written, is no constant."""
    from torch._dynamo.variables.tensor import TensorVariable

    def asked(original: Hook, self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if traces_own():
            what = original.__name__.removeprefix("method_").removeprefix("attr_")
            refuse(tx, f"it reads {what!r} of a tensor")
        return original(self, tx, *args, **kwargs)

    for name in ("method_data_ptr", "method_const_data_ptr", "method_attr__version"):
        if hasattr(TensorVariable, name):
            _around(TensorVariable, name, asked)


def _refuse_caches() -> None:
    """What functools.lru_cache has kept is not looked through."""
    from torch._dynamo.variables.functions import WrapperUserFunctionVariable

    def call(original: Hook, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if _asks(tx) and isinstance(self.wrapper_obj, functools._lru_cache_wrapper):
            refuse(tx, "it calls a function that has a cache")
        return original(self, tx, args, kwargs)

    _around(WrapperUserFunctionVariable, "call_function", call)

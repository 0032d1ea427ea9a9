"""What Dynamo is made to guard besides what it guards, where it traces a step.

Of a step's own code Dynamo takes more for settled than its guards ask for: that a name
is absent, in what order a dict has its keys, which object something is, which function
a class holds. Each hook here notes such a fact where the trace takes it, as a guard of
Dynamo's own that its compiled guards ask at each call. torch.optim's own code asks for
none of these, and its traces are left alone.

Checked with torch 2.13, and by name with 2.11. Where what a hook relies on is missing,
that hook is left out, and Dynamo guards what it guards by itself.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import inspect
import operator
from typing import Any

import torch

from . import class_guards, hazards
from .dynamo import refuse
from .hooks import Hook, all_kinds, around, asks, found_at, install, name_of
from .plain import OPTIM
from .tracing import traces_own, traces_step


def trace_guarded() -> None:
    """Put the hooks in place; they act where a step is traced for our backend."""
    for put in (
        _guard_misses,
        _guard_contents,
        _guard_identity,
        _guard_places,
        _guard_methods,
        _trace_groups,
        _guard_metadata,
        _keep_kinds,
        class_guards.guard_builtins,
        class_guards.guard_classes,
        class_guards.guard_instances,
        hazards.refuse_values,
        hazards.refuse_texts,
        hazards.refuse_symbols,
        hazards.refuse_random,
        hazards.refuse_addresses,
        hazards.refuse_caches,
    ):
        with contextlib.suppress(ImportError, AttributeError):
            put()


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
            if asks(tx) and self.source is not None:
                install(*attribute_guard(GuardBuilder, self.source, name))
            raise

    def ask(original: Hook, self: Any, tx: Any, name: str) -> Any:
        found = original(self, tx, name)
        if asks(tx) and self.source is not None:
            install(*attribute_guard(GuardBuilder, self.source, name))
        return found

    for kind in set(all_kinds(VariableTracker)):
        if "var_getattr" in vars(kind):
            around(kind, "var_getattr", look)
        if "call_obj_hasattr" in vars(kind):
            around(kind, "call_obj_hasattr", ask)


def attribute_guard(builder: Any, source: Any, name: str) -> tuple[Any, Any]:
    """Whether what is at a source has an attribute, as a guard: its source, its kind.

    torch 2.11 asks at the attribute's own source; later ones are told its name.
    """
    from torch._dynamo.source import AttrSource

    if "attr" in inspect.signature(builder.HASATTR).parameters:
        return source, functools.partial(builder.HASATTR, attr=name)
    return AttrSource(source, name), builder.HASATTR


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
        asked = asks(self.tx)
        if asked and value in self.tx.output.side_effects:
            # one object in two places: Dynamo asks of the first alone what it holds
            first = self.tx.output.side_effects[value].source
            if first is not None and first != self.source:
                install(first, GuardBuilder.ID_MATCH)
                install(self.source, GuardBuilder.ID_MATCH)
        made = original(self, value)
        if asked:
            if type(value) in tables:
                self.tx.output.guard_on_key_order.add(self.source)
                if not any(isinstance(key, torch.Tensor) for key in value):
                    # else each key is guarded; this guard would print their contents
                    install(self.source, GuardBuilder.DICT_KEYS_MATCH)
                if type(value) is collections.OrderedDict and len(value) > 1:
                    _guard_order(self.tx, self.source, value)
            elif isinstance(value, torch.Tensor):
                _note_tensor(made, value)
        return made

    def attributes(original: Hook, self: Any, tx: Any) -> Any:
        if asks(tx) and self.source is not None:
            source = AttrSource(self.source, "__dict__")
            tx.output.guard_on_key_order.add(source)
            install(source, GuardBuilder.DICT_KEYS_MATCH)
        return original(self, tx)

    around(VariableBuilder, "__call__", build)
    around(UserDefinedObjectVariable, "get_dict_vt", attributes)


def _guard_order(tx: Any, source: Any, value: Any) -> None:
    """Guard the order of an OrderedDict, which the dict within it does not have."""
    keys = list(value)
    if not all(isinstance(key, (str, int)) for key in keys):
        refuse(tx, "it looks into an OrderedDict with keys of many kinds")

    def ordered(builder: Any, guard: Any) -> None:
        name = name_of(source)
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

    install(source, ordered)


# ---------------------------------------------------------------- which object it is


def _guard_identity() -> None:
    """What is compared with `is` remains the object that it was."""
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.symbolic_convert import compare_op_handlers
    from torch._dynamo.variables.builtin import BuiltinVariable
    from torch._dynamo.variables.constant import ConstantVariable

    def call(original: Hook, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn in (operator.is_, operator.is_not) and asks(tx):
            sides = [x.realize() for x in args]
            if not any(isinstance(x, ConstantVariable) for x in sides):
                for x in sides:
                    install(x.source, GuardBuilder.ID_MATCH)
        return original(self, tx, args, kwargs)

    around(BuiltinVariable, "call_function", call)
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
        if asks(tx):
            # of the classes that lack the name, Dynamo leaves out the first
            on_class = isinstance(self, UserDefinedClassVariable)
            kind = self.value if on_class else type(self.value)
            source = self.source if on_class else self.cls_source
            if name not in vars(kind) and source is not None:
                lacks = functools.partial(GuardBuilder.DICT_NOT_CONTAINS, key=name)
                install(TypeDictSource(source), lacks)
        return found

    def call(original: Hook, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if asks(tx):
            source = getattr(self, "source_fn", None)
            if found_at(tx, source) is self.fn:
                install(source, GuardBuilder.CLOSURE_MATCH)
        return original(self, tx, args, kwargs)

    around(UserMethodVariable, "call_function", call)
    around(UserDefinedClassVariable, "get_source_by_walking_mro", walk)
    around(UserDefinedObjectVariable, "get_source_by_walking_mro", walk)


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

    around(OptimizerVariable, "call_method", call)


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
        if asks(tx) and self.source is not None:
            source = AttrSource(self.source, "requires_grad")
            install(source, GuardBuilder.CONSTANT_MATCH)
        return original(self, tx)

    def attribute(original: Hook, self: Any, tx: Any, name: str) -> Any:
        found = original(self, tx, name)
        known = f"attr_{name}" in METADATA or name in ("grad", "requires_grad")
        if traces_own() and not known and isinstance(found, ConstantVariable):
            source = self.source and AttrSource(self.source, name)
            value = found.as_python_constant()
            if source is None or found_at(tx, source) is not value:
                refuse(tx, f"it reads {name!r} of a tensor")
            install(source, GuardBuilder.CONSTANT_MATCH)
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

    around(TensorVariable, "var_getattr", attribute)
    around(TensorVariable, "call_method", method)
    around(TensorVariable, "method_attr_requires_grad", wants_gradient)
    for name in METADATA:
        if hasattr(TensorVariable, f"method_{name}"):
            around(TensorVariable, f"method_{name}", asked)


SOURCE, GUARDED = "fuseopt_source", "fuseopt_guarded"


def _guard_inputs(node: Any, kind: Any) -> None:
    """Guard the parameters and the state that a tensor is computed from."""
    left = [node]
    while left:
        now = left.pop()
        if not now.meta.get(GUARDED):
            now.meta[GUARDED] = True
            install(now.meta.get(SOURCE), kind)
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
        if traces_own():
            node = self.proxy.node
            while node.op == "call_method" and node.target.endswith("_"):
                node = node.args[0]
            install(self.source, GuardBuilder.TYPE_MATCH)
            if KIND in node.meta:
                return node.meta[KIND]
        return original(self)

    around(TensorVariable, "python_type", kind)

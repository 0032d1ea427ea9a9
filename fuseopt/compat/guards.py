"""Guards that Dynamo lacks, added where it traces a step.

Dynamo's trace of a step depends on facts that none of its guards check: that a name is
absent, in which order a dict has its keys, which object something is, which function a
class holds. Each hook here adds a guard of Dynamo's where the trace depends on such a
fact; Dynamo's compiled guards then check it at each call. torch.optim's own code
depends on none of these facts, and its traces are left alone.

Checked with torch 2.13, and by name with 2.11. Where torch lacks the function that a
hook relies on, that hook is left out, and Dynamo has only its own guards.
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
    """Guard the absence of names that objects lack, and of keys that dicts lack."""
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
        answer = original(self, tx, name)
        if asks(tx) and self.source is not None:
            install(*attribute_guard(GuardBuilder, self.source, name))
        return answer

    for kind in set(all_kinds(VariableTracker)):
        if "var_getattr" in vars(kind):
            around(kind, "var_getattr", look)
        if "call_obj_hasattr" in vars(kind):
            around(kind, "call_obj_hasattr", ask)


def attribute_guard(builder: Any, source: Any, name: str) -> tuple[Any, Any]:
    """A guard on whether the object at a source has an attribute: (source, kind).

    torch 2.11 puts it at the attribute's source; later versions take its name.
    """
    from torch._dynamo.source import AttrSource

    if "attr" in inspect.signature(builder.HASATTR).parameters:
        return source, functools.partial(builder.HASATTR, attr=name)
    return AttrSource(source, name), builder.HASATTR


# ---------------------------------------------------------------- what containers hold


def _guard_contents() -> None:
    """Guard the keys of each dict that is read, and their order.

    The same holds for an object's `__dict__`, where the step reads that.
    """
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    tables = (dict, collections.OrderedDict, collections.defaultdict)

    def build(original: Hook, self: Any, value: Any) -> Any:
        asked = asks(self.tx)
        if asked and value in self.tx.output.side_effects:
            # one object in two places: Dynamo guards its contents at the first alone
            first = self.tx.output.side_effects[value].source
            if first is not None and first != self.source:
                install(first, GuardBuilder.ID_MATCH)
                install(self.source, GuardBuilder.ID_MATCH)
        variable = original(self, value)
        if asked:
            if type(value) in tables:
                self.tx.output.guard_on_key_order.add(self.source)
                if not any(isinstance(key, torch.Tensor) for key in value):
                    # else each key is guarded; this guard would print their contents
                    install(self.source, GuardBuilder.DICT_KEYS_MATCH)
                if type(value) is collections.OrderedDict and len(value) > 1:
                    _guard_order(self.tx, self.source, value)
            elif isinstance(value, torch.Tensor):
                _note_tensor(variable, value)
        return variable

    def attributes(original: Hook, self: Any, tx: Any) -> Any:
        if asks(tx) and self.source is not None:
            source = AttrSource(self.source, "__dict__")
            tx.output.guard_on_key_order.add(source)
            install(source, GuardBuilder.DICT_KEYS_MATCH)
        return original(self, tx)

    around(VariableBuilder, "__call__", build)
    around(UserDefinedObjectVariable, "get_dict_vt", attributes)


def _guard_order(tx: Any, source: Any, value: Any) -> None:
    """Guard the order of an OrderedDict's keys, which differs from that of the plain
    dict within it.
    """
    keys = list(value)
    if not all(isinstance(key, (str, int)) for key in keys):
        refuse(tx, "it looks into an OrderedDict with keys of many kinds")

    def ordered(builder: Any, guard: Any) -> None:
        name = name_of(source)
        lookup = compile(name, name, "eval")
        globals_ = builder.scope["G"]

        def same(local: Any) -> bool:
            return list(eval(lookup, {"L": local, "G": globals_})) == keys

        add = builder.guard_manager.root.add_lambda_guard
        parts = [f"list({name}) == {keys}"]
        try:
            add(same, parts, guard.user_stack)
        except TypeError:  # as before torch 2.13
            add(same, parts)

    install(source, ordered)


# ---------------------------------------------------------------- which object it is


def _guard_identity() -> None:
    """Guard the identity of objects that are compared with `is`."""
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
    # the table of operators holds the method from before the hook
    for name in ("is", "is not"):
        compare_op_handlers[name] = compare_op_handlers[name].__self__.call_function


def _guard_places() -> None:
    """Keep the guards on identity that Dynamo leaves out for sources in an optimizer.

    Dynamo reads the state of a parameter by its position among the keys of `state`, and
    leaves out the guard that the key at this position is that parameter: a state that
    was deleted and made anew stands last, and each other one would be taken for its
    neighbour's. Nor does Dynamo guard which of the parameters an attribute is.
    """
    guards: Any = importlib.import_module("torch._dynamo.guards")
    left_out = guards.is_from_optimizer_source

    @functools.wraps(left_out)
    def asked(source: Any) -> bool:
        return not traces_step() and bool(left_out(source))

    guards.is_from_optimizer_source = asked


# ---------------------------------------------------------------- what is called


def _guard_methods() -> None:
    """Guard the code of each method that is called, and the class that defines it."""
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import TypeDictSource
    from torch._dynamo.variables.functions import UserMethodVariable
    from torch._dynamo.variables.user_defined import (
        UserDefinedClassVariable,
        UserDefinedObjectVariable,
    )

    def walk(original: Hook, self: Any, tx: Any, name: str) -> Any:
        defined_at = original(self, tx, name)
        if asks(tx):
            # Dynamo guards that classes lack the name, but for the first of them
            on_class = isinstance(self, UserDefinedClassVariable)
            kind = self.value if on_class else type(self.value)
            source = self.source if on_class else self.cls_source
            if name not in vars(kind) and source is not None:
                lacks = functools.partial(GuardBuilder.DICT_NOT_CONTAINS, key=name)
                install(TypeDictSource(source), lacks)
        return defined_at

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
    """Have `_init_group` of a class that is not torch's traced like any other method.

    Dynamo runs it instead of tracing it, and guards nothing that it reads.
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


#: Attributes and methods of a tensor whose values a trace takes for constants, as names
#: of methods of Dynamo's variables.
METADATA = (
    *("attr_ndim", "attr_dtype", "attr_device", "attr_layout", "attr_is_cuda"),
    *("attr_shape", "attr_is_quantized", "attr_is_sparse", "attr_is_nested", "size"),
    *("stride", "numel", "dim", "is_floating_point", "is_complex", "is_contiguous"),
    *("type", "get_device", "element_size", "__len__", "__iter__"),
)


def _guard_metadata() -> None:
    """Guard the metadata that a step reads of a tensor which Dynamo guards by identity
    alone.
    """
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
        result = original(self, tx, name)
        is_guarded = f"attr_{name}" in METADATA or name in ("grad", "requires_grad")
        if traces_own() and not is_guarded and isinstance(result, ConstantVariable):
            source = self.source and AttrSource(self.source, name)
            value = result.as_python_constant()
            if source is None or found_at(tx, source) is not value:
                refuse(tx, f"it reads {name!r} of a tensor")
            install(source, GuardBuilder.CONSTANT_MATCH)
        return result

    def method(original: Hook, self: Any, tx: Any, name: str, *args: Any) -> Any:
        result = original(self, tx, name, *args)
        if (
            traces_own()
            and name not in METADATA
            and isinstance(result, ConstantVariable)
        ):
            if result.as_python_constant() is not None:
                refuse(tx, f"it calls {name!r} of a tensor")
        return result

    around(TensorVariable, "var_getattr", attribute)
    around(TensorVariable, "call_method", method)
    around(TensorVariable, "method_attr_requires_grad", wants_gradient)
    for name in METADATA:
        if hasattr(TensorVariable, f"method_{name}"):
            around(TensorVariable, f"method_{name}", asked)


SOURCE, GUARDED = "fuseopt_source", "fuseopt_guarded"


def _guard_inputs(node: Any, kind: Any) -> None:
    """Guard the parameters and the state that a node's tensor is computed from."""
    pending = [node]
    while pending:
        source = pending.pop()
        if not source.meta.get(GUARDED):
            source.meta[GUARDED] = True
            install(source.meta.get(SOURCE), kind)
            pending += source.all_input_nodes


KIND = "fuseopt_kind"


def _note_tensor(variable: Any, value: torch.Tensor) -> None:
    """Note the source and the class of a tensor that Dynamo's graph holds as an
    attribute: Dynamo notes neither.
    """
    proxy = getattr(variable, "proxy", None)
    if proxy is None or proxy.node.op != "get_attr":
        return
    proxy.node.meta.setdefault(SOURCE, variable.source)
    if variable.python_type() is not type(value):
        proxy.node.meta[KIND] = type(value)


def _keep_kinds() -> None:
    """Let `type(p)` be a parameter's class, also one that is not torch's, guarded."""
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

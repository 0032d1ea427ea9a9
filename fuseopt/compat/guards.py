"""Guards that Dynamo lacks, added where it traces a step.

Dynamo's trace of a step depends on facts that none of its guards check. Examples are
the absence of a name, the order of a dict's keys, an object's identity, and a class's
function. Each hook here adds a guard of Dynamo where the trace depends on such a fact;
Dynamo's compiled guards then check it at each call. torch.optim's own code depends on
none of these facts, and its traces get no such guards.

Without one of these hooks, a step of a class outside of torch runs in eager. Steps
whose code provably depends on no such fact are excepted (plain_code.py).
"""

from __future__ import annotations

import collections
import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch

from .hooks import add_lambda, all_kinds, found_at, install, is_ours, name_of
from .leaving import refuse
from .names import attribute_of, find, takes
from .outcomes import node_of, settled
from .patches import Hook, Patch, Patcher, patch
from .plain import OPTIM
from .tracing import traces_own, traces_step

#: The loss of a step without a guard.
LOST = "steps of classes that are not torch's run in eager, unless they are plain code"


def guard(name: str, gives: str) -> Callable[[Hook], Patch]:
    """Make a capability of a function that puts hooks which add a guard."""
    return patch(name, gives, LOST, bits=True)


# ---------------------------------------------------------------- absence


@guard("guard-misses", "a guard that a name which an object lacks is still absent")
def MISSES(patcher: Patcher) -> None:
    """Guard the absence of names that objects lack, and of keys that dicts lack."""
    ObservedAttributeError = find("torch._dynamo.exc:ObservedAttributeError")
    GuardBuilder = find("torch._dynamo.guards:GuardBuilder")
    base = find("torch._dynamo.variables.base:VariableTracker")
    find("torch._dynamo.guards:GuardBuilder.HASATTR")
    read = attribute_of(base, "tp_getattro_impl", "var_getattr")

    def read_attribute(original: Hook, self: Any, tx: Any, name: str) -> Any:
        try:
            return original(self, tx, name)
        except ObservedAttributeError:
            if is_ours(tx) and self.source is not None:
                install(*attribute_guard(GuardBuilder, self.source, name))
            raise

    def check_name(original: Hook, self: Any, tx: Any, name: str) -> Any:
        answer = original(self, tx, name)
        if is_ours(tx) and self.source is not None:
            install(*attribute_guard(GuardBuilder, self.source, name))
        return answer

    for kind in set(all_kinds(base)):
        if read in vars(kind):
            patcher.around(kind, read, read_attribute, "self", "tx", "name")
        if "call_obj_hasattr" in vars(kind):
            patcher.around(kind, "call_obj_hasattr", check_name, "self", "tx", "name")


def attribute_guard(builder: Any, source: Any, name: str) -> tuple[Any, Any]:
    """Return a guard on whether the object at a source has an attribute: (source,
    kind).

    torch 2.11 puts it at the attribute's source; later versions take its name.
    """
    if "attr" in inspect.signature(builder.HASATTR).parameters:
        return source, functools.partial(builder.HASATTR, attr=name)
    return find("torch._dynamo.source:AttrSource")(source, name), builder.HASATTR


# ---------------------------------------------------------------- containers


@guard("guard-contents", "a guard on the keys of each dict that is read, in order")
def CONTENTS(patcher: Patcher) -> None:
    """Guard the keys of each dict that is read, and their order.

    The same holds for an object's `__dict__`, if the step reads it.
    """
    GuardBuilder = find("torch._dynamo.guards:GuardBuilder")
    AttrSource = find("torch._dynamo.source:AttrSource")
    builder = find("torch._dynamo.variables.builder:VariableBuilder")
    held = find("torch._dynamo.variables.user_defined:UserDefinedObjectVariable")
    find("torch._dynamo.guards:GuardBuilder.DICT_KEYS_MATCH")
    find("torch._dynamo.guards:GuardBuilder.ID_MATCH")
    tables = (dict, collections.OrderedDict, collections.defaultdict)

    def build(original: Hook, self: Any, value: Any) -> Any:
        ours = is_ours(self.tx)
        if ours and value in self.tx.output.side_effects:
            # for one object in two places, Dynamo guards its contents only at the first
            first = self.tx.output.side_effects[value].source
            if first is not None and first != self.source:
                install(first, GuardBuilder.ID_MATCH)
                install(self.source, GuardBuilder.ID_MATCH)
        variable = original(self, value)
        if ours:
            if type(value) in tables:
                self.tx.output.guard_on_key_order.add(self.source)
                if not any(isinstance(key, torch.Tensor) for key in value):
                    # else each key has a guard; this guard would print their contents
                    install(self.source, GuardBuilder.DICT_KEYS_MATCH)
                if type(value) is collections.OrderedDict and len(value) > 1:
                    _guard_order(self.tx, self.source, value)
            elif isinstance(value, torch.Tensor):
                _note_tensor(variable, value)
        return variable

    def guard_attributes(variable: Any, tx: Any) -> None:
        if is_ours(tx) and variable.source is not None:
            source = AttrSource(variable.source, "__dict__")
            tx.output.guard_on_key_order.add(source)
            install(source, GuardBuilder.DICT_KEYS_MATCH)

    def attributes(original: Hook, self: Any, tx: Any) -> Any:
        guard_attributes(self, tx)
        return original(self, tx)

    def read(original: Hook, self: Any, tx: Any, name: str) -> Any:
        if name == "__dict__":
            guard_attributes(self, tx)
        return original(self, tx, name)

    patcher.around(builder, "__call__", build, "self", "value")
    if hasattr(held, "get_dict_vt"):
        patcher.around(held, "get_dict_vt", attributes, "self", "tx")
    else:  # torch 2.11
        patcher.around(held, "var_getattr", read, "self", "tx", "name")


def _guard_order(tx: Any, source: Any, value: Any) -> None:
    """Guard the order of an OrderedDict's keys, which differs from the inner dict's."""
    keys = list(value)
    if not all(isinstance(key, (str, int)) for key in keys):
        refuse(tx, "it reads an OrderedDict with keys of many kinds")

    def ordered(builder: Any, guard: Any) -> None:
        name = name_of(source)
        lookup = compile(name, name, "eval")
        globals_ = builder.scope["G"]

        def same(local: Any) -> bool:
            return list(eval(lookup, {"L": local, "G": globals_})) == keys

        root, parts = builder.guard_manager.root, [f"list({name}) == {keys}"]
        add_lambda(root, same, parts, guard.user_stack)

    install(source, ordered)


# ---------------------------------------------------------------- which object it is


@guard("guard-identity", "a guard on objects that are compared with `is`")
def IDENTITY(patcher: Patcher) -> None:
    """Guard the identity of objects that are compared with `is`."""
    GuardBuilder = find("torch._dynamo.guards:GuardBuilder")
    handlers = find("torch._dynamo.symbolic_convert:compare_op_handlers")
    builtin = find("torch._dynamo.variables.builtin:BuiltinVariable")
    ConstantVariable = find("torch._dynamo.variables.constant:ConstantVariable")
    find("torch._dynamo.guards:GuardBuilder.ID_MATCH")

    def call(original: Hook, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn in (operator.is_, operator.is_not) and is_ours(tx):
            sides = [x.realize() for x in args]
            args = sides = _settled_sides(tx, sides)
            if not any(isinstance(x, ConstantVariable) for x in sides):
                for x in sides:
                    if node_of(x) is None:  # a number never is another object
                        install(x.source, GuardBuilder.ID_MATCH)
        return original(self, tx, args, kwargs)

    patcher.around(builtin, "call_function", call, "self", "tx", "args", "kwargs")
    # the table of operators holds the method from before the hook
    for name in ("is", "is not"):
        function = operator.is_ if name == "is" else operator.is_not
        patcher.item(handlers, name, _late(builtin(function)))


def _settled_sides(tx: Any, sides: list[Any]) -> list[Any]:
    """Return the operands of `is`, with a truth value as a constant.

    Refuses two numbers of which one is symbolic: Dynamo makes other objects of them
    than Python has.
    """
    if not any(map(node_of, sides)):
        return sides
    if not all(node_of(x) is not None or _is_number(x) for x in sides):
        return sides  # a number never is such an object
    truths = [settled(tx, x) if x.python_type() is bool else x for x in sides]
    now_known = [
        x if now is None else now for x, now in zip(sides, truths, strict=True)
    ]
    if any(node_of(x) is not None or x.python_type() is not bool for x in now_known):
        refuse(tx, "it compares the identity of numbers that change")
    return now_known


def _is_number(x: Any) -> bool:
    return bool(x.is_python_constant()) and isinstance(
        x.as_python_constant(), (int, float)
    )


def _late(variable: Any) -> Hook:
    """Return a function that looks up the method of Dynamo's variable at each call."""

    def compare(tx: Any, args: Any, kwargs: Any) -> Any:
        return variable.call_function(tx, args, kwargs)

    return compare


@guard("guard-places", "a guard on which parameter a state belongs to")
def PLACES(patcher: Patcher) -> None:
    """Keep the guards on identity that Dynamo omits for sources in an optimizer.

    Dynamo reads the state of a parameter by its position among the keys of `state`. It
    omits the guard that the key at this position is that parameter. A state that was
    deleted and made again is last, so each later one would be mistaken for its
    neighbour's. Dynamo also does not guard which of the parameters an attribute is.
    """
    guards = find("torch._dynamo.guards")

    def from_optimizer(original: Hook, source: Any) -> bool:
        return not traces_step() and bool(original(source))

    patcher.around(guards, "is_from_optimizer_source", from_optimizer, "source")


# ---------------------------------------------------------------- methods


@guard("guard-methods", "a guard on the code of each method that is called")
def METHODS(patcher: Patcher) -> None:
    """Guard the code of each method that is called, and the class that defines it."""
    GuardBuilder = find("torch._dynamo.guards:GuardBuilder")
    TypeDictSource = find("torch._dynamo.source:TypeDictSource")
    method = find("torch._dynamo.variables.functions:UserMethodVariable")
    on_classes = find("torch._dynamo.variables.user_defined:UserDefinedClassVariable")
    on_objects = find("torch._dynamo.variables.user_defined:UserDefinedObjectVariable")
    translator = find("torch._dynamo.symbolic_convert:InstructionTranslator")
    lacks = find("torch._dynamo.guards:GuardBuilder.DICT_NOT_CONTAINS", None)
    if lacks is None:  # torch 2.11
        contains = find("torch._dynamo.guards:GuardBuilder.DICT_CONTAINS")
        takes(contains, "self", "guard", "key", "invert")
        lacks = functools.partial(contains, invert=True)
    find("torch._dynamo.guards:GuardBuilder.CLOSURE_MATCH")

    def walk(original: Hook, self: Any, *place: Any) -> Any:
        defined_at = original(self, *place)
        name = place[-1]  # torch 2.11 and 2.12 give no translator
        tx = place[0] if len(place) > 1 else translator.current_tx()
        if is_ours(tx):
            # Dynamo guards that classes lack the name, but for the first of them
            on_class = isinstance(self, on_classes)
            kind = self.value if on_class else type(self.value)
            source = self.source if on_class else self.cls_source
            if name not in vars(kind) and source is not None:
                guard = functools.partial(lacks, key=name)
                install(TypeDictSource(source), guard)
        return defined_at

    def call(original: Hook, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if is_ours(tx):
            source = getattr(self, "source_fn", None)
            if found_at(tx, source) is self.fn:
                install(source, GuardBuilder.CLOSURE_MATCH)
        return original(self, tx, args, kwargs)

    patcher.around(method, "call_function", call, "self", "tx", "args", "kwargs")
    for kind in (on_classes, on_objects):
        if hasattr(kind, "get_source_by_walking_mro"):
            patcher.around(kind, "get_source_by_walking_mro", walk, "self")


@guard("traced-groups", "`_init_group` of classes that are not torch's is traced")
def GROUPS(patcher: Patcher) -> None:
    """Trace `_init_group` of a class outside of torch like any other method.

    Dynamo runs it instead of tracing it, and guards nothing that it reads. From torch
    2.15 on a method of this name does so, which may decline.
    """
    kind = find("torch._dynamo.variables.optimizer:OptimizerVariable")
    plain = find("torch._dynamo.variables.user_defined:UserDefinedObjectVariable")

    def is_own(value: Any) -> bool:
        function = inspect.unwrap(getattr(type(value), "_init_group", None) or is_own)
        code = getattr(function, "__code__", None)
        return code is None or not code.co_filename.startswith(OPTIM)

    def call(
        original: Hook, self: Any, tx: Any, name: str, args: Any, kwargs: Any
    ) -> Any:
        if name == "_init_group" and traces_own() and is_own(self.value):
            return plain.call_method(self, tx, name, args, kwargs)
        return original(self, tx, name, args, kwargs)

    def decline(original: Hook, self: Any, *args: Any) -> Any:
        return None if traces_own() and is_own(self.value) else original(self, *args)

    if "call_method" in vars(kind):
        names = "self", "tx", "name", "args", "kwargs"
        patcher.around(kind, "call_method", call, *names)
    else:
        find("torch._dynamo.variables.optimizer:OptimizerVariable.tp_methods")
        patcher.around(kind, "_init_group", decline, "self", "tx", "args", "kwargs")


# ---------------------------------------------------------------- tensors


#: Attributes and methods of a tensor whose values a trace treats as constants, as names
#: of methods of Dynamo's variables.
METADATA = (
    *("attr_ndim", "attr_dtype", "attr_device", "attr_layout", "attr_is_cuda"),
    *("attr_shape", "attr_is_quantized", "attr_is_sparse", "attr_is_nested", "size"),
    *("stride", "numel", "dim", "is_floating_point", "is_complex", "is_contiguous"),
    *("type", "get_device", "element_size", "__len__", "__iter__"),
)


@guard("guard-metadata", "a guard on the metadata of a tensor that a step reads")
def TENSORS(patcher: Patcher) -> None:
    """Guard the metadata that a step reads of a tensor guarded by identity alone.

    What a step reads as `p.data` gets no source. Else Dynamo reads `p.data` anew after
    a graph break or at the end, although the step has assigned it (torch 2.13).
    """
    GuardBuilder = find("torch._dynamo.guards:GuardBuilder")
    AttrSource = find("torch._dynamo.source:AttrSource")
    ConstantVariable = find("torch._dynamo.variables.constant:ConstantVariable")
    kind = find("torch._dynamo.variables.tensor:TensorVariable")
    read = attribute_of(kind, "tp_getattro_impl", "var_getattr")
    find("torch._dynamo.guards:GuardBuilder.TENSOR_MATCH")
    find("torch._dynamo.guards:GuardBuilder.CONSTANT_MATCH")

    def read_metadata(original: Hook, self: Any, *args: Any, **kwargs: Any) -> Any:
        if traces_own():
            _guard_inputs(self.proxy.node, GuardBuilder.TENSOR_MATCH)
        return original(self, *args, **kwargs)

    def wants_gradient(original: Hook, self: Any, tx: Any) -> Any:
        if is_ours(tx) and self.source is not None:
            source = AttrSource(self.source, "requires_grad")
            install(source, GuardBuilder.CONSTANT_MATCH)
        return original(self, tx)

    def attribute(original: Hook, self: Any, tx: Any, name: str) -> Any:
        result = original(self, tx, name)
        if name == "data" and traces_own():
            result.source = None  # code that reads it anew gets what is assigned later
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

    patcher.around(kind, read, attribute, "self", "tx", "name")
    patcher.around(kind, "call_method", method, "self", "tx", "name")
    patcher.around(kind, "method_attr_requires_grad", wants_gradient, "self", "tx")
    for name in METADATA:
        patcher.around(kind, f"method_{name}", read_metadata, "self")


SOURCE, GUARDED = "fuseopt_source", "fuseopt_guarded"


def _guard_inputs(node: Any, kind: Any) -> None:
    """Guard the parameters and the state from which a node's tensor is computed."""
    pending = [node]
    while pending:
        source = pending.pop()
        if not source.meta.get(GUARDED):
            source.meta[GUARDED] = True
            install(source.meta.get(SOURCE), kind)
            pending += source.all_input_nodes


KIND = "fuseopt_kind"


def _note_tensor(variable: Any, value: torch.Tensor) -> None:
    """Record the source and the class of a tensor that is an attribute of the graph.

    Dynamo records neither.
    """
    proxy = getattr(variable, "proxy", None)
    if proxy is None or proxy.node.op != "get_attr":
        return
    proxy.node.meta.setdefault(SOURCE, variable.source)
    if variable.python_type() is not type(value):
        proxy.node.meta[KIND] = type(value)


@guard("guard-kinds", "`type(p)` is a parameter's class, guarded")
def KINDS(patcher: Patcher) -> None:
    """Make `type(p)` a parameter's class, with a guard, even outside of torch."""
    GuardBuilder = find("torch._dynamo.guards:GuardBuilder")
    variable = find("torch._dynamo.variables.tensor:TensorVariable")
    find("torch._dynamo.guards:GuardBuilder.TYPE_MATCH")

    def kind(original: Hook, self: Any) -> Any:
        if traces_own():
            node = self.proxy.node
            while node.op == "call_method" and node.target.endswith("_"):
                node = node.args[0]
            install(self.source, GuardBuilder.TYPE_MATCH)
            if KIND in node.meta:
                return node.meta[KIND]
        return original(self)

    patcher.around(variable, "python_type", kind, "self")

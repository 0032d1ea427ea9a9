"""Refuse effects of a step that Dynamo would change.

If the trace of a step meets such code, the trace ends and the step runs in eager. Its
bits are eager's, and fuseopt reports the line to the user.
"""

from __future__ import annotations

import dis
import sys
from types import CodeType, FunctionType
from typing import Any

from .guards import guard
from .hooks import is_ours
from .leaving import refuse
from .names import attribute_of, either, find
from .patches import Hook, Patcher
from .tracing import tracing


@guard("refused-class-writes", "what a step writes to a class is refused")
def CLASS_WRITES(patcher: Patcher) -> None:
    """Refuse a write to an attribute of a class.

    Through instances and derived classes, Dynamo reads the value from before the step.
    """
    effects = find("torch._dynamo.side_effects:SideEffects")
    classes = find("torch._dynamo.variables.user_defined:UserDefinedClassVariable")

    def stored(original: Hook, self: Any, item: Any, *args: Any, **more: Any) -> Any:
        if isinstance(item, classes):
            tx = self.output_graph_weakref().root_tx
            if is_ours(tx):
                refuse(tx, f"it writes an attribute of the class {item.value.__name__}")
        return original(self, item, *args, **more)

    patcher.around(effects, "store_attr", stored, "self", "item", "name", "value")


@guard("refused-finalizers", "objects that run code at their end are refused")
def FINALIZERS(patcher: Patcher) -> None:
    """Refuse an object of a class with `__del__`.

    Dynamo makes a second object, which is finalized while it traces.
    """
    classes = find("torch._dynamo.variables.user_defined:UserDefinedClassVariable")

    def call(original: Hook, self: Any, tx: Any, *args: Any) -> Any:
        if is_ours(tx) and hasattr(self.value, "__del__"):
            refuse(tx, f"it makes a {self.value.__name__}, which has a __del__")
        return original(self, tx, *args)

    patcher.around(classes, "call_function", call, "self", "tx")


@guard("refused-kept-iterators", "iterators that a step keeps are refused")
def KEPT_ITERATORS(patcher: Patcher) -> None:
    """Refuse an iterator that outlives the step.

    Dynamo keeps the rest of a list, and all that a generator would yield, as the
    iterator of a tuple.
    """
    effects = find("torch._dynamo.side_effects:SideEffects")
    iterators = (
        find("torch._dynamo.variables.lists:ListIteratorVariable"),
        find("torch._dynamo.variables.functions:LocalGeneratorObjectVariable"),
    )

    def writing(original: Hook, self: Any, *args: Any, **more: Any) -> Any:
        before, tracing.writing = tracing.writing, True
        try:
            return original(self, *args, **more)
        finally:
            tracing.writing = before

    def rebuild(original: Hook, self: Any, codegen: Any) -> Any:
        if tracing.writing and is_ours(codegen.tx):
            refuse(codegen.tx, "it keeps an iterator")
        return original(self, codegen)

    patcher.around(effects, "codegen_save_tempvars", writing, "self")
    patcher.around(effects, "codegen_update_mutated", writing, "self")
    for kind in iterators:
        patcher.around(kind, "reconstruct", rebuild, "self", "codegen")


@guard("refused-left-generators", "generators that a step leaves half-way are refused")
def LEFT_GENERATORS(patcher: Patcher) -> None:
    """Refuse to leave a started generator whose code may handle that.

    Python closes it, which runs each `finally` and leaves each `with`; Dynamo does not.
    """
    made = find("torch._dynamo.variables.functions:LocalGeneratorObjectVariable")
    output = find("torch._dynamo.output_graph:OutputGraph")
    # before torch 2.14 two methods report it
    suspended = attribute_of(made, "_frame_state_suspended", "_is_generator_exhausted")
    if suspended == "_is_generator_exhausted":
        attribute_of(made, "_is_generator_just_started")

    def left(x: Any) -> bool:
        if suspended == "_frame_state_suspended":
            return bool(x._frame_state_suspended())
        return not (x._is_generator_exhausted() or x._is_generator_just_started())

    def make(original: Hook, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        tx = self.inline_tracer
        if is_ours(tx) and handles(self.code):
            vars(tx.output).setdefault("fuseopt_generators", []).append(self)

    def compile(original: Hook, self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        for x in vars(self).get("fuseopt_generators", ()):
            if left(x):
                refuse(tx, f"it leaves the generator {x.code.co_name} before its end")
        return original(self, tx, *args, **kwargs)

    patcher.around(made, "__init__", make, "self", "code", "f_globals", "inline_tracer")
    patcher.around(output, "compile_subgraph", compile, "self", "tx")


def handles(code: CodeType) -> bool:
    """Does a generator's code have a `try`, or a `with`?"""
    instructions = list(dis.get_instructions(code))
    if sys.version_info < (3, 11):
        return any(x.opname.startswith("SETUP_") for x in instructions)
    at = {x.offset: x for x in instructions}
    table: Any = dis.Bytecode(code)
    targets = [at[entry.target] for entry in table.exception_entries]
    # from Python 3.12 on, the handler that converts StopIteration is one, too
    return any((x.opname, x.arg) != ("CALL_INTRINSIC_1", 3) for x in targets)


@guard("refused-hashes", "keys that hash or compare themselves are refused")
def HASHES(patcher: Patcher) -> None:
    """Refuse a key of a dict, or item of a set, whose class defines its hash or
    equality.

    Dynamo and its guards call these methods a different number of times than Python.
    """
    key = either(
        "torch._dynamo.variables.hashable:HashableTracker",
        "torch._dynamo.variables.dicts:ConstDictVariable._HashableTracker",
    )
    lazy = find("torch._dynamo.variables.lazy:LazyVariableTracker")
    translator = find("torch._dynamo.symbolic_convert:InstructionTranslator")
    attribute_of(translator, "current_tx")

    def make(original: Hook, self: Any, vt: Any) -> None:
        waits = isinstance(vt, lazy) and not vt.is_realized()
        value = vt.original_value() if waits else getattr(vt.realize(), "value", None)
        kind = type(value)
        if hashes_itself(kind):
            tx = translator.current_tx()
            if is_ours(tx):
                refuse(tx, f"it has a key of {kind.__name__}, which has its own hash")
        original(self, vt)

    patcher.around(key, "__init__", make, "self", "vt")


def hashes_itself(kind: type) -> bool:
    """Does user code define the hash or the equality of an object?"""
    for name in ("__hash__", "__eq__"):
        method = getattr(kind, name, None)
        # methods that dataclasses generate have no effects
        if isinstance(method, FunctionType) and method.__code__.co_filename[:1] != "<":
            home = (method.__module__ or "").partition(".")[0]
            if home not in ("torch", "numpy", *sys.stdlib_module_names):
                return True
    return False

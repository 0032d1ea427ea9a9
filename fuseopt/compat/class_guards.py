"""Guard the contents of classes and modules where Dynamo traces a step.

Dynamo guards the identity of a class, and those of its attributes to which it has a
source. It does not guard the order of bases, the attributes of an object that the step
creates, the result of `isinstance` for a class that defines `__instancecheck__`, nor
that no global of the module hides a builtin.
"""

from __future__ import annotations

import abc
import contextlib
import enum
import functools
import sys
import weakref
from typing import Any

import torch

from .dynamo import refuse
from .hazards import VALUES
from .hooks import Hook, around, ask, asks


def guard_builtins() -> None:
    """Guard that no global of the module hides a builtin which the step names."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    def load(original: Hook, self: Any, name: Any) -> Any:
        if asks(self):
            globals_ = self.f_globals
            names_by_module = vars(self.output).setdefault("fuseopt_builtins", {})
            names = names_by_module.setdefault(id(globals_), set())
            names.add(name)
            what = f"{globals_.get('__name__')!r} hides none of the builtins"
            ask(self, what, functools.partial(names.isdisjoint, globals_))
        return original(self, name)

    around(InstructionTranslatorBase, "load_builtin_from_argval", load)


#: Packages whose classes nobody changes while a step runs.
STEADY_PACKAGES = ("torch", "numpy", "builtins", __name__.partition(".")[0])


class Classes:
    """A record of the attributes of classes, by identity, to be compared later.

    It keeps none of them alive. Numbers and strings may change: Dynamo guards these.
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
        attributes = vars(kind)
        values = [
            id(type(x) if isinstance(x, (*VALUES, type(None))) else x)
            for x in attributes.values()
        ]
        codes = [id(getattr(_bare(x), "__code__", None)) for x in attributes.values()]
        return id(kind.__mro__), [*attributes], values, codes

    def same(self) -> bool:
        if self._gone:
            return False
        for number, kind in self._kinds.items():
            referent = kind()
            if referent is None or self._look(referent) != self._held[number]:
                return False
        return True


def _bare(x: Any) -> Any:
    """The function in a property, a class method, a static method."""
    return getattr(x, "fget", None) or getattr(x, "__func__", x)


def _steady(kind: type) -> bool:
    """Does a class belong to the standard library, torch, numpy or this package?"""
    top = kind.__module__.partition(".")[0]
    return top in sys.stdlib_module_names or top in STEADY_PACKAGES


def _note_class(tx: Any, value: Any) -> None:
    """Guard what the class of an object holds, and a class itself."""
    kind = value if isinstance(value, type) else type(value)
    if _steady(kind):
        return
    classes = vars(tx.output).get("fuseopt_classes")
    if classes is None:
        classes = Classes()
        tx.output.fuseopt_classes = classes
        ask(tx, "classes hold what they held", classes.same)
    classes.note(kind)


def guard_classes() -> None:
    """A class that a step uses, or whose objects it uses, holds what it held."""
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.user_defined import UserDefinedClassVariable

    def build(original: Hook, self: Any, value: Any) -> Any:
        variable = original(self, value)
        if asks(self.tx):
            _note_class(self.tx, value)
        return variable

    def call(original: Hook, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if asks(tx):
            _note_class(tx, self.value)
        return original(self, tx, args, kwargs)

    around(VariableBuilder, "__call__", build)
    around(UserDefinedClassVariable, "call_function", call)


#: Classes of classes that answer for themselves, but the same at each time.
STEADY = (type, enum.EnumMeta, torch._C._TensorMeta)


def _guard_kinds(tx: Any, kinds: Any) -> None:
    try:
        constant = kinds.as_python_constant()
    except NotImplementedError:
        return
    pending = [constant]
    while pending:
        kind = pending.pop()
        if isinstance(kind, tuple):
            pending += kind
            continue
        check = getattr(type(kind), "__instancecheck__", type.__instancecheck__)
        if check is abc.ABCMeta.__instancecheck__:
            # whoever registers with any of them changes this
            ask(tx, "no class registers", _Registered().same)
        elif isinstance(kind, type) and not any(
            check is x.__instancecheck__ for x in (*STEADY, type(torch.nn.Parameter))
        ):
            refuse(tx, f"it asks {kind.__name__} who is an instance")


class _Registered:
    """What abstract classes say of how often a class registered with one of them."""

    def __init__(self) -> None:
        self._token = abc.get_cache_token()

    def same(self) -> bool:
        return abc.get_cache_token() == self._token


def guard_instances() -> None:
    """Who is an instance of a class, or a subclass, remains so."""
    from torch._dynamo.variables.builtin import BuiltinVariable

    def call(original: Hook, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn in (isinstance, issubclass) and len(args) == 2 and asks(tx):
            _guard_kinds(tx, args[1])
        return original(self, tx, args, kwargs)

    around(BuiltinVariable, "call_function", call)

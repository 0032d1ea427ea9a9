"""Guard the contents of classes and modules where Dynamo traces a step.

Dynamo guards the identity of a class, and of those attributes to which it has a source.
It does not guard the order of bases, nor the attributes of an object that the step
creates. It does not guard the result of `isinstance` for a class that defines
`__instancecheck__`, nor that no global of the module hides a builtin.
"""

from __future__ import annotations

import abc
import contextlib
import enum
import functools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .guards import guard
from .hazards import VALUES
from .hooks import guard_once, is_ours
from .leaving import refuse
from .names import find
from .patches import Hook, Patcher


@guard("guard-builtins", "a guard that no global hides a builtin")
def BUILTINS(patcher: Patcher) -> None:
    """Guard that no global of the module hides a builtin which the step names."""
    kind = find("torch._dynamo.symbolic_convert:InstructionTranslatorBase")

    def load(original: Hook, self: Any, name: Any) -> Any:
        if is_ours(self):
            globals_ = self.f_globals
            names_by_module = vars(self.output).setdefault("fuseopt_builtins", {})
            names = names_by_module.setdefault(id(globals_), set())
            names.add(name)
            what = f"{globals_.get('__name__')!r} hides none of the builtins"
            guard_once(self, what, functools.partial(names.isdisjoint, globals_))
        return original(self, name)

    patcher.around(kind, "load_builtin_from_argval", load, "self", "argval")


#: Packages whose classes stay unchanged while a step runs.
STEADY_PACKAGES = ("torch", "numpy", "builtins", __name__.partition(".")[0])


class Classes:
    """Record of the attributes of classes, by identity, for a later comparison.

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
                self._held[id(one)] = self._read(one)
                for value in vars(one).values():
                    with contextlib.suppress(TypeError):
                        self._weak.append(weakref.ref(value, self._gone.append))

    @staticmethod
    def _read(kind: type) -> tuple[int, list[str], list[int], list[int]]:
        attributes = vars(kind)
        values = [
            id(type(x) if isinstance(x, (*VALUES, type(None))) else x)
            for x in attributes.values()
        ]
        bare = map(_bare, attributes.values())
        codes = [
            id(x.__code__ if type(x) is types.FunctionType else None) for x in bare
        ]
        return id(kind.__mro__), [*attributes], values, codes

    def same(self) -> bool:
        if self._gone:
            return False
        for number, kind in self._kinds.items():
            referent = kind()
            if referent is None or self._read(referent) != self._held[number]:
                return False
        return True


def _bare(x: Any) -> Any:
    """Return the function in a property, a class method or a static method.

    Any other object is returned unchanged, without running user code.
    """
    kind = type(x)
    if issubclass(kind, property):
        return x.fget
    return x.__func__ if issubclass(kind, (staticmethod, classmethod)) else x


def _steady(kind: type) -> bool:
    """Does a class belong to the standard library, torch, numpy or this package?"""
    top = kind.__module__.partition(".")[0]
    return top in sys.stdlib_module_names or top in STEADY_PACKAGES


def _note_class(tx: Any, value: Any) -> None:
    """Guard the contents of an object's class, or of a class itself."""
    kind = value if isinstance(value, type) else type(value)
    if _steady(kind):
        return
    classes = vars(tx.output).get("fuseopt_classes")
    if classes is None:
        classes = Classes()
        tx.output.fuseopt_classes = classes
        guard_once(tx, "classes hold what they held", classes.same)
    classes.note(kind)


@guard("guard-classes", "a guard on what the classes hold that a step uses")
def CLASSES(patcher: Patcher) -> None:
    """Guard the contents of each class that a step uses, or whose objects it uses."""
    builder = find("torch._dynamo.variables.builder:VariableBuilder")
    kind = find("torch._dynamo.variables.user_defined:UserDefinedClassVariable")

    def build(original: Hook, self: Any, value: Any) -> Any:
        variable = original(self, value)
        if is_ours(self.tx):
            _note_class(self.tx, value)
        return variable

    def call(original: Hook, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if is_ours(tx):
            _note_class(tx, self.value)
        return original(self, tx, args, kwargs)

    patcher.around(builder, "__call__", build, "self", "value")
    patcher.around(kind, "call_function", call, "self", "tx", "args", "kwargs")


#: Metaclasses that define such checks, with stable results.
STEADY = (type, enum.EnumMeta, type(torch.Tensor))


def _guard_kinds(tx: Any, kinds: Any, tested: Any, function: Any) -> None:
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
            # a class registered with it may change this
            _note_answer(tx, kind, tested, function)
        elif isinstance(kind, type) and not any(
            check is x.__instancecheck__ for x in (*STEADY, type(torch.nn.Parameter))
        ):
            refuse(tx, f"it tests an instance with {kind.__name__}")


def _note_answer(tx: Any, kind: Any, tested: Any, function: Any) -> None:
    """Guard whether an object's class is a subclass of an abstract class."""
    answers = vars(tx.output).get("fuseopt_answers")
    if answers is None:
        answers = tx.output.fuseopt_answers = _Answers()
        guard_once(tx, "abstract classes have the classes that they had", answers.same)
    try:
        constant = function is issubclass
        subject = tested.as_python_constant() if constant else tested.python_type()
        answers.note(subject, kind)
    except (NotImplementedError, TypeError):
        answers.any = True


class _Answers:
    """Results of subclass checks with abstract classes.

    The checks are repeated after a class has registered with an abstract class. `any`:
    one of the classes is uncertain, so that each registration counts.
    """

    def __init__(self) -> None:
        self.any = False
        self._token = abc.get_cache_token()
        self._pairs: list[tuple[type, type, bool]] = []

    def note(self, subject: type, kind: type) -> None:
        self._pairs.append((subject, kind, issubclass(subject, kind)))

    def same(self) -> bool:
        token = abc.get_cache_token()
        if token != self._token:
            if self.any or any(issubclass(a, b) is not x for a, b, x in self._pairs):
                return False
            self._token = token
        return True


@guard("guard-instances", "a guard on who is an instance of an abstract class")
def INSTANCES(patcher: Patcher) -> None:
    """Guard the results of `isinstance` and `issubclass`."""
    kind = find("torch._dynamo.variables.builtin:BuiltinVariable")

    def call(original: Hook, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn in (isinstance, issubclass) and len(args) == 2 and is_ours(tx):
            _guard_kinds(tx, args[1], args[0], self.fn)
        return original(self, tx, args, kwargs)

    patcher.around(kind, "call_function", call, "self", "tx", "args", "kwargs")


#: Types of methods that are written in C.
IN_C = (types.MethodDescriptorType, types.WrapperDescriptorType)


class _Methods:
    """Attributes of torch.Tensor and torch.nn.Parameter under some names."""

    KINDS = (torch.Tensor, torch.nn.Parameter)

    def __init__(self) -> None:
        self._names: dict[str, bool] = {}
        self._absent: list[str] = []
        #: the present attributes of these names; a function of C, since each call runs
        #: it
        self._now: Callable[[], Iterable[Any]] = tuple
        self._held: list[Any] = []

    def note(self, name: str) -> bool:
        """Record the attribute of a name; is it torch's own?"""
        if name not in self._names:
            found = [getattr(kind, name, None) for kind in self.KINDS]
            self._names[name] = all(map(_of_torch, found))
            if None in found:
                self._absent.append(name)
            present = [x for x in self._names if x not in self._absent]
            if present:
                read = operator.attrgetter(*present)
                self._now = functools.partial(map, read, self.KINDS)
                self._held = list(self._now())
        return self._names[name]

    def same(self) -> bool:
        try:
            now = list(self._now())
        except AttributeError:
            return False
        return now == self._held and not (
            self._absent and any(hasattr(torch.Tensor, x) for x in self._absent)
        )


def _of_torch(method: Any) -> bool:
    """Is it a method of torch, or None?"""
    if type(method) is types.FunctionType:
        home = str(method.__globals__.get("__name__"))
        return home.partition(".")[0] == "torch"
    return method is None or type(method) in IN_C


def _note_method(tx: Any, name: str) -> None:
    """Guard that tensors keep their present method of a name."""
    methods = vars(tx.output).get("fuseopt_methods")
    if methods is None:
        methods = tx.output.fuseopt_methods = _Methods()
        guard_once(tx, "tensors have the methods that they had", methods.same)
    if not methods.note(name):
        refuse(tx, f"it calls Tensor.{name}, which somebody has replaced")


@guard("guard-tensor-methods", "a guard on the methods of tensors that a step calls")
def TENSOR_METHODS(patcher: Patcher) -> None:
    """Guard that a tensor method is torch's and unreplaced; Dynamo does neither."""
    tensor = find("torch._dynamo.variables.tensor:TensorVariable")
    builtin = find("torch._dynamo.variables.builtin:BuiltinVariable")

    def method(original: Hook, self: Any, tx: Any, name: str, *more: Any) -> Any:
        if is_ours(tx):
            _note_method(tx, name)
        return original(self, tx, name, *more)

    def call(original: Hook, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if getattr(self.fn, "__module__", "") == "_operator" and is_ours(tx):
            if any(isinstance(x, tensor) for x in args):
                name = self.fn.__name__.strip("_")
                for one in (f"__{name}__", f"__r{name}__"):
                    _note_method(tx, one)
        return original(self, tx, args, kwargs)

    patcher.around(tensor, "call_method", method, "self", "tx", "name")
    patcher.around(builtin, "call_function", call, "self", "tx", "args", "kwargs")

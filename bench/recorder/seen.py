"""What a recorded run entered and read outside of the optimizer.

A profiler's function sees each code object before it runs, and each C function that the
user's code calls. Code is guarded, with all that it can name: globals, attributes of
modules and classes, defaults, cells, tables of plain values. C functions are on a list.
What is on no list is refused before it runs.
"""

from __future__ import annotations

import builtins
import dis
import functools
import operator
import os
import re
import sys
import sysconfig
import types
from collections.abc import Iterable
from typing import Any

import torch

from fuseopt.compiler.code_paths import every_code

from .facts import MISSING, PLAIN, TABLES, Facts, cell_of, containers, frozen, parts
from .layouts import REFUSED
from .numbers import Refused

HERE = os.path.dirname(__file__) + os.sep
TORCH = os.path.dirname(torch.__file__) + os.sep
OPTIM = TORCH + "optim" + os.sep
STDLIB = sysconfig.get_path("stdlib") + os.sep
SITE = os.sep + "site-packages" + os.sep
#: Python's own modules whose code does nothing but compute.
PURE = ("contextlib", "functools", "collections", "copy", "typing", "abc", "operator")
#: Files of torch's whose functions call its API, or ask what a build has.
API = (
    *("_tensor.py", "functional.py", "overrides.py", "nn/functional.py", "optim/"),
    *("nn/parameter.py", "nn/init.py", "autograd/grad_mode.py", "utils/_contextlib.py"),
    *("utils/_foreach_utils.py", "compiler/__init__.py", "_VF.py", "_compile.py"),
)
#: Files of torch's that its optimizers call, and whose answers may change.
LOOSE = (
    *("_utils.py", "_jit_internal.py", "__init__.py", "_dynamo/external_utils.py"),
    *("_dynamo/eval_frame.py", "backends/", "cuda/__init__.py", "cuda/graphs.py"),
    *("jit/", "autograd/profiler.py", "_classes.py", "_ops.py", "types.py"),
    *("accelerator/", "utils/_python_dispatch.py", "amp/", "_dynamo/decorators.py"),
)
OF_INIT = ("is_tensor", "_check")
#: Modules whose objects, but for containers, do not change.
STEADY = ("typing", "logging", "re", "abc", "torch", "torch._C", "enum", "__future__")
#: Attributes of classes that are in C.
DESCRIPTORS = (
    *(types.GetSetDescriptorType, types.MemberDescriptorType),
    *(types.MethodDescriptorType, types.WrapperDescriptorType),
)
#: Names that say more of an object than a guard compares.
FORBIDDEN = frozenset(
    "type vars globals locals exec eval open print input __dict__ __import__ dir "
    "__closure__ __globals__ __code__ setattr delattr gc sys inspect ctypes "
    "_version __self__ breakpoint memoryview object".split()
)
ALLOWED = frozenset(
    "len isinstance issubclass min max abs sum any all sorted getattr hasattr callable "
    "next divmod pow round iter reduce __build_class__".split()
)
OF_TORCH = frozenset("is_grad_enabled promote_types can_cast is_tensor".split())
_WORD = re.compile(r"[A-Za-z_]\w*")


@functools.cache
def _unseen() -> frozenset[Any]:
    """Methods of tensors that no mode of torch's sees."""
    return frozenset(
        x
        for x in torch.overrides.get_ignored_functions()
        if getattr(torch.Tensor, getattr(x, "__name__", ""), None) is x
    )


def _is_torchs(holder: Any) -> bool:
    """Is it a module or a class of torch's, whose values do not change?"""
    name = getattr(holder, "__module__", None) or getattr(holder, "__name__", "")
    return str(name).partition(".")[0] == "torch"


def _is_steady(kind: type) -> bool:
    """Do objects of a class not change?"""
    home = kind.__module__
    return home in STEADY or home.partition(".")[0] in ("torch", "typing", "torchgen")


class Globals:
    """The globals of a module as an object with a `__dict__`."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.__dict__ = names


class Watch:
    """Sees what a run enters. A context manager; `facts`: what it depends on."""

    def __init__(self, held: Any, recording: Any) -> None:
        self.held = held
        self.recording = recording
        self.facts = Facts()
        self.kept: list[Any] = []
        self.theirs = {id(pair.theirs) for pair in held.pairs}
        self.before: Any = None
        self.codes: dict[types.CodeType, str] = {}
        self.inner: set[types.CodeType] = set()
        self.names: set[str] = set()
        self.holders: dict[int, Any] = {}
        self.done: set[Any] = set()
        self.allowed: set[Any] = set()

    def __enter__(self) -> Watch:
        self.before = sys.getprofile()
        if self.before is not None:
            raise Refused("a profiler runs")
        for kind in type(self.held.itself).__mro__:
            if kind is not object:
                self._holder(kind)
        for function in self.held.functions:
            self._value(function, function.__name__)
        self.recording.profile = self._event
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self.before)
        self.recording.profile = None

    def restore(self) -> None:
        """Raise Refused where the run changed a table, which is put back."""
        changed = False
        for table, copy in self.kept:
            same = len(table) == len(copy)
            if isinstance(table, dict):
                pairs = zip(table.items(), copy.items(), strict=False)
                same = same and all(a is c and b is d for (a, b), (c, d) in pairs)
            elif isinstance(table, set):
                same = same and table == copy
            else:
                same = same and all(map(operator.is_, table, copy))
            if not same:
                changed = True
                table.clear()
                getattr(table, "update", getattr(table, "extend", None))(copy)
        if changed:
            raise Refused("it changes a table that is not the optimizer's")

    # ---------------------------------------------------------------- events

    def _event(self, frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call":
            status = self.codes.get(code)
            if status is None:
                self._enter(frame, code)
            elif status == "loose":
                self._refuse_loose(frame, code)
        elif event == "c_call" and self.codes.get(code) == "user":
            key = arg.__name__, type(arg.__self__), getattr(arg, "__module__", None)
            if key not in self.allowed:
                self._check(arg)
                self.allowed.add(key)

    def _enter(self, frame: Any, code: types.CodeType) -> None:
        file = code.co_filename
        if file.startswith(HERE):
            self.codes[code] = "ours"
            return
        if file.startswith(OPTIM):
            self.codes[code] = "torch"
            self._scan(frame, code)
            return
        if file.startswith(TORCH):
            short = file[len(TORCH) :].replace(os.sep, "/")
            in_init = short == "__init__.py" and code.co_name in OF_INIT
            if short.startswith(API) or in_init:
                self.codes[code] = "torch"
            elif short.startswith(LOOSE):
                self.codes[code] = "loose"
                self._refuse_loose(frame, code)
            else:
                raise Refused(f"it runs {code.co_name} of {short}")
            return
        if file.startswith("<") or (file.startswith(STDLIB) and SITE not in file):
            name = file[len(STDLIB) :] if file.startswith(STDLIB) else file.strip("<>")
            if not name.removeprefix("frozen ").startswith(PURE):
                if not file.startswith("<") or "frozen" in file:
                    raise Refused(f"it runs {code.co_name} of {name}")
            else:
                self.codes[code] = "python"
                return
        self.codes[code] = "user"
        self._rules(frame, code)
        self._scan(frame, code)

    def _refuse_loose(self, frame: Any, code: types.CodeType) -> None:
        """Raise Refused where the user's code runs what only torch's own may."""
        if self.codes.get(frame.f_back.f_code) == "user":
            raise Refused(f"it asks {code.co_name} of torch")

    def _check(self, function: Any) -> None:
        """Raise Refused for a C function that is on no list."""
        name, owner = function.__name__, function.__self__
        kind = type(owner)
        if isinstance(owner, torch.Tensor):
            if name in REFUSED or getattr(torch.Tensor, name, None) in _unseen():
                raise Refused(f"it calls {name} of a tensor")
            return
        if kind in (*TABLES, *PLAIN):
            return
        home = getattr(function, "__module__", None)
        if home in ("math", "_operator") or (owner is builtins and name in ALLOWED):
            return
        if home == "_functools" and name == "reduce":
            return
        seen = hasattr(torch._C._VariableFunctions, name) or name in OF_TORCH
        if seen and getattr(torch, name, None) is function:
            return
        if isinstance(owner, type) and issubclass(owner, (dict, str, torch.Tensor)):
            return
        if str(home).startswith("torch._C._"):  # linalg and its like are functions too
            return
        if kind.__module__ == "builtins" and kind.__name__.endswith("_iterator"):
            return
        raise Refused(f"it calls the C function {home or kind.__name__}.{name}")

    # ---------------------------------------------------------------- rules

    def _rules(self, frame: Any, code: types.CodeType) -> None:
        """Raise Refused for code that may do what no guard sees."""
        bad = FORBIDDEN.intersection(code.co_names)
        if bad:
            raise Refused(f"{code.co_name} names {min(bad)}")
        own = code.co_varnames[:1] if code.co_argcount else ()
        is_self = bool(own) and frame.f_locals.get(own[0]) is self.held.itself
        before: Any = None
        for x in dis.get_instructions(code):
            if x.opname in ("STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_STAR"):
                raise Refused(f"{code.co_name} writes the global {x.argval}")
            if x.opname == "IMPORT_NAME" and x.argval not in ("math", "torch"):
                raise Refused(f"{code.co_name} imports {x.argval}")
            if x.opname in ("STORE_DEREF", "DELETE_DEREF"):
                if x.argval in code.co_freevars and code not in self.inner:
                    raise Refused(f"{code.co_name} writes the cell {x.argval}")
            if x.opname in ("STORE_ATTR", "DELETE_ATTR"):
                loaded = before is not None and before.argval == (own or ("",))[0]
                on_self = is_self and loaded and before.opname == "LOAD_FAST"
                if not on_self and x.argval not in ("data", "grad"):
                    raise Refused(f"{code.co_name} writes the attribute {x.argval}")
            if x.opname in ("FORMAT_VALUE", "BUILD_STRING"):
                if {"getattr", "hasattr"} & {*code.co_names}:
                    raise Refused(f"{code.co_name} makes names of attributes")
            if x.opname != "CACHE":
                before = x

    # ---------------------------------------------------------------- what is named

    def _scan(self, frame: Any, code: types.CodeType) -> None:
        nested = code in self.inner
        self.inner.update(every_code(code)[1:])
        words = [*code.co_names]
        if {"getattr", "hasattr"} & {*words}:
            words += [x for x in code.co_consts if type(x) is str]
        self._names(words)
        names = frame.f_globals
        home = Globals(names)
        for x in dis.get_instructions(code):
            if x.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                name = x.argval
                value = names.get(name, MISSING)
                self._fact(home, id(names), name, value)
                if value is MISSING:
                    value = getattr(builtins, name, MISSING)
                    self._fact(builtins, id(builtins), name, value)
                self._value(value, name)
        function = self._function(frame, code)
        if function is not None:
            self._value(function, code.co_name)
        elif not nested and code.co_freevars and self.codes[code] == "user":
            raise Refused(f"{code.co_name} is a function that nothing names")

    def _function(self, frame: Any, code: types.CodeType) -> Any:
        """The function of a code object, by its name."""
        places: list[Any] = [frame.f_globals]
        places += [vars(c) for c in type(self.held.itself).__mro__]
        for place in places:
            found = place.get(code.co_name)
            while found is not None:
                found = getattr(found, "__func__", getattr(found, "fget", found))
                if getattr(found, "__code__", None) is code:
                    return found
                found = getattr(found, "__wrapped__", None)
        return None

    def _fact(self, owner: Any, key: Any, name: str, value: Any) -> None:
        if (key, name) not in self.done:
            self.done.add((key, name))
            self.facts.names.append((owner, name, value))

    def _names(self, words: Iterable[str]) -> None:
        new = {w for w in words if _WORD.fullmatch(w)} - self.names
        self.names |= new
        for holder in [*self.holders.values()]:
            self._attributes(holder, new)

    def _holder(self, x: Any) -> None:
        if id(x) not in self.holders:
            if isinstance(x, type):
                self.facts.classes.append((x, x.__mro__))
            self.holders[id(x)] = x
            self._attributes(x, self.names)

    def _attributes(self, holder: Any, names: Iterable[str]) -> None:
        inside = vars(holder)
        for name in [*names]:
            value = inside.get(name, MISSING)
            self._fact(holder, id(holder), name, value)
            if value is not MISSING and not _is_torchs(holder):
                self._value(value, name)

    def _value(self, x: Any, name: str) -> None:
        """Guard a value that code reaches by a name."""
        if x is MISSING or ("value", id(x)) in self.done:
            return
        self.done.add(("value", id(x)))
        kind = type(x)
        if kind in TABLES:
            if not x and kind is tuple:
                return
            inside = containers(x)
            if any(id(y) in self.theirs for y in inside):
                raise Refused(f"{name} is the optimizer's too")
            self.facts.tables.append((x, frozen(x)))
            self.facts.containers.update(map(id, inside))
            self.kept += [(y, y.copy()) for y in inside]
            return
        if kind in PLAIN:
            return
        if isinstance(x, types.BuiltinFunctionType):
            if not isinstance(x.__self__, (types.ModuleType, type, type(None))):
                raise Refused(f"{name} is a C function of an object")
            return
        if isinstance(x, types.MethodType):
            if not isinstance(x.__self__, type):
                raise Refused(f"{name} is a method of an object")
            self._value(x.__func__, name)
            return
        x = getattr(x, "__func__", x) if kind in (staticmethod, classmethod) else x
        if isinstance(x, property):
            for f in (x.fget, x.fset):
                if f is not None:
                    self._value(f, name)
            return
        if isinstance(x, types.FunctionType):
            self._reach(x, name)
        elif isinstance(x, types.ModuleType):
            if x.__name__ != "math" and getattr(x, "__file__", None):
                self._holder(x)
        elif isinstance(x, type):
            if x.__module__.partition(".")[0] not in ("torch", "builtins", *PURE):
                for c in x.__mro__[:-1]:
                    self._holder(c)
        elif isinstance(x, torch.Tensor):
            raise Refused(f"{name} is a tensor that is not the optimizer's")
        elif kind not in DESCRIPTORS and not _is_steady(kind):
            raise Refused(f"{name} is a {kind.__name__}, of which nothing is known")

    def _reach(self, x: Any, name: str) -> None:
        """Guard a function: its code, defaults, cells and attributes."""
        if x.__code__.co_filename.startswith(HERE):
            return
        self.facts.functions.append((x, parts(x)))
        torchs = x.__code__.co_filename.startswith(TORCH)
        if torchs:
            return
        for value in (*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()):
            self._value(value, name)
        for cell in x.__closure__ or ():
            value = cell_of(cell)
            if isinstance(value, type) and issubclass(value, torch.optim.Optimizer):
                continue  # for super()
            self.facts.cells.append((cell, value))
            self._value(value, name)
        if vars(x):
            self._holder(x)
            inner = vars(x).get("__wrapped__")
            if inner is not None:
                self._value(inner, name)

"""A step's function -> the code that it may run, and what that sees of globals.

Only what Python's own objects say is asked; nothing runs. `Paths` then notes which
ways a run took through that code.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
import sysconfig
import types
from collections.abc import Callable
from typing import Any

import torch

#: Code that is nobody's own: what it sees of globals does not tell lanes apart.
KNOWN = (
    os.path.dirname(torch.__file__) + os.sep,
    sysconfig.get_path("stdlib") + os.sep,
    "<frozen",
    os.path.dirname(__file__) + os.sep,
)
SITE = os.sep + "site-packages" + os.sep
MODULES = frozenset(
    "torch math operator typing functools itertools collections abc contextlib "
    "warnings builtins copy typing_extensions __future__ logging".split()
)
PLAIN = (int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device)


def is_known(code: types.CodeType) -> bool:
    """Does code come from torch or from Python's own library?"""
    name = code.co_filename
    if name.startswith(KNOWN[1]):
        return SITE not in name or name.startswith(KNOWN[0])
    return name.startswith(KNOWN)


def _plain(x: Any) -> bool:
    if isinstance(x, (tuple, frozenset)):
        return all(map(_plain, x))
    return isinstance(x, PLAIN)


class Reach:
    """All code that a function may run; `why` not all of it is known, or ""."""

    def __init__(self, function: Any, owner: object) -> None:
        self.codes: set[types.CodeType] = set()
        self.why = ""
        self._seen: set[int] = set()
        self._classes = [c for c in type(owner).__mro__ if c is not object]
        self._names: set[str] = set()
        self._function(function)
        for name, value in vars(owner).items():
            if isinstance(value, types.FunctionType) and name != "step":
                self._value(value, name)
        # methods of the optimizer itself, as far as some code names them
        known = -1
        while known != len(self._names) and not self.why:
            known = len(self._names)
            for c in self._classes:
                for name in sorted(self._names & vars(c).keys()):
                    self._value(vars(c)[name], f"{c.__name__}.{name}")

    def _function(self, f: Any) -> None:
        if id(f) in self._seen:
            return
        self._seen.add(id(f))
        if is_known(f.__code__):
            return
        for value in (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()):
            self._value(value, f"a default of {f.__qualname__}")
        for x in dis.get_instructions(f.__code__):
            outside = x.opname == "STORE_DEREF" and x.argval in f.__code__.co_freevars
            if outside or x.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                self.why = f"{f.__qualname__} changes {x.argval}, which is not its own"
        cells = f.__closure__ or ()
        for name, cell in zip(f.__code__.co_freevars, cells, strict=True):
            try:
                self._value(cell.cell_contents, f"{name} of {f.__qualname__}")
            except ValueError:  # an empty cell
                self.why = f"{name} of {f.__qualname__} is not known"
        self._code(f.__code__, f.__globals__)

    def _code(self, code: types.CodeType, names: dict[str, Any]) -> None:
        self.codes.add(code)
        self._names |= set(code.co_names)
        for name in code.co_names:
            if name in names:
                self._value(names[name], name, code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant, names)

    @staticmethod
    def _pure(x: Any) -> bool:
        """Does a callable that is no Python function depend on its arguments alone?"""
        if isinstance(x, types.BuiltinFunctionType):
            holder = getattr(x, "__self__", None)
            if holder is not None and not isinstance(holder, (types.ModuleType, type)):
                return False
        elif isinstance(x, (functools.partial, types.MethodType)):
            return False
        elif type(x).__name__ == "ufunc":
            return True
        home = str(getattr(x, "__module__", None) or type(x).__module__)
        return home.partition(".")[0].lstrip("_") in MODULES

    def _value(self, x: Any, name: str, used: tuple[str, ...] = ()) -> None:
        if self.why or _plain(x) or id(x) in self._seen:
            return
        if isinstance(x, (staticmethod, classmethod)):
            x = x.__func__
        if isinstance(x, property):
            for f in (x.fget, x.fset, x.fdel):
                if f is not None:
                    self._function(f)
        elif isinstance(x, types.FunctionType):
            self._function(x)
            wrapped = getattr(x, "__wrapped__", None)
            if isinstance(wrapped, types.FunctionType):
                self._function(wrapped)
        elif isinstance(x, types.ModuleType):
            self._seen.add(id(x))
            if x.__name__.partition(".")[0] in MODULES:
                return
            for own in used:
                if own in vars(x):
                    self._value(vars(x)[own], f"{name}.{own}", used)
        elif isinstance(x, type):
            if x.__module__.partition(".")[0] in MODULES or x in self._classes:
                return
            self._seen.add(id(x))
            for own in used:
                if own in vars(x):
                    self._value(vars(x)[own], f"{name}.{own}", used)
        elif callable(x):
            if not self._pure(x):
                self.why = f"it calls {name}, a {type(x).__name__}"
        else:
            home = str(type(x).__module__).partition(".")[0]
            if home not in ("typing", "__future__"):
                self.why = f"it sees {name}, a {type(x).__name__}, which may change"


class Paths:
    """The ways that runs take through code that is not torch's: pairs of places.

    A context; `hidden(f)` runs f unseen within it.
    """

    def __init__(self) -> None:
        self.taken: set[tuple[types.CodeType, int, int]] = set()
        self._before: Any = None
        # by identity, for a code object's hash goes over all of it
        self._known: dict[int, types.CodeType] = {}

    def _trace(self, frame: types.FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if event != "call" or id(code) in self._known:
            return None
        if is_known(code):
            self._known[id(code)] = code
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        taken = self.taken
        last = -1

        def step(frame: types.FrameType, event: str, _: Any) -> Any:
            nonlocal last
            now = frame.f_lasti
            taken.add((code, last, now))
            last = now
            return step

        return step

    def __enter__(self) -> Paths:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def hidden(self, f: Callable[..., Any], *args: Any) -> Any:
        """f(*args), whose own way is not noted."""
        sys.settrace(None)
        try:
            return f(*args)
        finally:
            sys.settrace(self._trace)

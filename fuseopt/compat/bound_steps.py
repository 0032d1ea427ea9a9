"""Take over `torch.compile(optimizer.step, backend=...)` of a bound step.

torch.compile looks up its backend, then calls the object that compiles. Both happen in
one call, in one thread. In between fuseopt replaces the method of that object, for this
one call. The method is restored when it is called, or when torch.compile ends.

From torch 2.15 on, torch notifies a backend of each lookup. An older torch caches the
lookup without notice; there, the backend's name in torch's table reports a lookup.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..locks import new_rlock
from .capability import probed
from .layers import layers_of
from .names import Missing, attribute_of, find, takes

#: The public function, before anything could replace it.
_COMPILE = torch.compile


@dataclass(frozen=True)
class CompileArguments:
    """Arguments of torch.compile, besides the function and the backend."""

    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    fullgraph: bool = False
    dynamic: bool | None = None


#: Attributes of the compiling object that a step supports, and others that it does not.
HOOKS, DYNAMIC = ("_hooks",), ("_dynamic",)
SHAPES = ("_dynamic_shapes", "_shapes_spec")


@probed(
    "bound-steps",
    "torch.compile(optimizer.step) is compiled apart from all other optimizers",
    "Dynamo traces all parameters, and all optimizers of a class share one step",
)
def BOUND_STEPS() -> None:
    kind = find("torch._dynamo.eval_frame:OptimizeContext")
    takes(kind.__call__, "self", "fn")
    base = find("torch._dynamo.eval_frame:_TorchDynamoContext.__init__")
    names = set(base.__code__.co_names)
    for wanted in (HOOKS, DYNAMIC, ("fullgraph",), ("export",), ("_package",)):
        if not names & set(wanted):
            raise Missing(f"_TorchDynamoContext has no {wanted[0]}")
    parameters = {"shapes_spec", "dynamic_shapes"} & set(base.__code__.co_varnames)
    if parameters and not names & set(SHAPES):
        raise Missing("_TorchDynamoContext keeps its shapes elsewhere")
    attribute_of(torch, "compile")
    if not _lookups_are_reported():
        lookup = find("torch._dynamo.backends.registry:lookup_backend")
        if "_BACKENDS" not in lookup.__code__.co_names or type(_table()) is not dict:
            raise Missing("lookup_backend reads no table _BACKENDS")


class BoundSteps:
    """Intercepts torch.compile for the bound step of an optimizer and `backend`.

    `take(function, optimizer, arguments)` compiles the step, or a function that
    replaces it. If it returns None, Dynamo compiles the function. `left(optimizer)` is
    called if nothing can be taken over. `context()` is entered around each call of a
    function that torch.compile compiles for the backend; torch supports such a context.
    """

    def __init__(
        self,
        backend: Callable[..., Any],
        take: Callable[[Any, torch.optim.Optimizer, CompileArguments], Any],
        left: Callable[[torch.optim.Optimizer], None],
        context: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self.backend = backend
        self.take = take
        self.left = left
        self.context = context
        self._lock = new_rlock()
        #: the threads for which the method is replaced, by the object that
        #: torch.compile made
        self._waiting: dict[int, weakref.ref[Any] | None] = {}
        self._theirs: Any = None

    def on_lookup(self) -> None:
        """Handle a lookup of the backend, by torch.compile or by another caller."""
        if not _lookups_are_reported():
            _watch_names(self.on_lookup)
        wrapper, given = _in_compile()
        if wrapper is None:
            return
        if wrapper is not True:
            wrapper.backend_ctx_ctor = self.context
        if not BOUND_STEPS.available():
            owner = owner_of(given)
            if owner is not None:
                self.left(owner)
            return
        kind = find("torch._dynamo.eval_frame:OptimizeContext")
        thread = threading.get_ident()
        with self._lock:
            reference = None
            if wrapper is not True:
                # torch.compile may end without a call: with an error
                reference = weakref.ref(wrapper, lambda _: self._done(thread))
            self._waiting[thread] = reference
            if self._theirs is None:
                self._theirs = theirs = kind.__call__
                taking = self._call

                # with the parameters of theirs, which another thread may probe now
                def call(self: Any, fn: Any) -> Any:
                    return taking(theirs, self, fn)

                kind.__call__ = call

    def _done(self, thread: int) -> None:
        with self._lock:
            self._waiting.pop(thread, None)
            if not self._waiting and self._theirs is not None:
                kind = find("torch._dynamo.eval_frame:OptimizeContext")
                kind.__call__, self._theirs = self._theirs, None

    def _call(self, theirs: Callable[..., Any], context: Any, fn: Any) -> Any:
        owner = owner_of(fn)
        arguments = None if owner is None else _arguments(context, self.backend)
        self._done(threading.get_ident())
        if owner is not None and arguments is not None:
            taken = self.take(fn, owner, arguments)
            if taken is not None:
                return taken
        return theirs(context, fn)


def _in_compile() -> tuple[Any, Any]:
    """Return torch.compile's object for a backend, and the compiled function.

    Walks the callers in this thread. The object is True if torch.compile has made it
    already. Returns (None, None) elsewhere.
    """
    frame: types.FrameType | None = sys._getframe(1)
    wrapper: Any = None
    while frame is not None:
        if frame.f_code is _COMPILE.__code__:
            return True if wrapper is None else wrapper, frame.f_locals.get("model")
        if wrapper is None:
            held = [*map(frame.f_locals.get, ("self", "backend", "compiler_fn"))]
            kinds = [type(x).__name__ for x in held]
            if "_TorchCompileWrapper" in kinds:
                wrapper = held[kinds.index("_TorchCompileWrapper")]
        frame = frame.f_back
    return None, None


class _Name(str):
    """A backend's name as a key of torch's table; it calls `on_lookup` at each lookup.

    A dict compares the key of a lookup with its own key, or hashes it.
    """

    @staticmethod
    def on_lookup() -> None:
        """Set to another before the name is in the table."""

    def __eq__(self, other: object) -> bool:
        self.on_lookup()
        return str.__eq__(self, other)

    def __hash__(self) -> int:
        self.on_lookup()
        return str.__hash__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)


def _lookups_are_reported() -> bool:
    """Does torch notify a backend of each lookup, as torch 2.15 does?"""
    name = "torch._dynamo.eval_frame:_maybe_fire_backend_init"
    return find(name, None) is not None


def _table() -> Any:
    """Return torch's table from each backend's name to an entry point, or None."""
    return find("torch._dynamo.backends.registry:_BACKENDS", None)


def _watch_names(on_lookup: Callable[[], None]) -> None:
    """Make the names by which torch loads the backend report a lookup."""
    table = _table()
    if not isinstance(table, dict):
        return
    home = f"{__name__.partition('.')[0]}."
    for name, point in [*table.items()]:
        if type(name) is str and str(getattr(point, "value", "")).startswith(home):
            key = _Name(name)
            entry = {key: point}
            vars(key)["on_lookup"] = on_lookup
            # no Python code runs between the two, so the name is never missing
            both = partial(table.pop, name, None), partial(table.update, entry)
            [*map(partial.__call__, both)]


def owner_of(function: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer whose `step` a function is; None for any other.

    The function is a method bound to it, or a replacement of its step, as by a
    scheduler.
    """
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.optim.Optimizer):
        named = getattr(function, "__name__", "") == "step"
        return owner if named or _stands_for(function, owner) else None
    for cell in getattr(function, "__closure__", None) or ():
        try:
            owner = cell.cell_contents
        except ValueError:  # an empty cell
            continue
        owner = owner() if isinstance(owner, weakref.ref) else owner
        if isinstance(owner, torch.optim.Optimizer) and _stands_for(function, owner):
            return owner
    return None


def _stands_for(function: Any, optimizer: torch.optim.Optimizer) -> bool:
    return vars(optimizer).get("step") is function


def _arguments(context: Any, backend: Callable[..., Any]) -> CompileArguments | None:
    """Return the torch.compile arguments of a compiling context.

    Returns None if a step does not support them, or if another layer lies between torch
    and the backend.
    """
    hooks = getattr(context, "_hooks", None)
    others = (
        getattr(context, "export", True),
        getattr(context, "_package", None),
        *(getattr(context, name, None) for name in SHAPES),
        getattr(hooks, "guard_filter_fn", None),
        not getattr(context, "first_ctx", False),
    )
    if any(x not in (None, False) for x in others):
        return None
    keywords: dict[str, Any] = {}
    for layer in layers_of(getattr(context, "callback", None)):
        if layer is backend:
            break
        if type(layer).__module__.split(".")[0] != "torch":
            return None
        keywords = {**getattr(layer, "kwargs", {}), **keywords}
    else:
        return None
    return CompileArguments(
        keywords.get("mode"),
        dict(keywords.get("options") or {}),
        bool(getattr(context, "fullgraph", False)),
        getattr(context, "_dynamic", None),
    )

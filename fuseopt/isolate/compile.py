"""An optimizer, options -> the same optimizer, its step compiled apart from all others.

Dynamo keeps what it compiled with a function's code object, which all optimizers of a
class share, and gives up on it after eight. `compile` gives each optimizer a code
object of its own. All that stands around the step's own function (hooks, the profiler's
record, the grad mode, a scheduler's bookkeeping) runs as on the plain optimizer.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from .. import compat
from ..compiler.diagnostics import tell_of_step, untraceable_gradient
from ..compiler.entry import BACKEND, attach
from ..compiler.session import COMPILED, session
from ..config import of_mode, resolve
from ..errors import CaptureError, NotAnOptimizer, UnsupportedInput
from ..replicate.driver import Representatives
from ..runtime.commit import write
from ..shadow.lanes import Unlike
from ..shadow.optimizer import Shadow, unfused
from ..shadow.whole import NotTraced, Whole
from ..shards.step import Shards
from .class_guard import Methods
from .compilations import Compilations
from .decorators import cells, copied, peel, rewrap

log = logging.getLogger("fuseopt")

_PARAMETERS = inspect.signature(torch.compile).parameters
#: What Dynamo may be told and still run what it traced for our backend.
TRACES = ("default", "eager_on_recompile", "fail_on_recompile")
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def compile(optimizer: AnyOptimizer, **options: Any) -> AnyOptimizer:
    """Compile `optimizer.step` in isolation; returns the optimizer, the same object.

    `options` are those of fuseopt.config. Called again, it replaces them. A copy or a
    pickle of the optimizer is a plain one again. What `fused=True` asks of torch's
    kernels is done by fuseopt's.

    Raises NotAnOptimizer, ConfigError, and UnsupportedInput for a step that torch keeps
    away from Dynamo.
    """
    given: Any = optimizer
    if not isinstance(given, Optimizer):
        kind = given if isinstance(given, type) else type(given)
        raise NotAnOptimizer(
            f"fuseopt.compile takes a torch.optim.Optimizer, not {kind.__name__!r}; "
            'for a step of any other kind: torch.compile(step, backend="fuseopt")'
        )
    resolve(None, options)
    current: Any = optimizer.step
    known = getattr(current, COMPILED, None)
    if isinstance(known, Isolated) and known.owner() is optimizer:
        known.configure(options)
        return optimizer
    attach()
    reason = compat.disabled(optimizer)
    if reason:
        raise UnsupportedInput(reason)
    made = _isolated(optimizer, current, Wanted(options))
    if made is None:
        raise UnsupportedInput(
            f"the step of {type(optimizer).__name__} is a {type(current).__name__}, "
            "not a Python function, so Dynamo cannot trace it"
        )
    function, bound = made
    optimizer.step = Step(optimizer, function) if bound else function  # type: ignore
    return optimizer


def compile_bound(step: Any, optimizer: Optimizer, asked: compat.Asked) -> Any:
    """What `torch.compile(optimizer.step, backend="fuseopt")` returns: a step, bound to
    the optimizer, that is compiled as `compile` does; the optimizer stays as it is.

    None for a step that Dynamo alone can answer for: torch keeps it away from Dynamo,
    or it is no Python function. Raises ConfigError for a wrong option or mode.
    """
    resolve(asked.mode, asked.options)
    options = {**of_mode(asked.mode), **asked.options}
    known = getattr(step, COMPILED, None)
    if isinstance(known, Isolated) and known.owner() is optimizer:
        known.configure(options)
        return step
    if compat.disabled(optimizer):
        return None
    wanted = Wanted(options, asked.fullgraph, asked.dynamic)
    made = _isolated(optimizer, step, wanted)
    if made is None:
        return None
    function, bound = made
    compiled: Any = HeldStep(optimizer, function) if bound else function
    # torch.compile for another backend begins with the step as it was
    compiled._torchdynamo_orig_callable = step
    compiled._torchdynamo_wrapper_id = id(compiled)
    return compiled


def _isolated(
    optimizer: Optimizer, step: Any, wanted: Wanted
) -> tuple[Any, bool] | None:
    """A step's function with its decorators around one that is compiled apart, and is
    it to be bound? None where there is no Python function to be compiled.
    """
    bound = getattr(step, "__self__", None) is optimizer
    layers, inner = peel(step.__func__ if bound else step)
    if not isinstance(inner, types.FunctionType):
        return None
    if any(group.get("fused") for group in optimizer.param_groups):
        log.info(
            "%s asks for torch's fused kernels; its step runs in fuseopt's instead",
            type(optimizer).__name__,
        )
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        # torch's fused kernels unscale gradients themselves; GradScaler is to do it
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    isolated = Isolated(optimizer, inner, wanted)
    entry, alone = isolated.entry()
    for layer in reversed(layers):
        entry, alone = rewrap(layer, inner, entry, alone)
        inner = layer
    return entry, bound


class Step:
    """A bound method that does not keep its optimizer alive.

    But until its first call, since the optimizer may be nobody else's; and from then
    on if the method itself is held by more than the optimizer and its caller. Pickled
    or copied along with an optimizer, it becomes the class's own `step`.
    """

    def __init__(self, optimizer: Optimizer, function: Any) -> None:
        functools.update_wrapper(self, function)
        self.__func__ = function
        self.__signature__ = inspect.signature(types.MethodType(function, optimizer))
        self._owner = weakref.ref(optimizer)
        self._kept: Optimizer | None = optimizer

    @property
    def __self__(self) -> Optimizer | None:
        return self._owner()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = self._owner()
        if self._kept is not None and sys.getrefcount(self) <= _ALONE:
            self._kept = None
        if owner is None:
            raise ReferenceError("the optimizer of this step no longer exists")
        return self.__func__(owner, *args, **kwargs)

    def __reduce__(self) -> Any:
        return _plain_step, (self._owner(),)

    def __repr__(self) -> str:
        return f"<compiled step of {self._owner()!r}>"


class HeldStep(Step):
    """A bound method, which keeps its optimizer alive as bound methods do.

    A scheduler that is made later marks the optimizer's own `step`; a call of this one
    is a step to it as well.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = self._kept
        assert owner is not None
        if hasattr(owner.step, "_wrapped_by_lr_sched"):
            owner._opt_called = True  # type: ignore[attr-defined]
        return self.__func__(owner, *args, **kwargs)


class _Counts:
    """Says how many references there are to a method of which nobody keeps hold."""

    def __call__(self) -> int:
        return sys.getrefcount(self)


_HOLDER = types.SimpleNamespace(step=_Counts())
_ALONE: int = _HOLDER.step()


def _plain_step(optimizer: Optimizer) -> Any:
    return types.MethodType(type(optimizer).step, optimizer)


# ---------------------------------------------------------------- the step itself


@dataclass(frozen=True)
class Wanted:
    """How a step is to be compiled: options of fuseopt.config, and what torch.compile
    takes besides.
    """

    options: Mapping[str, Any]
    fullgraph: bool = False
    dynamic: bool | None = None


class Isolated:
    """The innermost function of one optimizer's step, compiled for it alone."""

    def __init__(self, optimizer: Optimizer, function: Any, wanted: Wanted) -> None:
        self.owner = weakref.ref(optimizer, _released(self))
        self.function = function
        parameters = [*inspect.signature(function).parameters.values()]
        #: is a call whose arguments are None the same as one without?
        self._none_by_default = all(p.default is None for p in parameters[1:])
        #: one thread at a time steps an optimizer on its shadow
        self.lock = threading.RLock()
        self.wanted = wanted
        self.options = dict(wanted.options)
        #: which parameters lacked a gradient when all lanes were traced
        self.missing: set[tuple[bool, ...]] = set()
        #: what the step's code is found in
        self.methods = Methods()
        #: state, groups and their number in the last call
        self.seen: tuple[Any, Any, int] = None, None, 0
        # by the places of the call where functions are given, for Dynamo does not see
        # when one of them is None in another call
        self.compiled: dict[tuple[int | str, ...], Callable[..., Any]] = {}
        self.callables: dict[int | str, Callable[..., Any]] = {}
        self.current: dict[int | str, Callable[..., Any]] = {}
        self.compilations = Compilations()
        self.representatives = self._led()
        self.whole = Whole(function)
        self.shards = self._on_parts()
        self.unfused: Shadow | None = None  # for a step with a closure

    def release(self) -> None:
        """Keep nothing of the optimizer, nor what was compiled for it."""
        self.compiled.clear()
        self.representatives.release()
        self.whole.release()
        self.shards.release()
        self.unfused = None
        self.compilations.forget()
        self.seen = None, None, 0

    def forget(self) -> None:
        """Let nothing that was compiled count."""
        self.release()
        self.representatives = self._led()
        self.missing.clear()
        self.whole = Whole(self.function)
        self.shards = self._on_parts()

    def _led(self) -> Representatives:
        return Representatives(self.function, self.options, self.compilations.told)

    def _on_parts(self) -> Shards:
        return Shards(self.function, self.options, self.compilations.told)

    def configure(self, options: Mapping[str, Any]) -> None:
        """Take other options, for the calls to come."""
        if dict(options) != self.options:
            self.options = dict(options)
            self.forget()

    def entry(self) -> tuple[Any, Any]:
        """A function to stand in the place of the original one.

        And the one to call in its stead where nobody traces what is called.
        """

        @functools.wraps(self.function)
        def step(*args: Any, **kwargs: Any) -> Any:
            return self.run(args, kwargs)

        # inside a function that is compiled itself, the step stays one of its own
        made = torch.compiler.disable(step)  # type: ignore[no-untyped-call]
        setattr(made, COMPILED, self)
        return made, step

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        optimizer = self.owner()
        assert optimizer is not None
        groups = optimizer.param_groups
        # loading a state dict replaces the state: what was compiled for the old one
        # would only count against the limit
        state, known, n = self.seen
        changed = self.methods.changed(optimizer)
        if (
            changed
            or state is not optimizer.state
            or known is not groups
            or n != len(groups)
        ):
            if known is not None:
                self.forget()
            self.seen = optimizer.state, groups, len(groups)
        alone = len(args) == 1 and not kwargs
        if not alone and self.shards.wants(optimizer, anew=True):
            given = [*args[1:], *kwargs.values()]
            if any(x is not None for x in given) or not self._none_by_default:
                return self._eager(args, kwargs, "its step is given arguments")
            args, kwargs, alone = args[:1], {}, True
        if alone and compat.stance() in TRACES:
            with self.lock:
                few, whole = self.representatives, self.whole
                if self.shards.wants(optimizer):
                    return self._on_shards(optimizer)
                led = few.wants(optimizer)
                if led and few.step(optimizer, self._lead):
                    return None
                # a plain parameter may have been replaced by another since
                if (few.why or not led) and self.shards.wants(optimizer, anew=True):
                    return self._on_shards(optimizer)
                if not whole.why:
                    done, result = whole.step(optimizer, self._whole, self._all)
                    if done:
                        return result
        return self._as_it_is(optimizer, args, kwargs)

    def _on_shards(self, optimizer: Optimizer) -> Any:
        done, why = self.shards.step(optimizer, self._lead)
        return None if done else self._eager((optimizer,), {}, why)

    def _eager(self, args: tuple[Any, ...], kwargs: dict[str, Any], why: str) -> Any:
        """Let a step of DTensors run in eager; the user is told why, if it is said."""
        if why:
            optimizer = args[0]
            why = f"its parameters are DTensors, and {why}"
            if resolve(None, self.options).fallback == "error":
                raise CaptureError(
                    f"{type(optimizer).__name__}.step cannot be compiled: {why} "
                    "(options={'fallback': 'error'} was given)"
                )
            tell_of_step(optimizer, why)
        return self.function(*args, **kwargs)

    def _as_it_is(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Let Dynamo trace the step of the optimizer itself, with what it is given."""
        if len(args) > 1 or kwargs:
            args = tuple(self._outside(i, a) for i, a in enumerate(args))
            kwargs = {k: self._outside(k, a) for k, a in kwargs.items()}
        places = tuple(self.current)
        done = False
        try:
            compiled = self.compiled.get(places)
            if self.whole.refused:
                tell_of_step(optimizer, self.whole.refused)
                return self.function(*args, **kwargs)
            if compiled is None and untraceable_gradient(optimizer):
                return self.function(*args, **kwargs)
            if compiled is None:
                whole = copied(self.function, cells(self.function))
                fullgraph = self.wanted.fullgraph
                compiled = self._compile(self._whole(), whole, fullgraph=fullgraph)
                self.compiled[places] = compiled
            if any(group.get("fused") for group in optimizer.param_groups):
                result = self._unfused(compiled, optimizer, args, kwargs)
            else:
                result = compiled(*args, **kwargs)
            done = True
            return result
        except Exception:
            done = True
            raise
        finally:
            self.current.clear()
            if not done:
                # cut off somewhere: what was compiled may be half bound
                self.compiled.clear()

    def _unfused(
        self,
        compiled: Callable[..., Any],
        optimizer: Optimizer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The same, where groups take the foreach form and keep what they say."""
        try:
            shadow = self.unfused = self.unfused or Shadow(optimizer)
            shadow.refresh(optimizer)
        except Unlike:
            kept = unfuse(optimizer)
            try:
                return compiled(*args, **kwargs)
            finally:
                for group, before in kept:
                    group.update(before)
        shadow.clean = False
        try:
            return shadow.translated(compiled(shadow.itself, *args[1:], **kwargs))
        finally:
            write(shadow.writes())
            shadow.settle()

    def _whole(self) -> Callable[..., Any]:
        """The backend of a step that is traced whole, which reports why."""
        why = self.representatives.why
        if not why:
            return BACKEND

        def whole(gm: Any, example_inputs: Any, **keywords: Any) -> Any:
            known = len(session.reports)
            made = BACKEND(gm, example_inputs, **keywords)
            for report in session.reports[known:]:
                report.traced = f"all lanes, since {why}"
            return made

        whole._torchdynamo_orig_backend = BACKEND  # type: ignore[attr-defined]
        return whole

    def _all(self, backend: Callable[..., Any]) -> Callable[..., Any]:
        return self._lead(backend, self.options)

    def _lead(
        self, backend: Callable[..., Any], options: Mapping[str, Any] | None = None
    ) -> Callable[..., Any]:
        function = self.function

        def lead(self: Optimizer) -> Any:
            # where Dynamo lets it run as it is, only a shadow would step
            if not torch.compiler.is_dynamo_compiling():
                raise NotTraced
            return function(self)

        lead = copied(lead, cells(lead))
        made = self._compile(backend, lead, fullgraph=True, options=options or None)
        return compat.Traced(made, lead)

    def _compile(
        self, backend: Callable[..., Any], function: Any, **more: Any
    ) -> Callable[..., Any]:
        keywords: dict[str, Any] = {}
        inherits = "__class__" in self.function.__code__.co_freevars
        if inherits and "isolate_recompiles" in _PARAMETERS:
            # what `super().step()` leads to is shared by all optimizers as well. Not
            # asked for elsewhere: threads that step at the same time defeat it
            keywords["isolate_recompiles"] = True
        keywords.update({"options": self.options or None, **more})
        keywords["dynamic"] = self.wanted.dynamic
        itself = weakref.ref(self)

        def noting(gm: Any, example_inputs: Any, **keywords: Any) -> Any:
            self = itself()
            if self is not None:
                self._note_gradients()
            return backend(gm, example_inputs, **keywords)

        noting._torchdynamo_orig_backend = backend  # type: ignore[attr-defined]
        return self.compilations.compile(noting, function, **keywords)

    def _note_gradients(self) -> None:
        """Take note of which gradients there are, while a step is traced."""
        optimizer = self.owner()
        if optimizer is not None and not self.representatives.under_way:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            self.missing.add(tuple([p.grad is None for p in params]))
            if len(self.missing) > 1:
                self.representatives.want()

    def _outside(self, place: int | str, value: Any) -> Any:
        """A closure runs as it is: no part of the graph, and no reason to retrace.

        What Dynamo sees is the same function at every call.
        """
        if not callable(value) or isinstance(value, (torch.nn.Module, type, Optimizer)):
            return value
        self.current[place] = value
        if place not in self.callables:
            current = self.current

            @torch.compiler.disable  # type: ignore[untyped-decorator]
            def closure(*args: Any, **kwargs: Any) -> Any:
                return current[place](*args, **kwargs)

            self.callables[place] = closure
        return self.callables[place]


def _released(isolated: Isolated) -> Callable[[Any], None]:
    """What is to be done when the optimizer is no more."""
    known = weakref.ref(isolated)

    def release(_: Any, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        found = known()
        if found is not None and not ending():
            found.release()

    return release


def unfuse(optimizer: Optimizer) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Let groups of torch's fused kernels take the foreach form.

    Returns what they said before: (group, its options).
    """
    kept = []
    for group in optimizer.param_groups:
        form = unfused(group)
        if form:
            kept.append((group, {k: group[k] for k in form}))
            group.update(form)
    return kept

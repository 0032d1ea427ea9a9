"""Choose for each call of an optimizer's step how to run it.

Models of lanes lead it, or Dynamo traces it on a shadow with all lanes, or on the
optimizer itself.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from .. import compat
from ..compiler.diagnostics import untraceable_gradient, warn_of_step
from ..compiler.session import COMPILED, session
from ..config import resolve
from ..errors import CaptureError
from ..inputs.change import SAME
from ..inputs.lane_matcher import PARAMS
from ..inputs.structure_guard import StructureGuard
from ..locks import new_rlock
from ..replicate.driver import LedOptimizer
from ..shadow.whole import WholeStep
from ..shards.step import Shards
from ..storage.rule import Rule
from ..storage.step import PackedStep
from .arguments import Arguments
from .compilations import Compilations, CompileOptions, backend_of_all, released
from .decorators import cells, copied, leading
from .groups import LISTS, read_once
from .quick import TRACES, QuickSteps
from .race import Race, is_requested, may_race
from .retries import Retries
from .soundness import SoundnessCheck
from .unfused import Unfused

_PARAMETERS = inspect.signature(torch.compile).parameters
#: The number of retraces of a step that created state where its graph was cut.
AGAIN = 2


class OptimizerCompiler:
    """The innermost function of one optimizer's step, compiled for it alone."""

    def __init__(
        self, optimizer: Optimizer, function: Any, wanted: CompileOptions
    ) -> None:
        self.owner = weakref.ref(optimizer, released(self))
        self.function = function
        self.arguments = Arguments(function)
        #: only one thread at a time steps an optimizer on its shadow
        self.lock = new_rlock(self.forget)
        self.wanted = wanted
        self.options = dict(wanted.options)
        #: the parameters without a gradient, for each trace of all lanes
        self.missing: set[tuple[bool, ...]] = set()
        #: classes, state and groups in the last call
        self.structure = StructureGuard()
        # by the places of functions among a call's arguments: Dynamo does not detect
        # that a function is None in another call
        self.compiled: dict[tuple[int | str, ...], Callable[..., Any]] = {}
        self.callables: dict[int | str, Callable[..., Any]] = {}
        self.current: dict[int | str, Callable[..., Any]] = {}
        self.compilations = Compilations()
        self.quick = QuickSteps()
        self.leader = self._new_led()
        self.whole = WholeStep(function)
        self.shards = self._new_shards()
        #: the step of an optimizer with packed state
        self.packed_step: PackedStep | None = None
        self.store(wanted.storage)
        self.unfused = Unfused()  # for a step with a closure
        self.race = self._raced()  # None once the compiled step has won
        #: the number of retraces that a step with a graph break has left
        self.again = AGAIN
        self.judged = SoundnessCheck()
        #: for a step that has hit Dynamo's recompile limit
        self.retries = Retries()
        #: the step that did a deferred clip, if there was one
        self.clipped: Any = None

    def release(self) -> None:
        """Release all that belongs to the optimizer, and all compiled code."""
        self._release_compiled()
        self.structure.forget()

    def _release_compiled(self) -> None:
        self.compiled.clear()
        self.quick.step = None
        for part in (self.leader, self.whole, self.shards, self.unfused):
            part.release()
        if self.packed_step is not None:
            self.packed_step.release()
        self.compilations.forget()

    def forget(self) -> None:
        """Drop all compiled code, and start again."""
        self._release_compiled()
        live = self.leader.pending.live
        self.leader = self._new_led()
        self.leader.pending.live = live
        self.missing.clear()
        self.whole = WholeStep(self.function)
        self.shards = self._new_shards()
        if self.packed_step is not None:
            self.packed_step.start_anew(self.options)
        self.race = self._raced()
        self.again, self.retries = AGAIN, Retries()

    def _new_led(self) -> LedOptimizer:
        return LedOptimizer(self.function, self.options, self.compilations.reports)

    def _new_shards(self) -> Shards:
        return Shards(self.function, self.options, self.compilations.reports)

    def _raced(self) -> Race | None:
        # fullgraph=True rules out an eager step; with packed state it is slow
        may = not self.wanted.fullgraph and self.packed_step is None
        return Race() if may and is_requested(resolve(None, self.options)) else None

    def configure(self, options: Mapping[str, Any]) -> None:
        """Set other options for later calls."""
        if dict(options) != self.options:
            self.options = dict(options)
            self.clipped = None
            self.forget()

    def store(self, rule: Rule | None) -> None:
        """Pack the optimizer's state by this rule; None: unpack it."""
        optimizer, packed_step = self.owner(), self.packed_step
        if optimizer is None or rule == (packed_step and packed_step.rule):
            return
        if packed_step is not None:
            packed_step.end(optimizer)
            packed_step.release()
        self.packed_step = self.clipped = None
        if rule is not None:
            common = self.function, self.options, self.compilations.reports
            self.packed_step = PackedStep(optimizer, *common, rule, self.wanted.beside)
        tail = session.tails.get(optimizer, lambda: None)()
        if tail is not None:
            tail.forget()

    def entry(self) -> tuple[Any, Any]:
        """Return the replacement of the original function, and a direct form of it.

        Callers use the direct form where no code is traced.
        """

        @functools.wraps(self.function)
        def step(*args: Any, **kwargs: Any) -> Any:
            if self.leader.steady.calls and len(args) == 1 and not kwargs:
                if self.quick.repeat(self):
                    return None
            if (len(args) > 1 or kwargs) and self.arguments.say_nothing(args, kwargs):
                args, kwargs = args[:1], {}
            # a function that the user put in place of a step may take anything
            given = args[0] if args else None
            groups: Any = getattr(given, "param_groups", None)
            odd = type(groups) is not list or {*map(type, map(PARAMS, groups))} - LISTS
            if odd and isinstance(given, Optimizer) and (refusal := read_once(given)):
                return self._left(given, args, kwargs, refusal)
            if session.deferred and self._clips(len(args) == 1 and not kwargs):
                return None
            if self.race is None:
                return self.run(args, kwargs)
            return self._race(self.race, args, kwargs)

        # a trace of another compiled function does not enter the step
        disabled = torch.compiler.disable(step)  # type: ignore[no-untyped-call]
        step.by_option = False  # type: ignore[attr-defined]
        setattr(disabled, COMPILED, self)
        return disabled, step

    def _clips(self, alone: bool) -> bool:
        """Do the clips deferred to this step; return True if they did the step too."""
        left = session.deferred
        return left is not None and left.step(self, alone)

    def follow(self, optimizer: Optimizer) -> None:
        """Drop compiled code if the optimizer's state, groups or code changed."""
        helper = self.leader.recent.helper or self.shards.helper()
        if (found := self.structure.compare(optimizer, helper)) is not SAME:
            if self.structure.known:
                found.log(f"{type(optimizer).__name__} is compiled anew")
                self.forget()
            self.structure.take(optimizer)

    def led(self, bucket_proof: Callable[[], None], kept: int) -> str | None:
        """Do one step, led by models however few lanes there are.

        Returns None, or the reason why nothing was done: "" if the stance forbids
        compiled code. Each rehearsal calls `bucket_proof()`, which raises LanesDiffer
        if lanes must not step a few at a time. `kept`: the number of sets of lanes with
        programs to keep.
        """
        optimizer = self.owner()
        assert optimizer is not None
        if compat.stance() not in TRACES:
            return ""
        with self.lock:
            self.follow(optimizer)
            leader = self.leader
            leader.force_lanes = leader.recent.params_differ = True
            leader.bucket_proof, leader.kept = bucket_proof, kept
            if leader.refusal or leader.step(optimizer, self.lead):
                return leader.refusal or None
            return leader.refusal

    def _race(self, race: Race, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do one step: in the faster way, or in the one to be timed."""
        optimizer = self.owner()
        assert optimizer is not None
        if len(args) > 1 or kwargs or compat.stance() not in TRACES:
            return self.run(args, kwargs)
        if race.lost:
            self.follow(optimizer)
            if self.race is race:
                return self.function(*args)
            if self.race is None:
                return self.run(args, kwargs)
            race = self.race
        reports = self.compilations.reports
        result = race.step(
            lambda: self.run(args, kwargs),
            lambda: self.function(*args),
            reports,
            lambda: may_race(optimizer, resolve(None, self.options), reports),
        )
        if race.over and self.race is race:
            if race.lost:
                warn_of_step(optimizer, f"it is faster there: {race}")
            else:
                self.race = None
        return result

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        optimizer = self.owner()
        assert optimizer is not None
        self.follow(optimizer)
        if self.judged.epoch != compat.switches.epoch:
            if unsound := self.judged.why_not(optimizer):
                return self._left(optimizer, args, kwargs, unsound)
        alone = len(args) == 1 and not kwargs
        if not alone and self.shards.wants(optimizer, anew=True):
            return self._eager(args, kwargs, "its step is given arguments")
        traces = (stance := compat.stance()) in TRACES
        if not alone and traces:
            if (first := self.arguments.first(args, kwargs)) is not None:
                with torch.enable_grad():
                    result = first()
                if not self._clips(alone=True):
                    self.run(args[:1], {})
                return result
        if self.packed_step is not None:
            refusal: str | None = "" if alone else "its step is given arguments"
            if alone and traces:
                with self.lock:
                    refusal = self.packed_step.step(optimizer, self.lead)
            if refusal is None:
                return None
            return self._left(optimizer, args, kwargs, refusal)
        if alone and traces:
            with self.lock:
                leader, whole, shards = self.leader, self.whole, self.shards
                if not shards.plain and shards.wants(optimizer):
                    return self._on_shards(optimizer)
                led = leader.wants(optimizer)
                if led and leader.step(optimizer, self.lead):
                    return None
                # the user may have replaced a plain parameter by a DTensor
                if (leader.refusal or not led) and shards.wants(optimizer, anew=True):
                    return self._on_shards(optimizer)
                if whole.limited and self.retries.due(len(self.compilations.reports)):
                    whole = self.whole = WholeStep(self.function)
                if not (whole.refusal and whole.keeps_out(optimizer)):
                    done, result = whole.step(optimizer, self._whole, self._all)
                    if done:
                        return result
        if stance is compat.IN_MODE:
            return self._left(optimizer, args, kwargs, "")
        return self._traced_directly(optimizer, args, kwargs)

    def _left(
        self,
        optimizer: Optimizer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        refusal: str,
    ) -> Any:
        """Run a step in eager, and report the reason unless it is ""."""
        if refusal and resolve(None, self.options).fallback == "error":
            raise CaptureError(
                f"{type(optimizer).__name__}.step cannot be compiled: {refusal} "
                "(options={'fallback': 'error'} was given)"
            )
        if refusal:
            warn_of_step(optimizer, refusal)
        if self.packed_step is None:
            return self.function(*args, **kwargs)
        with self.lock:
            return self.packed_step.in_eager(args, kwargs)

    def _on_shards(self, optimizer: Optimizer) -> Any:
        shards, whole = self.shards, self.whole
        done, refusal = shards.step(optimizer, self.lead)
        if done:
            self.quick.step = None
            self.quick.learn(self, optimizer, shards)
            return None
        kept_out = whole.refusal and whole.keeps_out(optimizer)
        if refusal and shards.treats_tensors_alone and not kept_out:
            # DTensor itself decides the work on parts and the communication
            backend = functools.partial(self._whole, refusal)
            done, result = whole.step(optimizer, backend, self._all)
            if done:
                return result
        if refusal and whole.refusal and shards.treats_tensors_alone:
            refusal = (
                f"{refusal}; Dynamo cannot trace all lanes either: {whole.refusal}"
            )
        return self._eager((optimizer,), {}, refusal)

    def _eager(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], refusal: str
    ) -> Any:
        """Run a step of DTensors in eager, and report the reason."""
        refusal = refusal and f"its parameters are DTensors, and {refusal}"
        return self._left(args[0], args, kwargs, refusal)

    def _traced_directly(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Let Dynamo trace the step of the optimizer itself, with its arguments."""
        if len(args) > 1 or kwargs:
            args = tuple(self._outside(i, a) for i, a in enumerate(args))
            kwargs = {k: self._outside(k, a) for k, a in kwargs.items()}
        places, done = tuple(self.current), False
        n_states, n_reports = len(optimizer.state), len(session.reports)
        session.cut.discard(optimizer)
        try:
            compiled = self.compiled.get(places)
            if self.whole.refused:
                warn_of_step(optimizer, self.whole.refused)
                return self.function(*args, **kwargs)
            if compiled is None and untraceable_gradient(optimizer):
                return self.function(*args, **kwargs)
            if compiled is None:
                whole = copied(self.function, cells(self.function))
                fullgraph = self.wanted.fullgraph
                compiled = self._compile(self._whole(), whole, fullgraph=fullgraph)
                self.compiled[places] = compiled
            compat.patch_state.register()
            if any(group.get("fused") for group in optimizer.param_groups):
                result = self.unfused.call(compiled, optimizer, args, kwargs)
            else:
                result = compiled(*args, **kwargs)
            done = True
            if optimizer in session.cut and len(optimizer.state) > n_states:
                # the line of the graph break may be one that creates state
                self.again -= 1
                if self.again >= 0:
                    self.compiled.pop(places, None)
            return result
        except Exception:
            done = True
            if len(session.reports) != n_reports:
                # Dynamo may have failed on an error that eager raises too: trace it
                # anew
                self.compiled.pop(places, None)
            raise
        finally:
            self.current.clear()
            if not done:
                # interrupted: compiled code may be half bound
                self.compiled.clear()
                compat.settle_interrupted()

    def _whole(self, refusal: str = "") -> Callable[..., Any]:
        """Return the backend of a step that is traced whole; Reports get the reason."""
        return backend_of_all(refusal or self.leader.refusal)

    def _all(self, backend: Callable[..., Any]) -> Callable[..., Any]:
        return self.lead(backend, self.options)

    def lead(
        self, backend: Callable[..., Any], options: Mapping[str, Any] | None = None
    ) -> Callable[..., Any]:
        lead = leading(self.function)
        compiled = self._compile(backend, lead, fullgraph=True, options=options or None)
        return compat.DirectDynamoCall(compiled, lead, 2 if self.retries.made else 1)

    def _compile(
        self, backend: Callable[..., Any], function: Any, **more: Any
    ) -> Callable[..., Any]:
        keywords: dict[str, Any] = {"options": self.options or None, **more}
        inherits = "__class__" in self.function.__code__.co_freevars
        if inherits and "isolate_recompiles" in _PARAMETERS:
            # all optimizers share the function that `super().step()` calls. Not used
            # elsewhere: threads that step at the same time defeat it
            keywords["isolate_recompiles"] = True
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
        """Record the missing gradients during a trace."""
        optimizer = self.owner()
        if optimizer is not None and not self.leader.under_way:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            self.missing.add(tuple([p.grad is None for p in params]))
            if len(self.missing) > 1:
                self.leader.want()

    def _outside(self, place: int | str, value: Any) -> Any:
        """Wrap a function, such as a closure: it runs in eager, without new traces."""
        if not callable(value) or isinstance(value, (torch.nn.Module, type, Optimizer)):
            return value
        self.current[place] = value
        if place not in self.callables:
            current, itself = self.current, weakref.ref(self)

            @torch.compiler.disable  # type: ignore[untyped-decorator]
            def closure(*args: Any, **kwargs: Any) -> Any:
                result = current[place](*args, **kwargs)
                if (step := itself()) is not None:
                    step._clips(alone=False)
                return result

            self.callables[place] = closure
        return self.callables[place]

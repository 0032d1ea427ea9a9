"""A tail in one graph of Dynamo's: two launches where the optimizer is elementwise.

Optimizers are traced on their shadows. What is launched waits until all of it has been
prepared; then it is launched, and what the steps left in the shadows is written to the
optimizers, in one call of C. Where a step may be skipped and leaves more than contents
of tensors (state that it makes in its first call, counters that are numbers of
Python's), the flag is read in between: then the call waits for the device.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.optim import Optimizer

from .. import compat
from ..capture import Captured, capture
from ..compiler import internal_errors, pipeline
from ..compiler.entry import BACKEND
from ..compiler.internal_errors import OUT_OF_MEMORY
from ..compiler.partition import decide
from ..compiler.reference import Reference
from ..compiler.report import Report
from ..compiler.session import session
from ..compiler.timing import Clock
from ..config import Config
from ..errors import CannotBuild, CaptureError, UnsupportedInput
from ..isolate.compilations import Compilations
from ..isolate.decorators import copied
from ..runtime.binding import Binding
from ..runtime.commit import Pending, unless
from ..runtime.source import GraphTensors
from ..runtime.step import CompiledStep
from ..shadow.lanes import Unlike
from ..shadow.optimizer import Shadow, Write
from ..shadow.whole import NotTraced, keeps_to_itself
from .compiling import compiled
from .predication import DROPPED, UNKNOWN, predicate, result_buffer
from .sequence import TailInputs, gradients, whole

REFUSALS = (Unlike, CaptureError, CannotBuild, UnsupportedInput, NotTraced)
#: Graphs of one tail, at most: each stands for another form of its numbers or state.
PATIENCE = 16


class Fused:
    """The tail of some optimizers in one graph. `why`: why it no longer is; `since`:
    why no few lanes are traced for all, if that was tried.

    `functions`: those of their steps, without what is around them.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        functions: Sequence[Callable[..., Any]],
        config: Config,
        options: Mapping[str, Any],
    ) -> None:
        self.optimizers = optimizers
        self.functions = functions
        self.config = config
        self.options = options
        self.why = "verify was asked for" if config.verify else ""
        self.since = ""
        self.pending = Pending()
        self.compilations = Compilations()
        self.shadows: list[Shadow] = []
        self.given: TailInputs | None = None
        self.compiled: Callable[..., Any] | None = None
        self.graphs: list[_Graph] = []
        #: does nobody look at gradients after the call that is under way?
        self.drops = False
        self.skips = False
        # did the last call end as calls do? Had the one before it compiled nothing?
        self._sound = True
        self.quiet = False

    def release(self) -> None:
        """Keep nothing that was compiled."""
        self.compiled = self.given = None
        self.shadows = []
        self.graphs.clear()
        self.compilations.forget()

    def step(
        self, content: Mapping[str, Any], drops: bool
    ) -> tuple[torch.Tensor, ...] | None:
        """Do one tail. Returns what `sequence.whole` returns, or None, with `why`, if
        nothing was written.

        `content`: the attributes of a `TailInputs` without the optimizers. `drops`:
        nobody reads gradients after the call.
        """
        if not self._sound:
            self._cut_off()
        steady = self.quiet
        self._sound = False
        try:
            result = self._step(content, drops)
            self._sound = True
            return result
        except Exception as error:
            if isinstance(error, OUT_OF_MEMORY) or self.pending.begun:
                raise
            expected = isinstance(error, (*REFUSALS, *compat.dynamo_errors()))
            if (steady and not expected) or compat.stance() == "fail_on_recompile":
                raise
            # whatever it is, the pieces say it again if it is the step's own
            self._sound = True
            said = error.__cause__ if _is_observed(error) else error
            reason = str(said).strip().partition("\n")[0]
            self.why = reason or type(error).__name__
            self.release()
            return None
        finally:
            self.pending.drop()

    def _step(
        self, content: Mapping[str, Any], drops: bool
    ) -> tuple[torch.Tensor, ...]:
        if not self.shadows:
            pairs = zip(self.functions, self.optimizers, strict=True)
            if not all(keeps_to_itself(f, type(o)) for f, o in pairs):
                raise Unlike("a step uses its optimizer for more than its attributes")
            self.shadows = [Shadow(o) for o in self.optimizers]
            self.given = TailInputs()
        for shadow, optimizer in zip(self.shadows, self.optimizers, strict=True):
            if shadow.helper is None and self.graphs:
                shadow.helper = self.graphs[-1].helper
            shadow.refresh(optimizer)
        given = self.given
        assert given is not None
        given.__dict__.update(content)
        given.optimizers = [shadow.itself for shadow in self.shadows]
        given.steps = [*self.functions]
        self.skips = given.skips
        self.drops = drops
        if self.compiled is None:
            self.compiled = self._compile()
        self.quiet = True
        for shadow in self.shadows:
            shadow.clean = False
        begun = self.pending.start()
        result: tuple[torch.Tensor, ...] = self.compiled(given)
        n = len(self.shadows) if self.skips else 0
        self._finish(begun, result[:n])
        return result

    def kept_and_dropped(self) -> tuple[set[int], set[int]]:
        """Of the call that is under way, tensors by identity: those that a skipped step
        does not keep as they are, and gradients at which nobody looks afterwards.
        """
        given = self.given
        assert given is not None
        averages = [t for own, _ in (*given.averages, *given.copies) for t in own]
        averages += [t for x in given.models for t in x.tensors()]
        averages += [t for x in given.objects for t in x.tensors()]
        grads = [g for o in self.optimizers for g in gradients(o)]
        if self.drops:
            return {*map(id, averages)}, {*map(id, grads)}
        return {*map(id, averages + grads)}, set()

    def _finish(self, begun: object, skips: Sequence[torch.Tensor]) -> None:
        """Launch, and write what the steps have left in the shadows."""
        left: list[tuple[Shadow, torch.Tensor | None]] = []
        writes: list[Write] = []
        for k, shadow in enumerate(self.shadows):
            if not shadow.changed():
                shadow.clean = True
                continue
            flag = skips[k] if skips else None
            own = shadow.writes()
            writes += own if flag is None else [unless(flag, own)]
            left.append((shadow, flag))
        self.pending.finish(begun, writes)
        for shadow, flag in left:
            # of a step that was skipped the shadow is made anew
            if flag is None or not flag.item():
                shadow.settle()

    def _cut_off(self) -> None:
        """An exception ended the last call somewhere: take nothing for known."""
        if not self.quiet:
            self.release()
        for shadow in self.shadows:
            shadow.clean = False
        for graph in self.graphs:
            graph.forget()

    # ---------------------------------------------------------------- Dynamo's side

    def _compile(self) -> Callable[..., Any]:
        owner = weakref.ref(self)

        @compat.refusals_pass(BACKEND)
        def tail(gm: GraphModule, args: Sequence[Any]) -> Callable[..., Any]:
            self = owner()
            assert self is not None
            self.quiet = False
            if len(self.graphs) >= PATIENCE:
                raise Unlike("it is traced too often")
            decision = decide(gm, list(args), compat.traces_step())
            if decision.parts or decision.whole != "update":
                raise Unlike(f"its graph is more than an update: {decision.why}")
            made = _Graph(self, gm)
            self.graphs.append(made)
            return Reference(made)

        tail._torchdynamo_orig_backend = BACKEND  # type: ignore[attr-defined]
        return compiled(self.compilations, tail, copied(whole, ()))


def _is_observed(error: Exception) -> bool:
    """Does an error of Dynamo's only say that what it traces raised one?"""
    return error.__cause__ is not None and str(error).startswith("Observed exception")


class _Graph:
    """One of Dynamo's graphs of a tail, planned when it is called first: then its
    tensors are known.
    """

    def __init__(self, owner: Fused, gm: GraphModule) -> None:
        self.owner = owner
        self.gm = gm
        self.inner: CompiledStep | None = None

    @property
    def helper(self) -> ctypes.PyDLL | None:
        """The library of the guards, once a plan has it."""
        return None if self.inner is None else self.inner.helper

    def forget(self) -> None:
        """Take nothing for known that a call leaves to the next: one was cut off."""
        if self.inner is not None:
            self.inner.forget()

    def __call__(self, *args: Any) -> Any:
        if self.inner is None:
            self.owner.quiet = False
            try:
                self.inner = self._planned(args)
            except Exception as error:
                self._tell(error, args)
                raise
        return self.inner(*args)

    def _tell(self, error: Exception, args: Sequence[Any]) -> None:
        """Tell of an error of fuseopt's own; raises Unlike then."""
        if internal_errors.is_mishap(error):
            given = error, self.gm, args, self.owner.config
            said = internal_errors.tell(*given, "The tail runs in pieces.")
            raise Unlike(said) from error

    def _planned(self, args: Sequence[Any]) -> CompiledStep:
        owner, gm, clock = self.owner, self.gm, Clock()
        current = [args]
        weak = weakref.ref(owner)
        told = owner.compilations.told

        def captured(gm: GraphModule, args: Sequence[Any]) -> Captured:
            owner = weak()
            assert owner is not None
            return predicated(owner, capture(gm, args), gm, current[0])

        def tell(report: Report) -> None:
            owner = weak()
            assert owner is not None
            since = f", since {owner.since}" if owner.since else ""
            report.traced = f"a tail of a training step, all lanes{since}"
            session.reports.append(report)
            told.append(report)

        replan = pipeline.replanner(gm, owner.config, tell, clock, captured)

        def plan(now: Sequence[Any]) -> Any:
            current[0] = now
            try:
                return replan(now)
            finally:
                current[0] = ()

        program = plan(args)
        source = GraphTensors(gm, program.plan.captured.tensor_args)
        return CompiledStep(source, program, plan, AllFollowed(), None, owner.pending)


def predicated(
    owner: Fused, captured: Captured, gm: GraphModule, args: Sequence[Any]
) -> Captured:
    """A captured tail, with steps that are skipped and gradients that are dropped."""
    tensors = GraphTensors(gm, captured.tensor_args).tensors(args)
    kept, dropped = owner.kept_and_dropped()
    flag_of: dict[int, int] = {}
    if owner.skips:
        for k, shadow in enumerate(owner.shadows):
            flag_of.update(dict.fromkeys(_held(shadow.itself), k))
    modes: dict[int, int] = {}
    for place, t in enumerate(tensors):
        if id(t) in dropped:
            modes[place] = DROPPED
        elif owner.skips and id(t) not in kept:
            # what belongs to none of several optimizers, none may write
            one = 0 if len(owner.shadows) == 1 else UNKNOWN
            modes[place] = flag_of.get(id(t), one)
    n = len(owner.shadows) if owner.skips else 0
    flags = {k: result_buffer(captured, k) for k in range(n)}
    return predicate(captured, modes, flags)


def _held(optimizer: Any) -> Iterable[int]:
    """The tensors that an optimizer holds, by identity."""
    waiting: list[Any] = [*vars(optimizer).values()]
    seen: set[int] = set()
    while waiting:
        x = waiting.pop()
        if isinstance(x, torch.Tensor):
            yield id(x)
        elif isinstance(x, (dict, list, tuple)) and id(x) not in seen:
            seen.add(id(x))
            waiting += x.values() if isinstance(x, dict) else x
            waiting += x if isinstance(x, dict) else ()


class AllFollowed:
    """Whatever cannot be planned is done in pieces; see ChangePolicy."""

    def changed(self, bound: Binding, metadata: list[Any], found: int) -> None:
        """All changes are followed."""

    def overlapping(self) -> None:
        """What shares memory is not predicated."""
        raise Unlike("tensors of the tail share memory")

    def refused(self, error: CaptureError) -> None:
        """Eager would skip nothing."""
        raise Unlike(str(error)) from error

    def failed(self, error: Exception, args: Sequence[Any]) -> bool:
        """The same."""
        return False

    def eager(self) -> Callable[..., Any]:
        """Never asked for."""
        raise AssertionError("eager would skip nothing")

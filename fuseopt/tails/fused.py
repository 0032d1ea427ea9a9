"""Tail that Dynamo traces whole, as one graph: two launches for elementwise steps.

Dynamo traces optimizers on their shadows. When all launches have been prepared, they
run, and the changes of the shadows are written to the optimizers, in one call of C. A
skipped step may change more than contents of tensors: state that it creates in its
first call, counters that are Python numbers. Then the host reads the flag in between,
so the call waits for the device.
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
from ..compiler.reference import Reference
from ..compiler.report import Report
from ..compiler.session import session
from ..compiler.timing import Clock
from ..config import Config
from ..errors import CannotBuild, CaptureError, UnsupportedInput
from ..handlers import reraise
from ..inputs.keys import LanesDiffer
from ..inputs.last_call import LastCall
from ..inputs.policy import RefusingPolicy
from ..isolate.compilations import Compilations
from ..isolate.decorators import copied
from ..replicate.backend import check_update
from ..runtime.commit import Pending, unless
from ..runtime.source import GraphTensors
from ..runtime.step import CompiledStep
from ..shadow.optimizer import Shadow, Write
from ..shadow.whole import NotTraced, keeps_to_itself
from .compiling import compiled
from .predication import DROPPED, UNKNOWN, predicate, result_buffer
from .sequence import TailInputs, gradients, whole

REFUSALS = (LanesDiffer, CaptureError, CannotBuild, UnsupportedInput, NotTraced)
#: Most graphs of one tail, each for a different form of its numbers or state.
PATIENCE = 16


class FusedTail:
    """Tail of some optimizers in one graph. `refusal` is the reason why it no longer
    is, or "". `since` is the reason why the tail is not led, if that was tried.

    `functions` are those of their steps, without the layers around them.
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
        self.refusal = "the option verify is on" if config.verify else ""
        self.since = ""
        self.pending = Pending()
        self.compilations = Compilations()
        self.shadows: list[Shadow] = []
        self.inputs: TailInputs | None = None
        self.compiled: Callable[..., Any] | None = None
        self.graphs: list[_Graph] = []
        #: true if nothing reads gradients after the current call
        self.drops = False
        self.skips = False
        self.last_call = LastCall()
        #: true if the last call compiled nothing
        self.compiled_nothing = False

    def release(self) -> None:
        """Release everything that was compiled."""
        self.compiled = self.inputs = None
        self.shadows = []
        self.graphs.clear()
        self.compilations.forget()

    def step(
        self, tail_inputs: Mapping[str, Any], drops: bool
    ) -> tuple[torch.Tensor, ...] | None:
        """Do one tail. Return the result of `sequence.whole`, or None, with `refusal`,
        if nothing was written.

        `tail_inputs` has the attributes of a `TailInputs` without the optimizers. With
        `drops` nothing reads gradients after the call.
        """
        if not self.last_call.begin():
            self._cut_off()
        was_quiet = self.compiled_nothing
        try:
            result = self._step(tail_inputs, drops)
            self.last_call.ended = True
            return result
        except Exception as error:
            reraise(error)
            if isinstance(error, OUT_OF_MEMORY) or self.pending.begun:
                raise
            expected = isinstance(error, (*REFUSALS, *compat.dynamo_errors()))
            if (was_quiet and not expected) or compat.must_fail():
                raise
            # if the error is the step's own, the pieces raise it again
            self.last_call.ended = True
            cause = error.__cause__ if _is_observed(error) else error
            assert cause is not None
            self.refusal = compat.reason_of(cause)
            self.release()
            return None
        finally:
            self.pending.drop()

    def _step(
        self, tail_inputs: Mapping[str, Any], drops: bool
    ) -> tuple[torch.Tensor, ...]:
        if not self.shadows:
            pairs = zip(self.functions, self.optimizers, strict=True)
            if not all(keeps_to_itself(f, type(o)) for f, o in pairs):
                raise LanesDiffer(
                    "a step uses its optimizer other than by its attributes"
                )
            self.shadows = [Shadow(o) for o in self.optimizers]
            self.inputs = TailInputs()
        for shadow, optimizer in zip(self.shadows, self.optimizers, strict=True):
            if shadow.helper is None and self.graphs:
                shadow.helper = self.graphs[-1].helper
            shadow.refresh(optimizer)
        inputs = self.inputs
        assert inputs is not None
        inputs.__dict__.update(tail_inputs)
        inputs.optimizers = [shadow.stand_in for shadow in self.shadows]
        inputs.steps = [*self.functions]
        self.skips = inputs.skips
        self.drops = drops
        if self.compiled is None:
            self.compiled = self._compile()
        self.compiled_nothing = True
        for shadow in self.shadows:
            shadow.clean = False
        begun = self.pending.start()
        result: tuple[torch.Tensor, ...] = self.compiled(inputs)
        n = len(self.shadows) if self.skips else 0
        self._finish(begun, result[:n])
        return result

    def kept_and_dropped(self) -> tuple[set[int], set[int]]:
        """Return two sets of tensors of the current call, by identity. The first has
        those that are written even if the step is skipped. The second has gradients
        that nothing reads afterwards.
        """
        inputs = self.inputs
        assert inputs is not None
        averages = [
            t for tensors, _ in (*inputs.averages, *inputs.copies) for t in tensors
        ]
        averages += [t for update in inputs.models for t in update.tensors()]
        averages += [t for update in inputs.objects for t in update.tensors()]
        grads = [g for o in self.optimizers for g in gradients(o)]
        if self.drops:
            return {*map(id, averages)}, {*map(id, grads)}
        return {*map(id, averages + grads)}, set()

    def _finish(self, begun: object, skips: Sequence[torch.Tensor]) -> None:
        """Launch, and write the changes of the shadows to the optimizers."""
        changed: list[tuple[Shadow, torch.Tensor | None]] = []
        writes: list[Write] = []
        for k, shadow in enumerate(self.shadows):
            if not shadow.changed():
                shadow.clean = True
                continue
            flag = skips[k] if skips else None
            shadow_writes = shadow.writes()
            writes += shadow_writes if flag is None else [unless(flag, shadow_writes)]
            changed.append((shadow, flag))
        self.pending.finish(begun, writes)
        for shadow, flag in changed:
            # the next call refreshes the shadow of a skipped step
            if flag is None or not flag.item():
                shadow.settle()

    def _cut_off(self) -> None:
        """Forget the record of the last call, which an exception ended."""
        if not self.compiled_nothing:
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
            self.compiled_nothing = False
            if len(self.graphs) >= PATIENCE:
                raise LanesDiffer("Dynamo traces it too often")
            check_update(gm, args)
            graph = _Graph(self, gm)
            self.graphs.append(graph)
            return Reference(graph)

        tail._torchdynamo_orig_backend = BACKEND  # type: ignore[attr-defined]
        return compiled(self.compilations, tail, copied(whole, ()))


def _is_observed(error: Exception) -> bool:
    """Does Dynamo's error only report one that the traced code raised?"""
    return error.__cause__ is not None and str(error).startswith("Observed exception")


class _Graph:
    """One of Dynamo's graphs of a tail. A call plans it, with known tensors, if no
    earlier call left gradients as this one does.
    """

    def __init__(self, owner: FusedTail, gm: GraphModule) -> None:
        self.owner = owner
        self.gm = gm
        #: the step of calls after which nothing reads gradients, and of the others
        self.steps: dict[bool, CompiledStep] = {}

    @property
    def helper(self) -> ctypes.PyDLL | None:
        """Library of the guards, if a plan has it, or None."""
        return next((step.helper for step in self.steps.values()), None)

    def forget(self) -> None:
        """Forget the record of the last call, which an exception ended."""
        for step in self.steps.values():
            step.forget()

    def __call__(self, *args: Any) -> Any:
        drops = self.owner.drops
        step = self.steps.get(drops)
        if step is None:
            self.owner.compiled_nothing = False
            try:
                step = self.steps[drops] = self._planned(args)
            except Exception as error:
                self._report_error(error, args)
                raise
        return step(*args)

    def _report_error(self, error: Exception, args: Sequence[Any]) -> None:
        """Report an error inside fuseopt and raise LanesDiffer; else return."""
        if internal_errors.is_mishap(error):
            arguments = error, self.gm, args, self.owner.config
            message = internal_errors.report(*arguments, "The tail runs in pieces.")
            raise LanesDiffer(message) from error

    def _planned(self, args: Sequence[Any]) -> CompiledStep:
        owner, gm, clock = self.owner, self.gm, Clock()
        current_args = [args]
        weak_owner = weakref.ref(owner)
        reports = owner.compilations.reports

        def captured(gm: GraphModule, args: Sequence[Any]) -> Captured:
            owner = weak_owner()
            assert owner is not None
            return predicated(owner, capture(gm, args), gm, current_args[0])

        def on_report(report: Report) -> None:
            owner = weak_owner()
            assert owner is not None
            since = f", since {owner.since}" if owner.since else ""
            report.traced = f"a tail of a training step, all lanes{since}"
            session.reports.append(report)
            reports.append(report)

        replan = pipeline.replanner(gm, owner.config, on_report, clock, captured)

        def plan(new_args: Sequence[Any]) -> Any:
            current_args[0] = new_args
            try:
                return replan(new_args)
            finally:
                current_args[0] = ()

        program = plan(args)
        source = GraphTensors(gm, program.plan.captured.tensor_args)
        policy = RefusingPolicy("tensors of the tail share memory")
        return CompiledStep(source, program, plan, policy, None, owner.pending)


def predicated(
    owner: FusedTail, captured: Captured, gm: GraphModule, args: Sequence[Any]
) -> Captured:
    """Return a captured tail with skips of its steps, and without unread gradients."""
    tensors = GraphTensors(gm, captured.tensor_args).tensors(args)
    kept, dropped = owner.kept_and_dropped()
    flag_of: dict[int, int] = {}
    if owner.skips:
        for k, shadow in enumerate(owner.shadows):
            flag_of.update(dict.fromkeys(_tensor_ids(shadow.stand_in), k))
    modes: dict[int, int] = {}
    for place, t in enumerate(tensors):
        if id(t) in dropped:
            modes[place] = DROPPED
        elif owner.skips and id(t) not in kept:
            # no step may write tensors that belong to none of several optimizers
            unowned = 0 if len(owner.shadows) == 1 else UNKNOWN
            modes[place] = flag_of.get(id(t), unowned)
    n = len(owner.shadows) if owner.skips else 0
    flags = {k: result_buffer(captured, k) for k in range(n)}
    return predicate(captured, modes, flags)


def _tensor_ids(optimizer: Any) -> Iterable[int]:
    """Yield the tensors in an optimizer's attributes, by identity."""
    remaining: list[Any] = [*vars(optimizer).values()]
    seen: set[int] = set()
    while remaining:
        x = remaining.pop()
        if isinstance(x, torch.Tensor):
            yield id(x)
        elif isinstance(x, (dict, list, tuple)) and id(x) not in seen:
            seen.add(id(x))
            remaining += x.values() if isinstance(x, dict) else x
            remaining += x if isinstance(x, dict) else ()

"""A compiled step: what runs each time the user's function is called.

`CompiledStep` finds the tensors of a call in its *source* and asks the guard of its
program's binding what of them changed: a moved tensor is one changed number, a changed
stride a new table, a changed dtype or shape a new plan. A *policy* says which changes
are followed, and what becomes of a call that cannot be. Everything is checked before
anything is written.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

import torch
from torch.fx import GraphModule

from .. import compat
from ..capture.fx.inputs import check_contents, check_memory, check_tensor
from ..errors import AliasError, CaptureError, LaunchError
from .binding import Binding, metadata_of
from .commit import Pending
from .devices import is_capturing
from .executor import Program, prepared
from .guards.tensors import CHANGED, MOVED
from .memory import Memory, seen_real
from .results import give, returned
from .source import TensorSource
from .user_capture import join

log = logging.getLogger("fuseopt")

#: Programs that a step keeps, for tensors of other dtypes and shapes: the pieces of a
#: step that Dynamo cuts in a loop are called with each parameter in turn.
KEPT = 32


class ChangePolicy(Protocol):
    """What becomes of calls that a program was not made for. Nothing was written."""

    def changed(self, bound: Binding, metadata: list[Any], found: int) -> None:
        """Tensors are not what a binding is for, by their `metadata` or by what its
        guard `found`: raises if the step is not to be bound or planned anew.
        """

    def overlapping(self) -> None:
        """Tensors share memory in a new way: raises if it is not to be planned anew."""

    def refused(self, error: CaptureError) -> None:
        """The step cannot be planned for a call's tensors: raises if eager is not to
        run that call.
        """

    def failed(self, error: Exception, args: Sequence[Any]) -> bool:
        """Another error came: is eager to run this call and all later ones?"""

    def eager(self) -> Callable[..., Any]:
        """What runs calls in eager."""


@final
class CompiledStep:
    """Callable in place of Dynamo's graph.

    `program`: for tensors like those of the first call; `replan(args)`: one for those
    of another. `verify(args, run)` runs a call and checks it. `pending`: where launches
    are put off while it is open, whose owner lets one thread in at a time. `made` is
    told of each call that gives something back: its memory, None if it has made none.
    """

    def __init__(
        self,
        source: TensorSource,
        program: Program,
        replan: Callable[[Sequence[Any]], Program],
        policy: ChangePolicy,
        verify: Callable[[Sequence[Any], Callable[[], Any]], Any] | None = None,
        pending: Pending | None = None,
        made: Callable[[Memory | None], None] | None = None,
    ) -> None:
        self.source = source
        self.program = program
        self.programs = [program]
        self.replan = replan
        self.policy = policy
        self.verify = verify
        self.pending = pending
        self.made = made
        self.lock = threading.Lock()
        #: runs all calls, once the step could not be made ready
        self.instead: Callable[..., Any] | None = None

    @property
    def helper(self) -> ctypes.PyDLL | None:
        """The library of the guards, once a plan is bound."""
        bound = self.program.bound
        return None if bound is None else bound.helper

    def put_off_to(self, pending: Pending) -> bool:
        """Put launches off from now on; False for a step that is verified, which does
        not.
        """
        if self.verify is None:
            self.pending = pending
        return self.verify is None

    def forget(self) -> None:
        """Take nothing for known that a call leaves to the next: one was cut off."""
        if self.program.bound is not None:
            self.program.bound.guard = None

    def __call__(self, *args: Any) -> Any:
        if self.verify is not None:
            return self.verify(args, lambda: self._run(args))
        if self.pending is not None:
            return self._run_alone(args, self.pending)
        return self._run(args)

    def _run(self, args: Sequence[Any]) -> Any:
        with self.lock:
            return self._run_alone(args)

    def _run_alone(self, args: Sequence[Any], pending: Pending | None = None) -> Any:
        if self.instead is not None:
            return self._in_eager(args, pending)
        bound: Binding | None = None
        try:
            # kept until it is done: the guard knows tensors by address
            found, given = self._look(args)
            needed = found or not self.program.plan.lean
            tensors = self._tensors(args) if needed else []
            bound = self._adapt(found, tensors, args) if found else self.program.bound
            if bound is not None and bound.plan.captured.graph.numbers:
                one = self.source.tensor
                find = tensors.__getitem__ if tensors else lambda i: one(args, i)
                bound.fill(bound.plan.captured.evaluate(args, find))
        except Exception as error:
            if not self.policy.failed(error, args):
                raise
            self.instead, bound = self.policy.eager(), None
        if bound is None:
            return self._in_eager(args, pending)
        if bound.infers and not torch.is_inference_mode_enabled():
            _refuse_inference(self.source.gm)
        if pending is not None:
            waits = pending.open and bound.waits and pending.kept is None
            if pending.ahead is not None:
                pending.lead(self, waits)
            if waits:
                return self._put_off(pending, bound, args, tensors, given)
            pending.begun = True
        memory = self._launch(bound, args, tensors)
        lean = bound.plan.lean
        result = () if lean else self._result(bound, args, tensors, memory)
        if bound.plan.captured.given:
            give(bound, tensors, memory, self.source.tensors(args).__getitem__)
        if bound.guard is not None and not bound.guard.bump():
            self._bump(bound, args, tensors)
        del given
        return result

    def _in_eager(self, args: Sequence[Any], pending: Pending | None) -> Any:
        if pending is not None:
            pending.begun = True
        run = self.instead or self.policy.eager()
        return run(*args)

    def _look(self, args: Sequence[Any]) -> tuple[int, Any]:
        """What the guard says of the tensors of a call; and what keeps these."""
        bound = self.program.bound
        if bound is None or bound.guard is None or not bound.settled:
            # what was bound and could not be moved has no addresses
            return CHANGED, None
        if bound.plan.captured.complexes:
            given = tuple(self._tensors(args))
            return bound.guard.look({}, {}, given), given
        return self.source.look(bound.guard, args)

    def _tensors(self, args: Sequence[Any]) -> list[Any]:
        """The tensors of a call, complex ones as the graph has them."""
        tensors = self.source.tensors(args)
        for i in self.program.plan.captured.complexes:
            tensors[i] = seen_real(tensors[i])
        return tensors

    def _bump(
        self, bound: Binding, args: Sequence[Any], tensors: Sequence[Any]
    ) -> None:
        assert bound.guard is not None
        every = tensors or self._tensors(args)
        compat.bump_versions([every[i] for i in bound.guard.mutated])

    def _put_off(
        self,
        pending: Pending,
        bound: Binding,
        args: Sequence[Any],
        tensors: list[Any],
        given: Any,
    ) -> Any:
        """Prepare the launches of a call; the result, which they will fill."""
        memory = held = None
        launches: Any
        if bound.on_cpu:
            if not bound.plan.simple:
                memory, held = prepared(bound, tensors)
            launches = bound.launches(torch.get_num_threads())
        else:
            launches = functools.partial(self._launch, bound, args, tensors)
        lean = bound.plan.lean
        result = () if lean else self._result(bound, args, tensors, memory)
        count = None if bound.guard is None else bound.guard.count
        bump = functools.partial(self._bump, bound, args, tensors)
        otherwise = bump if bound.plan.inputs.mutated else None
        pending.put_off(launches, count, otherwise, (given, tensors, memory, held))
        return result

    # ---------------------------------------------------------------- changes

    def _adapt(
        self, found: int, tensors: list[Any], args: Sequence[Any]
    ) -> Binding | None:
        """Follow tensors that moved or changed; None if only eager can run the call."""
        bound = self.program.bound
        if found == MOVED and bound is not None and bound.guard is not None:
            # the guard compared all but the device
            guard = bound.guard
            if all(tensors[i].device == bound.metadata[i][2] for i in guard.moved()):
                with contextlib.suppress(AliasError):
                    bound.move(guard.found())
                    guard.accept()
                    return bound
        metadata = metadata_of(tensors)
        if bound is None or found & CHANGED or metadata != bound.metadata:
            if bound is not None:
                self.policy.changed(bound, metadata, found)
            _refuse_in_capture(tensors)
            try:
                bound = self._refit(tensors, args)
            except CaptureError as error:
                # tensors of other kinds than those it was compiled for
                self.policy.refused(error)
                return None
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        try:
            bound.move(addresses)
        except AliasError:
            # capture again, with what is known now
            self.policy.overlapping()
            program = self._plan_for(args)
            bound = program.bind(tensors)
            try:
                bound.move(addresses)
            except AliasError as error:
                log.warning("%s; this step runs in eager", error)
                self.programs.remove(program)
                self.policy.refused(CaptureError(str(error)))
                return None
        assert bound.guard is not None
        bound.guard.look({}, {}, tuple(tensors))
        bound.guard.accept()
        return bound

    def _plan_for(self, args: Sequence[Any]) -> Program:
        self.program = self.replan(args)
        self.programs = [*self.programs[1 - KEPT :], self.program]
        return self.program

    def _refit(self, tensors: list[Any], args: Sequence[Any]) -> Binding:
        """Strides, dtypes or shapes changed: bind a known plan again or make one."""
        for i, t in enumerate(tensors):
            check_tensor("a tensor of the step", t)
            check_memory("a tensor of the step", t)
            check_contents([t])
            tensors[i] = seen_real(t)
        metadata, strides = metadata_of(tensors), [t.stride() for t in tensors]
        for program in reversed(self.programs):
            bound = program.bound
            if bound is None or bound.metadata != metadata:
                continue
            if not program.plan.inputs.fit(strides):
                continue
            self.program = program
            if bound.guard is not None and not (
                bound.guard.look({}, {}, tuple(tensors)) & CHANGED
            ):
                return bound
            return program.bind(tensors)
        if self.program.bound is not None or not self.program.plan.inputs.fit(strides):
            self._plan_for(args)
        return self.program.bind(tensors)

    # ---------------------------------------------------------------- running

    def _launch(
        self, bound: Binding, args: Sequence[Any], tensors: list[Any]
    ) -> Memory | None:
        """Do what a plan says; what of it the caller may be given.

        `tensors` may be empty where a plan is lean.
        """
        tables = bound.tables
        if tables.devices:
            if any(map(is_capturing, tables.devices)):
                return join(bound, tensors or self._tensors(args))
            tables.follow()
        return self.program.executor.run(bound, tensors, torch.get_num_threads())

    def _result(
        self,
        bound: Binding,
        args: Sequence[Any],
        tensors: list[Any],
        memory: Memory | None,
    ) -> Any:
        itself = functools.partial(self.source.tensor, args)
        result = returned(bound, tensors, memory, itself)
        if self.made is not None:
            self.made(memory)
        return result


def _refuse_inference(gm: GraphModule) -> None:
    """Raise what eager raises at the first write to an inference tensor, unless the
    step itself enters the mode.
    """
    if any("inference_mode" in str(node.target) for node in gm.graph.nodes):
        return
    raise RuntimeError(
        "Inplace update to inference tensor outside InferenceMode is not allowed."
        "You can make a clone to get a normal tensor before doing inplace update."
        "See https://github.com/pytorch/rfcs/pull/17 for more details. "
        "(fuseopt: the step has written nothing)"
    )


def _refuse_in_capture(tensors: Sequence[torch.Tensor]) -> None:
    """New tables cannot be made inside a capture: nothing in it runs."""
    for device in {t.device for t in tensors}:
        if is_capturing(device):
            raise LaunchError(
                f"a graph is being captured on {device}, and the step must first be "
                "made ready for its tensors: run it once before the capture, with "
                "tensors of the same shapes and strides"
            )


__all__ = ["ChangePolicy", "CompiledStep"]

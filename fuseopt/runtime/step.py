"""Run a compiled step at each call of the user's function.

`CompiledStep` gets the tensors of a call from its *source*. The guard of its program's
binding compares them with those of the last call. A moved tensor changes one address,
new strides need new tables, a new dtype or shape needs a new plan. A *policy* decides
which changes are followed, and what runs the other calls. All checks come before all
writes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

import torch
from torch.fx import GraphModule

from .. import compat
from ..capture.fx.inputs import check_contents, check_memory, check_tensor
from ..errors import AliasError, CaptureError, LaunchError
from ..ir.graph import Literal
from ..locks import new_lock
from .binding import Binding, metadata_of
from .commit import Pending
from .devices import Place, is_capturing
from .executor import Calls, Program, prepared
from .guards.tensors import CHANGED, MOVED
from .live import Live
from .memory import Memory, seen_real
from .results import give, returned
from .source import OneByOne, TensorSource
from .undo import at_once
from .user_capture import join

log = logging.getLogger("fuseopt")

#: Programs that a step keeps, for tensors of different dtypes and shapes. Dynamo may
#: cut a loop into pieces of a step, and call these with each parameter in turn.
KEPT = 32


class ChangePolicy(Protocol):
    """Interface of decisions on calls with new tensors, before any write."""

    def changed(self, bound: Binding, metadata: list[Any], found: int) -> None:
        """Raise an error unless the step may be bound or planned anew. The tensors
        differ from those of a binding, by their `metadata` or by the result of its
        guard, `found`.
        """

    def overlapping(self) -> None:
        """Raise an error unless the step may be planned anew for shared memory."""

    def refused(self, error: CaptureError) -> None:
        """Raise an error unless eager may run a call that cannot be planned."""

    def failed(self, error: Exception, args: Sequence[Any]) -> bool:
        """Should eager run this call and all later ones, after another error?"""

    def eager(self) -> Callable[..., Any]:
        """Return the function that runs calls in eager."""


@final
class CompiledStep:
    """Callable in place of Dynamo's graph.

    `program` is for tensors like those of the first call; `replan(args)` makes one for
    those of another call. `verify(args, run)` runs a call and checks it. `pending`
    takes the launches while it is open; its owner admits one thread at a time. The step
    calls `made(memory)` after each call that returns something. `memory` is that of the
    call, or None if it has allocated none.
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
        self.lock = new_lock()
        #: see Binding.keep
        self.taking: bytes | None = None
        #: runs all calls in eager, after an error that the policy accepted
        self.instead: Callable[..., Any] | None = None

    @property
    def helper(self) -> ctypes.PyDLL | None:
        """Library of the guards, once a plan is bound."""
        bound = self.program.bound
        return None if bound is None else bound.helper

    @property
    def compares(self) -> bool:
        """Has a guard compared the tensors of another call?"""
        bound = self.program.bound
        return bound is not None and bound.guard is not None and bound.settled

    def put_off_to(self, pending: Pending) -> bool:
        """Defer launches to `pending` from now on. Return False for a verified step,
        which launches at once.
        """
        if self.verify is None:
            self.pending = pending
        return self.verify is None

    def forget(self) -> None:
        """Forget the record of the last call, which was interrupted."""
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
            # `alive` lives until the step is done: the guard holds tensors by address
            change, alive = self._compare(args)
            tensors = self._tensors(args) if change else self.needed(args)
            bound = self._adapt(change, tensors, args) if change else self.program.bound
            if bound is not None and bound.taking is not self.taking:
                bound.keep(self.taking)
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
            if pending.refreshing:
                pending.live = pending.live or Live()
                pending.live.check(bound)
            waits = pending.open and bound.waits and pending.kept is None
            if waits:
                return self.defer(bound, args, tensors, alive)
            if pending.launches_before is not None:
                pending.lead(self, False)
            if pending.open and bound.by_aten:
                # values computed from the results may fail to compute, before all is
                # written
                every = tensors or self._tensors(args)
                pending.protect([every[i] for i in bound.plan.inputs.mutated])
            pending.begun = True
        memory = self._launch(bound, args, tensors)
        result = self._result(bound, args, tensors, memory)
        if bound.plan.captured.given:
            give(bound, tensors, memory, self.source.tensors(args).__getitem__)
        if bound.guard is not None and not bound.guard.bump():
            self.count_versions(bound, args, tensors)
        del alive
        return result

    def _in_eager(self, args: Sequence[Any], pending: Pending | None) -> Any:
        if pending is not None:
            pending.begun = True
        run = self.instead or self.policy.eager()
        return run(*args)

    def _compare(self, args: Sequence[Any]) -> tuple[int, Any]:
        """Return the guard's result for a call's tensors, and a reference to them."""
        bound = self.program.bound
        if bound is None or bound.guard is None or not bound.settled:
            # a binding whose first `move` failed has no addresses
            return CHANGED, None
        if bound.plan.captured.complexes:
            tensors = tuple(self._tensors(args))
            return bound.guard.compare({}, {}, tensors), tensors
        return self.source.compare(bound.guard, args)

    def _tensors(self, args: Sequence[Any]) -> list[Any]:
        """Return the tensors of a call, complex ones as in the graph."""
        tensors = self.source.tensors(args)
        for i in self.program.plan.captured.complexes:
            tensors[i] = seen_real(tensors[i])
        return tensors

    def needed(self, args: Sequence[Any]) -> Any:
        """Return the tensors that a call reads, by index: none, each found when it is
        read, or all. The call has the layouts of the last one.
        """
        if self.program.lean:
            return []
        if self.program.plan.reads_few:
            return OneByOne(self.source, args)
        return self._tensors(args)

    def count_versions(
        self, bound: Binding, args: Sequence[Any], tensors: Sequence[Any] = ()
    ) -> None:
        """Increment the versions of what a call wrote, in Python."""
        assert bound.guard is not None
        every = tensors or self._tensors(args)
        compat.bump_versions([every[i] for i in bound.guard.mutated])

    def defer(
        self, bound: Binding, args: Sequence[Any], tensors: list[Any], alive: Any
    ) -> Any:
        """Hand the launches of a call to `pending`, which is open, after those that
        come before a step. Return the result, whose memory they write later.

        `tensors` may be empty where the plan is lean. `alive` is kept until then.
        """
        pending = self.pending
        assert pending is not None
        if pending.launches_before is not None:
            pending.lead(self, True)
        memory = arena = None
        launches: Any
        if bound.on_cpu:
            if not bound.plan.simple:
                memory, arena = prepared(bound, tensors)
            launches = bound.launches(torch.get_num_threads())
        else:
            launches = functools.partial(self._launch, bound, args, tensors)
        result = self._result(bound, args, tensors, memory)
        if bound.plan.host_results and memory is not None:
            _write_numbers(bound, memory)
        count = None if bound.guard is None else bound.guard.count
        bump = functools.partial(self.count_versions, bound, args, tensors)
        otherwise = bump if bound.plan.inputs.mutated else None
        pending.put_off(launches, count, otherwise, (alive, tensors, memory, arena))
        return result

    # ---------------------------------------------------------------- changes

    def _adapt(
        self, change: int, tensors: list[Any], args: Sequence[Any]
    ) -> Binding | None:
        """Follow tensors that moved or changed; None if only eager can run the call."""
        bound = self.program.bound
        if change == MOVED and bound is not None and bound.guard is not None:
            # the guard compared everything but the device
            guard = bound.guard
            if all(tensors[i].device == bound.metadata[i][2] for i in guard.moved()):
                with contextlib.suppress(AliasError):
                    bound.move(guard.found())
                    guard.accept()
                    return bound
        metadata = metadata_of(tensors)
        if bound is None or change & CHANGED or metadata != bound.metadata:
            if bound is not None:
                self.policy.changed(bound, metadata, change)
            _refuse_in_capture(tensors)
            try:
                bound = self._refit(tensors, args)
            except CaptureError as error:
                # tensors of a kind that cannot be captured
                self.policy.refused(error)
                return None
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        try:
            bound.move(addresses)
        except AliasError:
            # capture again, since the tensors share memory in a new way
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
        bound.guard.compare({}, {}, tuple(tensors))
        bound.guard.accept()
        return bound

    def _plan_for(self, args: Sequence[Any]) -> Program:
        self.program = self.replan(args)
        self.programs = [*self.programs[1 - KEPT :], self.program]
        return self.program

    def _refit(self, tensors: list[Any], args: Sequence[Any]) -> Binding:
        """Bind a plan to tensors of new strides, dtypes or shapes. Use one of the kept
        programs if it fits, else make a new one.
        """
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
                bound.guard.compare({}, {}, tuple(tensors)) & CHANGED
            ):
                return bound
            return program.bind(tensors)
        plan = self.program.plan
        fits = plan.takes(tensors) and plan.inputs.fit(strides)
        if self.program.bound is not None or not fits:
            self._plan_for(args)
        return self.program.bind(tensors)

    # ---------------------------------------------------------------- running

    def _launch(
        self,
        bound: Binding,
        args: Sequence[Any],
        tensors: list[Any],
        then: Calls = (),
    ) -> Memory | None:
        """Run the plan, and make C calls after it; return the memory of the results.

        `tensors` may be empty where a plan is lean.
        """
        tables = bound.tables
        if tables.devices:
            if any(map(Place.capturing, tables.places)):
                live = None if self.pending is None else self.pending.live
                joins = live is not None and live.joins(bound)
                memory = join(bound, tensors or self._tensors(args), joins)
                at_once(then)
                return memory
            tables.follow()
            if self.pending is not None and self.pending.refreshing:
                self.pending.live.refresh(bound, torch.get_num_threads(), then)
                return None
        threads = torch.get_num_threads()
        return self.program.executor.run(bound, tensors, threads, then)

    def launch_alone(self, bound: Binding) -> Callable[..., object]:
        """Return a call that runs a plan of launches on devices alone. The caller has
        found that none of the devices is capturing a graph.
        """
        return functools.partial(self._launch_uncaptured, bound)

    def _launch_uncaptured(self, bound: Binding) -> None:
        bound.tables.follow()
        self.program.executor.run(bound, [], torch.get_num_threads())

    def _result(
        self,
        bound: Binding,
        args: Sequence[Any],
        tensors: list[Any],
        memory: Memory | None,
    ) -> Any:
        lean = bound.plan.lean
        if lean and bound.plan.captured.result == ():
            return ()
        itself = functools.partial(self.source.tensor, args)
        result = returned(bound, tensors, memory, itself)
        if self.made is not None and not (lean and memory is None):
            self.made(memory)
        return result


def _write_numbers(bound: Binding, memory: Memory) -> None:
    """Write numbers of the host to results, which the caller reads before the launch.

    Writes by address leave versions unchanged, as for a tensor that a kernel fills.
    """
    numbers = bound.numbers or ()
    for b, scalar in bound.plan.host_results.items():
        number = scalar.value if isinstance(scalar, Literal) else numbers[scalar.expr]
        address = memory.tensor(b).data_ptr()
        ctypes.c_double.from_address(address).value = float(number)


def _refuse_inference(gm: GraphModule) -> None:
    """Raise eager's error at the first write to an inference tensor, unless the step
    itself enters the mode.
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
    """Raise an error inside a capture. Nothing in it runs, so no tables can be made."""
    for device in {t.device for t in tensors}:
        if is_capturing(device):
            raise LaunchError(
                f"a CUDA graph capture is active on {device}, but the step is not "
                "ready for its tensors. Run it once before the capture, with tensors "
                "of the same shapes and strides"
            )


__all__ = ["ChangePolicy", "CompiledStep"]

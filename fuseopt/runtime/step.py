"""A compiled step: what runs each time the user's function is called.

`CompiledStep` holds Dynamo's graph and a *plan* for tensors of certain dtypes and
shapes. Each call reads the address of every tensor it will touch and compares their
metadata with the plan's: a moved tensor is one changed number, a changed stride a new
table, a changed dtype or shape a new plan. Everything is checked before anything is
written.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from .. import compat
from ..capture.fx.eager import as_eager
from ..capture.fx.inputs import (
    check_contents,
    check_memory,
    check_tensor,
    static_tensors,
)
from ..capture.scalars.device import NumberRef
from ..capture.scalars.host import same_numbers
from ..errors import AliasError, CaptureError, LaunchError
from .commit import Pending
from .devices import is_capturing
from .executor import in_order, prepared
from .guards.probe import CHANGED, MOVED
from .memory import Memory, seen_real
from .plan import Plan
from .user_capture import join

log = logging.getLogger("fuseopt")


class CompiledStep:
    """Callable in place of Dynamo's graph. `make_plan(gm, args)` compiles it anew.

    Where it cannot for the tensors of a later call, `refuse(error)` is told, which may
    raise; otherwise eager runs that call. Any other error before something is written
    goes to `failed(error, args)`: True if eager is to run this and all later calls.
    """

    def __init__(
        self,
        gm: GraphModule,
        make_plan: Callable[[GraphModule, Sequence[Any]], Plan],
        args: Sequence[Any],
        verify: Callable[[Any, Sequence[Any], Callable[[], Any]], Any] | None = None,
        refuse: Callable[[CaptureError], None] = lambda error: None,
        failed: Callable[[Exception, Sequence[Any]], bool] = lambda error, args: False,
    ) -> None:
        self.gm = gm
        self.refuse = refuse
        self.failed = failed
        #: runs all calls, once the step could not be made ready
        self.instead: Callable[..., Any] | None = None
        self.make_plan = make_plan
        self.lock = threading.Lock()
        self.verify = verify
        #: where launches are put off, while it is open
        self.pending: Pending | None = None
        self.plans: list[Plan] = []
        self.plan = self._plan_for(args)

    def _plan_for(self, args: Sequence[Any]) -> Plan:
        plan = self.make_plan(self.gm, args)
        self.plans = [*self.plans[-3:], plan]
        return plan

    def _given(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Where a probe finds the tensors of a call: two dicts and a tuple."""
        captured = self.plan.captured
        if captured.complexes:
            return {}, {}, tuple(self._tensors(args))
        gm, positions = self.gm, captured.tensor_args
        given = args if len(positions) == len(args) else [args[i] for i in positions]
        return gm._buffers, gm._parameters, tuple(given)

    def _look(self, plan: Plan, args: Sequence[Any]) -> tuple[int, Any]:
        """What a plan's probe says of the tensors of a call; and what keeps these."""
        given = self._given(args)
        if plan.probe is None or not plan.settled:
            # what was bound and could not be moved has no addresses
            return CHANGED, given
        return plan.probe.look(*given), given

    def _tensors(self, args: Sequence[Any]) -> list[Any]:
        captured = self.plan.captured
        tensors = self._themselves(args)
        for i in captured.complexes:
            tensors[i] = seen_real(tensors[i])
        return tensors

    def _tensor(self, args: Sequence[Any], i: int) -> Any:
        """One of `_tensors`, where there are no complex ones."""
        k = i - len(self.gm._buffers) - len(self.gm._parameters)
        if k < 0:
            return self._tensors(args)[i]
        return args[self.plan.captured.tensor_args[k]]

    def __call__(self, *args: Any) -> Any:
        if self.verify is not None:
            return self.verify(self.gm, args, lambda: self._run(args))
        if self.pending is not None:
            # whose owner lets one thread in at a time
            return self._run_alone(args, self.pending)
        return self._run(args)

    def _run(self, args: Sequence[Any]) -> Any:
        with self.lock:
            return self._run_alone(args)

    def _run_alone(self, args: Sequence[Any], pending: Pending | None = None) -> Any:
        if self.instead is not None:
            return self._in_eager(args, pending)
        plan: Plan | None = self.plan
        assert plan is not None
        try:
            # kept until it is done: the probe knows tensors by address
            found, given = self._look(plan, args)
            tensors = self._tensors(args) if found or not plan.lean else []
            if found:
                plan = self._adapt(found, tensors, args)
            if plan is not None and plan.captured.scalars.exprs:
                self._scalars(plan, args, tensors)
        except Exception as error:
            if not self.failed(error, args):
                raise
            self.instead, plan = as_eager(self.gm), None
        if plan is None:
            return self._in_eager(args, pending)
        if plan.infers and not torch.is_inference_mode_enabled():
            _refuse_inference(self.gm)
        if pending is not None:
            if pending.open and plan.waits and pending.kept is None:
                return self._put_off(pending, plan, args, tensors, given)
            pending.begun = True
        memory = self._launch(plan, args, tensors)
        result = () if plan.lean else self._result(plan, args, tensors, memory)
        if plan.captured.given:
            self._give(plan, args, tensors, memory)
        if plan.probe is not None and not plan.probe.bump():
            self._bump(plan, args, tensors)
        del given
        return result

    def _in_eager(self, args: Sequence[Any], pending: Pending | None) -> Any:
        if pending is not None:
            pending.begun = True
        run = self.instead or as_eager(self.gm)
        return run(*args)

    def _bump(self, plan: Plan, args: Sequence[Any], tensors: list[Any]) -> None:
        assert plan.probe is not None
        tensors = tensors or self._tensors(args)
        compat.bump_versions([tensors[i] for i in plan.probe.mutated])

    def _put_off(
        self,
        pending: Pending,
        plan: Plan,
        args: Sequence[Any],
        tensors: list[Any],
        given: Any,
    ) -> Any:
        """Prepare the launches of a plan; the result, which they will fill."""
        memory = held = None
        launches: Any
        if plan.on_cpu:
            if not plan.simple:
                memory, held = prepared(plan, tensors)
            launches = plan.launches(torch.get_num_threads())
        else:
            launches = functools.partial(self._launch, plan, args, tensors)
        result = () if plan.lean else self._result(plan, args, tensors, memory)
        count = None if plan.probe is None else plan.probe.count
        bump = functools.partial(self._bump, plan, args, tensors)
        otherwise = bump if plan.mutated else None
        pending.put_off(launches, count, otherwise, (given, tensors, memory, held))
        return result

    def forget(self) -> None:
        """Take nothing for known that a call leaves to the next: one was cut off."""
        self.plan.probe = None

    # ---------------------------------------------------------------- changes

    def _adapt(
        self, found: int, tensors: list[Any], args: Sequence[Any]
    ) -> Plan | None:
        """Follow tensors that moved or changed; None if only eager can run the call."""
        plan = self.plan
        if found == MOVED and plan.probe is not None:
            # the probe compared all but the device
            moved = plan.probe.moved()
            if all(tensors[i].device == plan.metadata[i][2] for i in moved):
                with contextlib.suppress(AliasError):
                    plan.move(plan.probe.found())
                    plan.probe.accept()
                    return plan
        metadata = [(t.dtype, t.shape, t.device) for t in tensors]
        if found & CHANGED or metadata != plan.metadata:
            _refuse_in_capture(tensors)
            try:
                plan = self._refit(tensors, args)
            except CaptureError as error:
                # tensors of other kinds than those it was compiled for
                self.refuse(error)
                return None
        ptrs = list(map(torch.Tensor.data_ptr, tensors))
        try:
            plan.move(ptrs)
        except AliasError:
            again = self._realias(args, tensors, ptrs)
            if again is None:
                return None
            plan = again
        assert plan.probe is not None
        plan.probe.look({}, {}, tuple(tensors))
        plan.probe.accept()
        return plan

    def _refit(self, tensors: list[Any], args: Sequence[Any]) -> Plan:
        """Strides, dtypes or shapes changed: bind a known plan again or make one."""
        for i, t in enumerate(tensors):
            check_tensor("a tensor of the step", t)
            check_memory("a tensor of the step", t)
            check_contents([t])
            tensors[i] = seen_real(t)
        metadata = [(t.dtype, t.shape, t.device) for t in tensors]
        known = [p for p in self.plans if p.metadata == metadata and p.fits(tensors)]
        if known:
            plan = self.plan = known[-1]
            if plan.probe is not None and not (
                plan.probe.look({}, {}, tuple(tensors)) & CHANGED
            ):
                return plan
        elif self.plan.metadata or not self.plan.fits(tensors):
            self.plan = self._plan_for(args)
        self.plan.bind(tensors)
        return self.plan

    def _realias(
        self, args: Sequence[Any], tensors: list[Any], ptrs: list[int]
    ) -> Plan | None:
        """Tensors share memory in a new way: capture again, with what is known now."""
        self.plan = plan = self._plan_for(args)
        plan.bind(tensors)
        try:
            plan.move(ptrs)
        except AliasError as error:
            log.warning("%s; this step runs in eager", error)
            self.plans.remove(plan)
            self.refuse(CaptureError(str(error)))
            return None
        return plan

    def _scalars(self, plan: Plan, args: Sequence[Any], tensors: list[Any]) -> None:
        one = tensors.__getitem__ if tensors else lambda i: self._tensor(args, i)
        numbers = plan.captured.scalars.evaluate(args, one)
        if plan.numbers is None or not same_numbers(numbers, plan.numbers):
            plan.numbers = None  # not known, should this be cut off
            for table in plan.tables.values():
                table.fill_rows(numbers)
            plan.numbers = numbers

    # ---------------------------------------------------------------- running

    def _launch(
        self, plan: Plan, args: Sequence[Any], tensors: list[Any]
    ) -> Memory | None:
        """Do what a plan says; what of it the caller may be given.

        `tensors` may be empty where a plan is lean.
        """
        threads = torch.get_num_threads()
        if plan.devices:
            if any(map(is_capturing, plan.devices)):
                return join(plan, tensors or self._tensors(args))
            plan.follow()
            if plan.replays is not None:
                return plan.replays.run(plan, tensors, threads)
        return in_order(plan, tensors, lambda table: table.launch(threads))

    def _result(
        self,
        plan: Plan,
        args: Sequence[Any],
        tensors: list[Any],
        memory: Memory | None,
    ) -> Any:
        if plan.captured.result == ():
            return ()
        buffers = plan.captured.graph.buffers

        def build(x: Any) -> Any:
            if isinstance(x, tuple) and len(x) == 2 and x[0] == "buffer":
                buffer = buffers[x[1]]
                if buffer.kind in ("static", "arg"):
                    return tensors[buffer.source]
                assert memory is not None
                return memory.tensor(x[1])
            if isinstance(x, tuple) and len(x) == 2 and x[0] == "tensor":
                return self._themselves(args)[x[1]]
            if isinstance(x, tuple) and len(x) == 2 and x[0] == "alias":
                return tensors[buffers[x[1]].source].detach()
            if isinstance(x, tuple) and len(x) == 2 and x[0] == "complex":
                return torch.view_as_complex(build(("buffer", x[1])))
            if isinstance(x, tuple) and len(x) == 2 and x[0] == "sym":
                assert plan.numbers is not None
                return plan.numbers[x[1].index]
            if isinstance(x, NumberRef):
                assert memory is not None
                return memory.number(x)
            if isinstance(x, tuple) and len(x) == 2 and x[0] == "value":
                return x[1]
            return type(x)(build(y) for y in x)

        return build(plan.captured.result)

    def _themselves(self, args: Sequence[Any]) -> list[Any]:
        """The tensors of a call, complex as they may be."""
        given = [args[i] for i in self.plan.captured.tensor_args]
        return [*self.gm._buffers.values(), *self.gm._parameters.values(), *given]

    def _give(
        self,
        plan: Plan,
        args: Sequence[Any],
        tensors: Sequence[torch.Tensor],
        memory: Memory | None,
    ) -> None:
        """Give tensors the memory that the step gives them, all at once."""
        buffers = plan.captured.graph.buffers
        made = []
        for x in plan.captured.given:
            buffer = buffers[x.buffer]
            if buffer.kind in ("static", "arg"):
                t = tensors[buffer.source].detach()
            else:
                assert memory is not None
                t = memory.tensor(x.buffer)
            made.append(torch.view_as_complex(t) if x.complex else t)
        own = self._themselves(args)
        for x, t in zip(plan.captured.given, made, strict=True):
            own[x.place].data = t


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


__all__ = ["CompiledStep", "static_tensors"]

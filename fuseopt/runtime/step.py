"""A compiled step: what runs each time the user's function is called.

`CompiledStep` holds Dynamo's graph and a *plan* for tensors of certain dtypes and
shapes. Each call reads the address of every tensor it will touch and compares their
metadata with the plan's: a moved tensor is one changed number, a changed stride a new
table, a changed dtype or shape a new plan. Everything is checked before anything is
written.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch.fx import GraphModule

from .. import compat
from ..capture.numbers import NumberRef
from ..capture.trace import Captured, check_tensor, static_tensors
from ..errors import AliasError, CaptureError
from ..ir import DTYPE_BYTES, Kernel, Schedule
from .batch import Batch, Trials, in_batches
from .memory import Memory, extent, layout, seen_real, shared_inputs
from .probe import CHANGED, Probe
from .table import KernelTable, TableFactory, TensorLayout

log = logging.getLogger("fuseopt")


class Plan:
    """A schedule bound to the layouts of a call's tensors.

    The pool of addresses has an entry per buffer of the graph: static tensors, tensor
    arguments, views of those, temps.
    """

    def __init__(
        self,
        captured: Captured,
        schedule: Schedule,
        factories: dict[str, TableFactory],
        helper: ctypes.PyDLL | None = None,
    ) -> None:
        self.helper = helper
        self.captured = captured
        self.schedule = schedule
        self.factories = factories
        graph = captured.graph
        buffers = graph.buffers
        self.n_tensors = len(captured.statics) + len(captured.tensor_args)
        # pool position of each buffer: inputs by source, then the rest
        self.position: dict[int, int] = {}
        extra: list[int] = []
        for b, buffer in enumerate(buffers):
            if buffer.kind in ("static", "arg"):
                self.position[b] = buffer.source
            else:
                self.position[b] = self.n_tensors + len(extra)
                extra.append(b)
        self.pool = array("Q", [0] * (self.n_tensors + len(extra)))
        # an empty tensor has no address, whatever storage it is a part of
        base = {
            buffer.storage: b
            for b, buffer in enumerate(buffers)
            if buffer.kind in ("static", "arg") and 0 not in buffer.shape
        }
        # (pool position, base's position, distance in bytes)
        self.views = [
            (
                self.position[b],
                self.position[base[buffers[b].storage]],
                buffers[b].offset * DTYPE_BYTES[buffers[b].dtype]
                - buffers[base[buffers[b].storage]].offset
                * DTYPE_BYTES[buffers[base[buffers[b].storage]].dtype],
            )
            for b in extra
            if buffers[b].kind == "view" and buffers[b].storage in base
        ]
        self.temps = schedule.temps
        self.order = in_batches(graph, schedule, captured.calls)
        self.trials = Trials()
        self.memory = layout(buffers, captured.calls, schedule)
        storages = {
            buffers[graph.values[v]].storage for n in graph.nodes for v in n.writes
        }
        self.written = frozenset(
            b for b, buffer in enumerate(buffers) if buffer.storage in storages
        )
        self.mutated = sorted(
            buffer.source
            for buffer in buffers
            if buffer.kind in ("static", "arg") and buffer.storage in storages
        )
        #: what of the inputs' places the plan rests on
        self.rests = shared_inputs(buffers, storages)
        self.metadata: list[Any] = []
        self.ptrs: list[int] = []
        self.probe: Probe | None = None
        self.tables: dict[str, KernelTable] = {}
        self.bump: list[int] = []
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.simple = (
            len(schedule.steps) == 1
            and isinstance(schedule.steps[0], Kernel)
            and not self.temps
            and not any(buffers[b].kind == "view" for b in graph.outputs)
        )

    # ---------------------------------------------------------------- binding

    def bind(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make the tables for the strides that the tensors have now."""
        buffers = self.captured.graph.buffers
        layouts: dict[int, TensorLayout] = {}
        for b, buffer in enumerate(buffers):
            if buffer.kind in ("static", "arg"):
                t = tensors[buffer.source]
                layouts[b] = TensorLayout(tuple(t.shape), t.stride())
            else:
                layouts[b] = TensorLayout(buffer.shape, buffer.stride)
        self.tables = {
            step.name: self.factories[step.name](
                step, self.pool, self.position, layouts
            )
            for step in self.schedule.steps
            if isinstance(step, Kernel)
        }
        if not any(t.symbolic for t in self.tables.values()):
            for table in self.tables.values():
                table.fill_rows(())
        self.numbers: list[Any] | None = None
        self.probe = Probe(tensors, self.helper)
        self.metadata = [(t.dtype, t.shape, t.device) for t in tensors]
        self.bump = [i for i in self.mutated if tensors[i].requires_grad]
        self.pick = itemgetter(*self.bump, self.bump[0]) if self.bump else None
        self.ptrs = []
        self._layouts = layouts

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Do the strides allow what was planned? Of most tensors any do."""
        strides = [(i, tensors[i].stride()) for i, _ in self.rests.strides]
        return strides == self.rests.strides and all(
            tensors[i].stride() == tensors[k].stride() for i, k in self.captured.twins
        )

    def move(self, ptrs: list[int]) -> None:
        """Take new addresses. Raises AliasError if tensors now share memory."""
        together = all(ptrs[i] - ptrs[k] == d for i, k, d in self.rests.distances)
        if not together or any(ptrs[i] != ptrs[k] for i, k in self.captured.twins):
            raise AliasError("tensors that shared memory do so in another way")
        statics = len(self.captured.statics)
        moved = not self.ptrs or self.ptrs[:statics] != ptrs[:statics]
        if moved or any(i >= statics for i in self.mutated):
            self._check_all(ptrs)
        else:
            self._check_moved(ptrs, statics)
        self.pool[: self.n_tensors] = array("Q", ptrs)
        for position, base, distance in self.views:
            self.pool[position] = self.pool[base] + distance
        self.ptrs = ptrs

    def _interval(self, b: int, ptr: int) -> tuple[int, int]:
        buffer = self.captured.graph.buffers[b]
        layout = self._layouts[b]
        own = buffer._replace(shape=layout.shape, stride=layout.stride)
        return ptr, ptr + extent(own)

    def _check_all(self, ptrs: list[int]) -> None:
        """Memory that a lane writes must be no other lane's, unless capture knew."""
        buffers = self.captured.graph.buffers
        spans = sorted(
            (*self._interval(b, ptrs[x.source]), b)
            for b, x in enumerate(buffers)
            if x.kind in ("static", "arg")
        )
        # how far the memory seen so far reaches: of all tensors, and of written ones
        reach, owner, written_reach, writer = 0, -1, 0, -1
        for start, end, b in spans:
            if start == end:
                continue
            is_written = b in self.written
            for other, far in ((writer, written_reach), (owner, reach)):
                fresh = start < far and buffers[b].storage != buffers[other].storage
                if fresh and (is_written or other in self.written):
                    raise AliasError(
                        f"{buffers[other].name} and {buffers[b].name} share memory, "
                        "which they did not when the step was captured"
                    )
            if end > reach:
                reach, owner = end, b
            if is_written and end > written_reach:
                written_reach, writer = end, b
        written = [s for s in spans if s[2] in self.written and s[0] != s[1]]
        self._starts = [s[0] for s in written]
        self._ends = [s[1] for s in written]

    def _check_moved(self, ptrs: list[int], statics: int) -> None:
        """The same for read-only arguments that moved: none in written memory."""
        known = {
            x.source: (b, x)
            for b, x in enumerate(self.captured.graph.buffers)
            if x.kind == "arg"
        }
        for i in range(statics, len(ptrs)):
            if ptrs[i] == self.ptrs[i] or i not in known:
                continue
            low, high = self._interval(known[i][0], ptrs[i])
            k = bisect_right(self._starts, low)
            before = k > 0 and self._ends[k - 1] > low
            after = k < len(self._starts) and self._starts[k] < high
            if low != high and (before or after):
                raise AliasError(
                    f"{known[i][1].name} now lies in memory that the step writes"
                )


class CompiledStep:
    """Callable in place of Dynamo's graph. `make_plan(gm, args)` compiles it anew.

    Where it cannot for the tensors of a later call, `refuse(error)` is told, which may
    raise; otherwise eager runs that call.
    """

    def __init__(
        self,
        gm: GraphModule,
        make_plan: Callable[[GraphModule, Sequence[Any]], Plan],
        args: Sequence[Any],
        verify: Callable[[Any, Sequence[Any], Callable[[], Any]], Any] | None = None,
        refuse: Callable[[CaptureError], None] = lambda error: None,
    ) -> None:
        self.gm = gm
        self.refuse = refuse
        self.make_plan = make_plan
        self.lock = threading.Lock()
        self.verify = verify
        self.plans: list[Plan] = []
        self.plan = self._plan_for(args)

    def _plan_for(self, args: Sequence[Any]) -> Plan:
        plan = self.make_plan(self.gm, args)
        self.plans = [*self.plans[-3:], plan]
        return plan

    def _tensors(self, args: Sequence[Any]) -> list[Any]:
        gm = self.gm
        captured = self.plan.captured
        positions = captured.tensor_args
        given = args if len(positions) == len(args) else [args[i] for i in positions]
        tensors = [*gm._buffers.values(), *gm._parameters.values(), *given]
        for i in captured.complexes:
            tensors[i] = seen_real(tensors[i])
        return tensors

    def __call__(self, *args: Any) -> Any:
        if self.verify is not None:
            return self.verify(self.gm, args, lambda: self._run(args))
        return self._run(args)

    def _run(self, args: Sequence[Any]) -> Any:
        with self.lock:
            tensors = self._tensors(args)
            plan = self.plan
            found = CHANGED if plan.probe is None else plan.probe.look(tensors)
            if found:
                changed = self._adapt(found, tensors, args)
                if changed is None:
                    return self.gm(*args)
                plan = changed
            if plan.captured.scalars.exprs:
                self._scalars(plan, args, tensors)
            threads = torch.get_num_threads()
            if plan.simple:
                for table in plan.tables.values():
                    table.launch(threads)
                result = self._result(plan, tensors, None)
            else:
                result = self._steps(plan, tensors, threads)
            if plan.pick is not None:
                compat.bump_versions(plan.pick(tensors))
            return result

    # ---------------------------------------------------------------- changes

    def _adapt(
        self, found: int, tensors: list[Any], args: Sequence[Any]
    ) -> Plan | None:
        """Follow tensors that moved or changed; None if only eager can run the call."""
        plan = self.plan
        metadata = [(t.dtype, t.shape, t.device) for t in tensors]
        if found & CHANGED or metadata != plan.metadata:
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
        plan.probe.look(tensors)
        plan.probe.accept()
        return plan

    def _refit(self, tensors: list[Any], args: Sequence[Any]) -> Plan:
        """Strides, dtypes or shapes changed: bind a known plan again or make one."""
        for i, t in enumerate(tensors):
            check_tensor("a tensor of the step", t)
            tensors[i] = seen_real(t)
        metadata = [(t.dtype, t.shape, t.device) for t in tensors]
        known = [p for p in self.plans if p.metadata == metadata and p.fits(tensors)]
        if known:
            self.plan = known[-1]
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
            return None
        return plan

    def _scalars(self, plan: Plan, args: Sequence[Any], tensors: list[Any]) -> None:
        numbers = plan.captured.scalars.evaluate(args, tensors)
        if numbers != plan.numbers:
            for table in plan.tables.values():
                table.fill_rows(numbers)
            plan.numbers = numbers

    # ---------------------------------------------------------------- running

    def _steps(self, plan: Plan, tensors: list[Any], threads: int) -> Any:
        """Kernels and externs in order, with memory for temps."""
        memory = Memory(
            plan.memory, tensors, plan.pool, plan.position, plan.numbers or ()
        )
        memory.allocate(plan.temps)
        with torch.no_grad():
            for step in plan.order:
                if isinstance(step, Kernel):
                    plan.tables[step.name].launch(threads)
                elif isinstance(step, Batch):
                    memory.run_batch(step.members, plan.captured.calls, plan.trials)
                else:
                    memory.run(step, plan.captured.calls[step.payload])
        return self._result(plan, tensors, memory)

    def _result(self, plan: Plan, tensors: list[Any], memory: Memory | None) -> Any:
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


__all__ = ["CompiledStep", "Plan", "static_tensors"]

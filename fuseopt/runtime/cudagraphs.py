"""The launches of a step, captured once and replayed: CUDA graphs and their like.

A graph holds the launches of a plan's kernels and the ATen calls between them. What
changes from call to call stands in the arena that the kernels read: addresses and
hyperparameters are refreshed before each replay, so that nothing is captured again when
gradients move or a learning rate changes. ATen calls have their addresses in the graph:
where a plan has some, a graph belongs to the places of the tensors that they touch.

The first call with tensors in certain places runs as it is; the second is captured,
which runs nothing, and replayed. `Graphs` is what a process shares: for each device a
pool of memory and a stream to capture on, and all graphs, to release them.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from .. import compat
from ..capture.aten.constants import Constant
from ..capture.aten.externs import Call, TensorRef
from ..capture.results import result_buffers
from ..capture.scalars.device import NumberRef
from ..capture.scalars.host import Sym
from ..capture.trace import Captured
from ..compat.profiling import profiled, profiler_range
from ..errors import CudaGraphError, LaunchError
from ..ir.graph import Schedule
from .binding import Binding
from .cpp.table import DeviceTable, KernelTable
from .devices import is_remote, module_of, on
from .executor import in_order, starting
from .marks import replay_name
from .memory import Memory
from .tables.host_numbers import place_of
from .triton.registry import type_of

log = logging.getLogger("fuseopt.runtime.cudagraphs")

#: Graphs that a plan keeps, for as many places of the tensors that ATen calls touch.
KEPT = 4
#: Captures after which graphs must have been replayed REPLAYED times as often.
TRIED, REPLAYED = 8, 4
#: Namespaces of calls that talk to other processes.
COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
#: ATen calls that wait for the device, or whose result's size is known only there.
WAITING = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


class Site:
    """A device's memory for graphs, and a stream to capture on.

    Graphs share the memory of what they make in between; so replays on two streams take
    turns. `alive`: the graphs whose memory is of the pool.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module = module_of(device)
        self.pool: Any = None
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()
        with on(device):
            self.stream = self.module.Stream()
            self.done = self.module.Event()
        self.last: Any = None

    def pool_for(self, graph: Any) -> Any:
        """The pool that a graph is about to be captured with.

        torch's allocators refuse a pool whose graphs are all gone: then it is new.
        """
        if not self.alive:
            self.pool = self.module.graph_pool_handle()
        self.alive.add(graph)
        return self.pool

    def release(self, graph: Any) -> None:
        """Give a graph's memory back."""
        graph.reset()
        self.alive.discard(graph)

    def take_turns(self, replay: Callable[[], None]) -> None:
        """Replay a graph with memory of its own, after the last one's replay."""
        stream = self.module.current_stream(self.device)
        if self.last is not None and self.last != stream:
            stream.wait_event(self.done)
        replay()
        self.done.record(stream)
        self.last = stream


class Graphs:
    """What all graphs of a process share."""

    def __init__(self) -> None:
        self.sites: dict[torch.device, Site] = {}
        self.replays: weakref.WeakSet[Replays] = weakref.WeakSet()
        #: captures that broke: allocators may still ask them
        self.failed: list[Any] = []

    def site(self, device: torch.device) -> Site:
        """A device's site."""
        if device not in self.sites:
            self.sites[device] = Site(device)
        return self.sites[device]

    def drop(self, device: torch.device, graph: Any) -> None:
        """A capture broke: its pool and its stream are not used again."""
        site = self.sites.pop(device, None)
        self.failed.append(graph)
        if site is not None:
            compat.end_allocation(device, site.pool)
            kind = type_of(device)
            with on(device):
                graph_class = getattr(site.module, kind.graph)
                compat.end_generator_capture(device, graph_class, kind.capture)

    def release(self) -> None:
        """Let go of all graphs and their memory; steps capture anew."""
        for replays in list(self.replays):
            replays.release()
        self.sites.clear()


def why_not(captured: Captured, schedule: Schedule) -> str:
    """Why a plan's launches cannot be captured; "" if nothing speaks against it."""
    buffers, values = captured.graph.buffers, captured.graph.values
    externs = schedule.externs
    places = {place_of(buffers, kernel) for kernel in schedule.kernels}
    remote = {p for p in places if is_remote(torch.device(p))}
    if not remote:
        return "no kernel runs on a device that has graphs"
    for place in remote:
        device = torch.device(place)
        name = type_of(device).graph
        if not name or not hasattr(module_of(device), name):
            return f"this torch has no graphs for {device.type}"
    if not externs:
        return ""
    if places != remote:
        return (
            f"an ATen call ({externs[0].name}) may need what a kernel of the CPU made"
        )
    if len(remote) > 1:
        return f"{externs[0].name} stands between several devices"
    for extern in externs:
        call = captured.calls[extern.payload]
        own = {buffers[values[v]].device for v in (*extern.reads, *extern.writes)}
        why = _why_not_call(call, own | {buffers[b].device for b in call.outputs})
        if why:
            return f"{extern.name} {why}"
    return ""


def _why_not_call(call: Call, places: set[str]) -> str:
    if isinstance(call.func, Constant):
        return "" if is_remote(call.func.tensor.device) else "copies from the CPU"
    if any(not is_remote(torch.device(p)) for p in places):
        return "works on a tensor of the CPU"
    found = list(_leaves([call.args, call.kwargs]))
    if any(isinstance(x, NumberRef) for x in found):
        return "waits for a number that the step computed"
    if any(isinstance(x, Sym) for x in found):
        return "takes a number that may change between calls"
    if any(isinstance(x, torch.Generator) for x in found):
        return "draws from a generator of the user's"
    if getattr(call.func, "namespace", "") in COLLECTIVES:
        return "talks to other processes"
    if WAITING & set(getattr(call.func, "tags", ())):
        return "waits for the device"
    return ""


def _leaves(x: Any) -> Any:
    if isinstance(x, dict):
        x = list(x.values())
    if isinstance(x, (list, tuple)) and not isinstance(x, (TensorRef, NumberRef)):
        for y in x:
            yield from _leaves(y)
    else:
        yield x


class Held:
    """Captured graphs of a plan, one for each device, and what replays need beside.

    `temps`: pool positions and addresses of what the steps make in between, in the
    graph's memory. `results`: the tensors among it that the caller is given. `host`:
    memory of the CPU that its kernels use.
    """

    def __init__(self) -> None:
        self.graphs: list[tuple[Site, Any]] = []
        self.temps: list[tuple[int, int]] = []
        self.results: dict[int, torch.Tensor] = {}
        self.host: list[torch.Tensor] = []

    def release(self) -> None:
        """Give the graphs' memory back."""
        for site, graph in self.graphs:
            site.release(graph)
        self.graphs.clear()
        self.results.clear()
        self.host.clear()


class Replays:
    """The graphs of one plan. `tell(state)` is told what became of them.

    `require`: raise CudaGraphError instead of running without a graph.
    """

    def __init__(
        self,
        shared: Graphs,
        captured: Captured,
        schedule: Schedule,
        require: bool = False,
        tell: Callable[[str], None] = lambda state: None,
    ) -> None:
        self.shared = shared
        self.require = require
        self.tell = tell
        self.off = ""
        self.held: OrderedDict[tuple[int, ...], Held] = OrderedDict()
        self.seen: tuple[int, ...] | None = None
        self.captures = self.replayed = 0
        #: the binding whose tables the graphs read
        self.bound: Binding | None = None
        #: the graph whose memory the pool's addresses of temps are of
        self.current: Held | None = None
        buffers, values = captured.graph.buffers, captured.graph.values
        touched = {
            buffers[values[v]].storage
            for s in schedule.externs
            for v in (*s.reads, *s.writes)
        }
        #: inputs that ATen calls touch: their addresses are in the graph
        self.fixed = [
            b.source
            for b in buffers
            if b.kind in ("static", "arg") and b.storage in touched
        ]
        self.results = [
            b
            for b in (
                *result_buffers(captured.result),
                *(x.buffer for x in captured.given),
            )
            if buffers[b].kind == "temp"
        ]
        shared.replays.add(self)
        self._give_up(why_not(captured, schedule))
        if not self.off:
            tell("the second call is captured")

    def _give_up(self, why: str, cause: Exception | None = None) -> None:
        if not why:
            return
        self.release()
        self.off = why
        self.tell(f"off: {why}")
        if self.require:
            raise CudaGraphError(
                f"the step cannot be captured in a graph: {why} "
                "(options={'cudagraphs': 'require'} was given)"
            ) from cause
        log.info("a step runs without a graph: %s", why)

    def release(self) -> None:
        """Let go of all graphs; the step captures anew."""
        for held in self.held.values():
            held.release()
        self.held.clear()
        self.seen = self.current = None

    # ---------------------------------------------------------------- a call

    def run(
        self, bound: Binding, tensors: Sequence[torch.Tensor], threads: int
    ) -> Memory | None:
        """Do the step; what it made that the caller is given. See Executor."""
        if bound is not self.bound:
            # graphs hold the tables of the binding before
            self.release()
            self.bound = bound
        held = None if self.off else self._graph(bound, tensors)
        if held is None:
            self.current = None
            return in_order(bound, tensors, starting(bound, threads))
        if held is not self.current:
            bound.addresses.place_all(held.temps)
            self.current = held
        self._make_ready(bound, threads)
        for arena in bound.tables.arenas:
            arena.push()
        if profiled():
            with profiler_range(replay_name(bound.plan.schedule)):
                self._replay(bound, held)
        else:
            self._replay(bound, held)
        if not bound.tables.fed:
            for host in bound.tables.on_host:
                host.launch(threads)
        self.replayed += 1
        return self._copies(bound, tensors, held) if self.results else None

    def _make_ready(self, bound: Binding, threads: int) -> None:
        """Refresh the tables on devices; before, what kernels of the CPU make for them,
        in the order of the step.
        """
        for table in bound.tables.every.values():
            if table.place is not None:
                cast(DeviceTable, table).fetch()
                cast(DeviceTable, table).refresh()
            elif bound.tables.fed:
                table.launch(threads)

    def _replay(self, bound: Binding, held: Held) -> None:
        try:
            for site, graph in held.graphs:
                if held.temps:
                    site.take_turns(graph.replay)
                else:
                    graph.replay()
        except Exception as error:
            named = bound.tables.named()
            raise LaunchError(f"{named} failed in a graph: {error}") from error

    def _graph(self, bound: Binding, tensors: Sequence[torch.Tensor]) -> Held | None:
        """The graph for these tensors; None if this call runs without one."""
        words = bound.addresses.words
        key = tuple([words[i] for i in self.fixed])
        held = self.held.get(key)
        if held is not None:
            if self.fixed:
                self.held.move_to_end(key)
            return held
        if self.seen != key:
            self.seen = key
            return None
        if self.captures >= TRIED and self.replayed < REPLAYED * self.captures:
            self._give_up("the tensors that its ATen calls take move too often")
            return None
        held = self._capture(bound, tensors)
        if held is not None:
            self.captures += 1
            self.held[key] = held
            if len(self.held) > KEPT:
                self.held.popitem(last=False)[1].release()
            self.tell("captured")
        return held

    # ---------------------------------------------------------------- capture

    def _capture(self, bound: Binding, tensors: Sequence[torch.Tensor]) -> Held | None:
        """Record the launches on each device, running nothing; None if that fails."""
        held = Held()
        compat.before_process_groups_end(self.shared.release)
        buffers = bound.plan.captured.graph.buffers
        for device in bound.tables.devices:
            site = self.shared.site(device)
            kind = type_of(device)
            graph = getattr(site.module, kind.graph)()
            try:
                with on(device), site.module.stream(site.stream):
                    graph.capture_begin(pool=site.pool_for(graph), **kind.capture)
                    try:
                        memory = _record(bound, tensors, device)
                    except BaseException:
                        # what broke tells more than that it is broken
                        with contextlib.suppress(Exception):
                            graph.capture_end()
                        raise
                    graph.capture_end()
            except Exception as error:
                self.shared.drop(device, graph)
                held.release()
                self._give_up(f"capture failed: {error}".split("\n", 1)[0], error)
                return None
            held.graphs.append((site, graph))
            for b in self.results:
                if memory is not None and torch.device(buffers[b].device) == device:
                    held.results[b] = memory.tensor(b)
        held.host = self._host_memory(bound, tensors, held)
        held.temps = [
            (p, bound.addresses.words[p])
            for b, p in bound.addresses.places.of.items()
            if buffers[b].kind == "temp"
        ]
        self.current = held
        return held

    def _host_memory(
        self, bound: Binding, tensors: Sequence[torch.Tensor], held: Held
    ) -> list[torch.Tensor]:
        """Memory for what the kernels of the CPU make for one another."""
        buffers = bound.plan.captured.graph.buffers
        temps = bound.plan.schedule.temps
        own = [b for b in temps if not is_remote(torch.device(buffers[b].device))]
        if not own:
            return []
        memory = Memory(bound.memory, tensors, bound.addresses, ())
        memory.allocate(own)
        held.results.update({b: memory.tensor(b) for b in self.results if b in own})
        return [memory.tensor(b) for b in own]

    def _copies(
        self, bound: Binding, tensors: Sequence[torch.Tensor], held: Held
    ) -> Memory:
        """Memory of the caller's own for what a graph made, since the next replay
        writes there again.
        """
        addresses = bound.addresses.copy()
        memory = Memory(bound.memory, tensors, addresses, bound.numbers or ())
        memory.take_copies(held.results)
        return memory


def _record(
    bound: Binding, tensors: Sequence[torch.Tensor], device: torch.device
) -> Memory | None:
    """Start what a plan has on one device, in a capture."""
    buffers = bound.plan.captured.graph.buffers

    def start(table: KernelTable) -> None:
        if table.place == device:
            cast(DeviceTable, table).run()

    every = bound.plan.schedule.temps
    temps = [b for b in every if torch.device(buffers[b].device) == device]
    return in_order(bound, tensors, start, temps)

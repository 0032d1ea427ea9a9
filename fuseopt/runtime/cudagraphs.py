"""Capture the launches of a step in a CUDA graph (or its like), and replay them.

A graph holds the launches of a plan's kernels and the ATen calls between them.
Addresses and hyperparameters lie in the arena that the kernels read. They are updated
before each replay, so moved gradients or a new learning rate need no new capture. The
addresses that ATen calls take are a part of the graph. So a plan with such calls has a
graph for each set of addresses of the tensors that they touch.

The first call with tensors at certain addresses runs without a graph. The second is
captured, which runs nothing, and then replayed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from .. import compat
from ..capture.aten.autocast import KeptCast
from ..capture.aten.constants import Constant
from ..capture.aten.externs import Call, TensorRef
from ..capture.results import result_buffers
from ..capture.scalars.device import NumberRef
from ..capture.scalars.host import Sym
from ..capture.trace import Captured
from ..compat.gc_pause import collector_paused
from ..compat.profiling import profiled
from ..errors import CudaGraphError, LaunchError
from ..ir.graph import Schedule
from .binding import Binding
from .cpp.table import DeviceTable, KernelTable
from .devices import is_remote, module_of, on
from .executor import Beside, Calls, in_order, whole
from .extern_calls import touched_inputs
from .marks import marked, replay_name
from .memory import Memory
from .probes import circumstances
from .recent import Recent
from .sites import Graphs, Site
from .tables.host_numbers import place_of
from .triton.registry import type_of

log = logging.getLogger("fuseopt.runtime.cudagraphs")

#: Most graphs that a plan keeps, each for other addresses that ATen calls take.
KEPT = 4
#: After TRIED captures, a plan goes on to capture only if it has replayed graphs at
#: least REPLAYED times as often.
TRIED, REPLAYED = 8, 4
#: Namespaces of calls that communicate with other processes.
COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
#: ATen calls that wait for the device, or whose result's size only the device has.
WAITING = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


def why_not(captured: Captured, schedule: Schedule) -> str:
    """Return the reason why a plan's launches cannot be captured, or ""."""
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
        return f"an ATen call ({externs[0].name}) may need the result of a CPU kernel"
    if len(remote) > 1:
        return f"{externs[0].name} uses several devices"
    for extern in externs:
        call = captured.calls[extern.payload]
        touched = {buffers[values[v]].device for v in (*extern.reads, *extern.writes)}
        why = _why_not_call(call, touched | {buffers[b].device for b in call.outputs})
        if why:
            return f"{extern.name} {why}"
    return ""


def _why_not_call(call: Call, places: set[str]) -> str:
    if isinstance(call.func, Constant):
        return "" if is_remote(call.func.tensor.device) else "copies from the CPU"
    if any(not is_remote(torch.device(p)) for p in places):
        return "uses a CPU tensor"
    if isinstance(call.func, KeptCast):
        return "reads a cast that autocast cached"
    leaves = list(_leaves([call.args, call.kwargs]))
    if any(isinstance(x, NumberRef) for x in leaves):
        return "waits for a number that the step computed"
    if any(isinstance(x, Sym) for x in leaves):
        return "takes a number that may change between calls"
    if any(isinstance(x, torch.Generator) for x in leaves):
        return "draws from a generator of the user"
    if getattr(call.func, "namespace", "") in COLLECTIVES:
        return "communicates with other processes"
    if WAITING & set(getattr(call.func, "tags", ())):
        return "waits for the device"
    return ""


def _leaves(tree: Any) -> Any:
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)) and not isinstance(tree, (TensorRef, NumberRef)):
        for leaf in tree:
            yield from _leaves(leaf)
    else:
        yield tree


class CapturedGraphs:
    """Captured graphs of a plan, one for each device, and the memory they use.

    `replays` are C functions that replay them. `temps` are positions in the address
    pool, and addresses, of the temps in the graphs' memory, int64[n] each. `results`
    are by buffer the temps that are returned to the caller. `host` are temps in the
    CPU's memory. `turns` are the sites where other graphs that use the same memory are
    replayed. `ends` are called after a replay there.
    """

    def __init__(self) -> None:
        self.graphs: list[tuple[Site, Any]] = []
        self.replays: list[Callable[[], object]] = []
        none = torch.empty(0, dtype=torch.int64)
        self.temps: tuple[torch.Tensor, torch.Tensor] = none, none
        self.results: dict[int, torch.Tensor] = {}
        self.host: list[torch.Tensor] = []
        self.turns: list[Site] = []
        self.ends: list[Callable[[], object]] = []

    def release(self) -> None:
        """Free the graphs' memory."""
        for site, graph in self.graphs:
            site.release(graph)
        self.graphs.clear()
        self.replays.clear()
        self.turns.clear()
        self.ends.clear()
        self.results.clear()
        self.host.clear()


class Replays:
    """Executor of a plan that captures and replays graphs.

    It calls `on_state(state)` with a text for the Report at each change. With `require`
    it raises CudaGraphError instead of running without a graph.
    """

    def __init__(
        self,
        shared: Graphs,
        captured: Captured,
        schedule: Schedule,
        require: bool = False,
        on_state: Callable[[str], None] = lambda state: None,
    ) -> None:
        self.shared = shared
        self.require = require
        self.on_state = on_state
        self.off = ""
        self.held: Recent[CapturedGraphs] = Recent(KEPT, CapturedGraphs.release)
        self.seen: tuple[Any, ...] | None = None
        self.captures = self.replayed = 0
        #: the binding whose tables the graphs read
        self.bound: Binding | None = None
        #: the graphs in whose memory the addresses of temps in the pool lie
        self.current: CapturedGraphs | None = None
        buffers = captured.graph.buffers
        #: the addresses of these inputs are in the graph
        self.fixed = touched_inputs(captured.graph, schedule)
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
            on_state("the second call is captured")

    def _give_up(self, why: str, cause: Exception | None = None) -> None:
        if not why:
            return
        self.release()
        self.off = why
        self.on_state(f"off: {why}")
        if self.require:
            raise CudaGraphError(
                f"the step cannot be captured in a graph: {why} "
                "(options={'cudagraphs': 'require'} was given)"
            ) from cause
        log.info("a step runs without a graph: %s", why)

    def release(self) -> None:
        """Free all graphs; the step captures again later."""
        self.held.clear()
        self.seen = self.current = None

    # ---------------------------------------------------------------- a call

    def run(
        self,
        bound: Binding,
        tensors: Sequence[torch.Tensor],
        threads: int,
        then: Calls = (),
    ) -> Memory | None:
        """Run the step; return the memory of its results. See Executor."""
        if bound is not self.bound:
            # the graphs read the tables of the previous binding
            self.release()
            self.bound = bound
        graphs = None if self.off else self._graph(bound, tensors)
        if graphs is None:
            self.current = None
            return whole(bound, tensors, threads, then)
        if graphs is not self.current:
            bound.addresses.place_all(*graphs.temps)
            self.current = graphs
        device_launches = bound.device_launches
        assert device_launches is not None
        if device_launches.fed and device_launches.saved is None:
            with bound.undo_on_host(tensors) as undo:
                self._replay(bound, graphs, tensors, threads, [undo.done, *then])
        else:
            self._replay(bound, graphs, tensors, threads, then)
        self.replayed += 1
        return self._copies(bound, tensors, graphs) if self.results else None

    def _replay(
        self,
        bound: Binding,
        graphs: CapturedGraphs,
        tensors: Sequence[torch.Tensor],
        threads: int,
        then: Calls,
    ) -> None:
        """Replay the graphs and make C calls, with nothing in between."""
        for site in graphs.turns:
            site.wait()
        replays = graphs.replays
        if profiled():
            plan = bound.plan
            name = replay_name(plan.captured.graph, plan.schedule)
            replays = marked(name, replays)
        assert bound.device_launches is not None
        try:
            with bound.undo_graphs(tensors) as undo:
                ends: Calls = [undo.done, *then, *graphs.ends]
                bound.device_launches.run(threads, ends, replays)
        except (LaunchError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            named = bound.tables.named()
            raise LaunchError(f"{named} failed in a graph: {error}") from error

    def _graph(
        self, bound: Binding, tensors: Sequence[torch.Tensor]
    ) -> CapturedGraphs | None:
        """Return the graphs for these tensors, or None. Capture them if need be."""
        words = bound.addresses.words
        key: tuple[Any, ...] = tuple([words[i] for i in self.fixed])
        if bound.plan.schedule.externs:
            # a graph has the products that settings chose at its capture
            key = (*key, circumstances())
        graphs = self.held.get(key)
        if graphs is not None:
            return self.held.use(key, graphs)
        if self.seen != key:
            self.seen = key
            return None
        if self.captures >= TRIED and self.replayed < REPLAYED * self.captures:
            self._give_up("the inputs of its ATen calls move too often")
            return None
        graphs = self._capture(bound, tensors)
        if graphs is not None:
            self.captures += 1
            self.held.use(key, graphs)
            self.on_state("captured")
        return graphs

    # ---------------------------------------------------------------- capture

    def _capture(
        self, bound: Binding, tensors: Sequence[torch.Tensor]
    ) -> CapturedGraphs | None:
        """Capture the launches on each device, running nothing; None if that fails."""
        graphs = CapturedGraphs()
        compat.before_process_groups_end(self.shared.release)
        buffers = bound.plan.captured.graph.buffers
        for device in bound.tables.devices:
            site = self.shared.site(device)
            kind = type_of(device)
            graph = getattr(site.module, kind.graph)()
            try:
                # garbage may be a kernel, whose end a capture refuses
                with on(device), site.module.stream(site.stream), collector_paused():
                    graph.capture_begin(pool=site.pool_for(graph), **kind.capture)
                    try:
                        memory = _record(bound, tensors, device, site.beside)
                    except BaseException:
                        # the first error is more specific than that of an invalid
                        # capture
                        with contextlib.suppress(Exception):
                            graph.capture_end()
                        raise
                    graph.capture_end()
            except Exception as error:
                self.shared.drop(device, graph)
                graphs.release()
                self._give_up(f"capture failed: {error}".split("\n", 1)[0], error)
                return None
            graphs.graphs.append((site, graph))
            graphs.replays.append(compat.in_c(graph, "replay"))
            for b in self.results:
                if memory is not None and torch.device(buffers[b].device) == device:
                    graphs.results[b] = memory.tensor(b)
        graphs.host = self._host_memory(bound, tensors, graphs)
        places = bound.addresses.places.of
        temps = [p for b, p in places.items() if buffers[b].kind == "temp"]
        graphs.temps = bound.addresses.at(temps)
        if temps or bound.plan.schedule.externs:
            graphs.turns = [site for site, _ in graphs.graphs]
            graphs.ends = [functools.partial(site.record) for site in graphs.turns]
        self.current = graphs
        return graphs

    def _host_memory(
        self, bound: Binding, tensors: Sequence[torch.Tensor], graphs: CapturedGraphs
    ) -> list[torch.Tensor]:
        """Return memory for the temps of the CPU's kernels."""
        buffers = bound.plan.captured.graph.buffers
        temps = bound.plan.schedule.temps
        on_host = [b for b in temps if not is_remote(torch.device(buffers[b].device))]
        memory = Memory(bound.memory, tensors, bound.addresses, ())
        if bound.temps.keeps:
            memory.arena = bound.temps.take(bound.addresses)
        memory.allocate(on_host)
        graphs.results.update(
            {b: memory.tensor(b) for b in self.results if b in on_host}
        )
        return [memory.tensor(b) for b in on_host]

    def _copies(
        self, bound: Binding, tensors: Sequence[torch.Tensor], graphs: CapturedGraphs
    ) -> Memory:
        """Return copies of a graph's results for the caller, since the next replay
        writes to the same memory.
        """
        numbers = bound.numbers or ()
        memory = Memory(bound.memory, tensors, bound.addresses.copy(), numbers)
        memory.take_copies(graphs.results)
        return memory


def _record(
    bound: Binding,
    tensors: Sequence[torch.Tensor],
    device: torch.device,
    beside: Beside,
) -> Memory | None:
    """Launch a plan's kernels and calls on one device, which is capturing."""
    buffers = bound.plan.captured.graph.buffers

    def start(table: KernelTable) -> None:
        if table.place == device:
            cast(DeviceTable, table).run()

    every = bound.plan.schedule.temps
    temps = [b for b in every if torch.device(buffers[b].device) == device]
    return in_order(bound, tensors, start, temps, beside)

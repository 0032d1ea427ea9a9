"""Share memory pools and streams between all captured graphs of a process.

`Graphs` has a memory pool and a stream to capture on for each device. It holds all
graphs, to release them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import compat
from .devices import module_of, on
from .memory import Memory
from .triton.registry import type_of

#: Number of streams on which the branches of a graph run. Not measured.
BRANCHES = 4


class Site:
    """Memory pool for a device's graphs, and the stream on which they are captured.

    Graphs share the pool for their temporaries, so replays on two streams take turns.
    `alive` has the graphs captured with the pool.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module = module_of(device)
        self.pool: Any = None
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()
        with on(device):
            self.stream = self.module.Stream()
            self.done = self.module.Event()
        #: streams for branches of a graph, made for the first graph that has some
        self._beside: list[Any] = []
        #: the stream of the last replay; `recorded` is true if `done` marks its end
        self.last: Any = None
        self.recorded = False

    def beside(self, calls: Sequence[Callable[[], object]], memory: Memory) -> None:
        """Capture calls that need not wait for each other, on a few streams. Each
        stream begins and ends with the captured one.
        """
        if not self._beside:
            self._beside = [self.module.Stream() for _ in range(BRANCHES)]
        main = self.module.current_stream(self.device)
        used = self._beside[: len(calls)]
        # the allocator must not reuse memory that is freed on one stream while a second
        # one reads it
        kept = memory.alive()
        for stream in used:
            stream.wait_stream(main)
        for number, call in enumerate(calls):
            with self.module.stream(used[number % len(used)]):
                call()
        for stream in used:
            main.wait_stream(stream)
        del kept

    def pool_for(self, graph: Any) -> Any:
        """Return the pool for the capture of a graph.

        torch's allocators refuse a pool all of whose graphs were freed. In that case
        this makes a new one.
        """
        if not self.alive:
            self.pool = self.module.graph_pool_handle()
        self.alive.add(graph)
        return self.pool

    def release(self, graph: Any) -> None:
        """Free a graph's memory."""
        graph.reset()
        self.alive.discard(graph)

    def wait(self) -> None:
        """Let the current stream wait for the last replay that used the pool."""
        stream = self.module.current_stream(self.device)
        if self.last is not None and self.last != stream:
            if not self.recorded:
                self.done.record(self.last)
            stream.wait_event(self.done)
        self.last, self.recorded = stream, False

    def record(self) -> None:
        """Record the end of a replay that used the pool, after `wait`."""
        self.done.record(self.last)
        self.recorded = True


class Graphs:
    """Sites of all devices, and graphs of all plans, of a process."""

    def __init__(self) -> None:
        self.sites: dict[torch.device, Site] = {}
        #: all holders of graphs
        self.replays: weakref.WeakSet[Any] = weakref.WeakSet()
        #: failed captures, which allocators may still use
        self.failed: list[Any] = []

    def site(self, device: torch.device) -> Site:
        """Return a device's site."""
        if device not in self.sites:
            self.sites[device] = Site(device)
        return self.sites[device]

    def drop(self, device: torch.device, graph: Any) -> None:
        """Discard a device's pool and stream, after a capture of `graph` failed."""
        site = self.sites.pop(device, None)
        self.failed.append(graph)
        if site is not None:
            compat.end_allocation(device, site.pool)
            kind = type_of(device)
            with on(device):
                graph_class = getattr(site.module, kind.graph)
                compat.end_generator_capture(device, graph_class, kind.capture)

    def release(self) -> None:
        """Free all graphs and their memory; steps capture again later."""
        for replays in list(self.replays):
            replays.release()
        self.sites.clear()

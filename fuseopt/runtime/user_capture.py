"""Run a step while the user captures a graph: its launches become part of that graph.

As with torch's steps, the graph then has this call's addresses and numbers, and each
replay does this call's step again. The replay copies them from memory that nothing else
writes, so calls outside of the graph do not affect it. If the step was refreshed before
(`live`), the graph copies the addresses alone. It reads the numbers that other calls
and refreshes send.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from ..errors import LaunchError
from .binding import Binding
from .cpp.table import DeviceTable, KernelTable
from .devices import is_capturing
from .executor import in_order
from .memory import Memory


def join(
    bound: Binding, tensors: Sequence[torch.Tensor], live: bool = False
) -> Memory | None:
    """Run a plan inside the capture that is under way on the current stream. With
    `live`, the graph reads its numbers where other calls read them.

    Raises LaunchError if part of the step runs where nothing is captured.
    """
    tables = bound.tables
    others = [str(d) for d in tables.devices if not is_capturing(d)]
    others += ["the CPU"] * (bool(tables.on_host) and not live)
    if others:
        raise LaunchError(
            "a CUDA graph capture is active on the current stream, but the step also "
            f"changes tensors on {', '.join(others)}, where nothing is captured. Call "
            "fuseopt.refresh(optimizer) before the capture and before each replay, "
            "which does the CPU's part"
        )
    frozen = {id(arena): arena.frozen(not live) for arena in tables.arenas}
    starts: dict[int, Callable[[], None]] = {}
    for table in tables.on_devices:
        arena = table.arena
        assert arena is not None
        words = frozen[id(arena)][0]
        numbers = arena.device if live else words
        starts[id(table)] = table.starter(words, numbers)

    def start(table: KernelTable) -> None:
        if table.place is not None:
            cast(DeviceTable, table).run(starts[id(table)])

    memory = in_order(bound, tensors, start)
    for table in tables.on_devices:
        table.fetch()
        table.refresh()
    for arena in tables.arenas:
        # each replay of the graph reads it
        words, stage = frozen[id(arena)]
        stage.copy_(arena.host)
        for table in tables.on_devices:
            if table.arena is arena and not live:
                table.relocate(stage, words)
    constants = [t.constants for t in tables.on_devices]
    own = bound.temps.arena, tables.arenas if live else ()
    resources = frozen, starts, constants, own
    _keep(bound, tensors, resources)
    return memory


def _keep(bound: Binding, tensors: Sequence[torch.Tensor], resources: Any) -> None:
    """Keep the memory that the user's graph reads alive as long as the first tensor
    that it writes. fuseopt cannot observe the end of the graph, but the graph is
    useless after that.
    """
    mutated = bound.plan.inputs.mutated
    t = tensors[mutated[0] if mutated else 0]
    owner = t if t._base is None else t._base
    weakref.finalize(owner, lambda resources: None, resources).atexit = False

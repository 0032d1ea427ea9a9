"""Run a step while the user captures a graph: its launches become part of that graph.

As with torch's steps, the graph then has this call's addresses and numbers, and each
replay does this call's step again. The replay copies them from memory that nothing else
writes, so calls outside of the graph do not affect it.
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


def join(bound: Binding, tensors: Sequence[torch.Tensor]) -> Memory | None:
    """Run a plan inside the capture that is under way on the current stream.

    Raises LaunchError if part of the step runs where nothing is captured.
    """
    tables = bound.tables
    others = [str(d) for d in tables.devices if not is_capturing(d)]
    others += ["the CPU"] * bool(tables.on_host)
    if others:
        raise LaunchError(
            "a CUDA graph capture is active on the current stream, but the step also "
            f"changes tensors on {', '.join(others)}, where nothing is captured"
        )
    frozen = {id(arena): arena.frozen() for arena in tables.arenas}
    starts: dict[int, Callable[[], None]] = {}
    for table in tables.on_devices:
        starts[id(table)] = table.starter(frozen[id(table.arena)][0])

    def start(table: KernelTable) -> None:
        cast(DeviceTable, table).run(starts[id(table)])

    memory = in_order(bound, tensors, start)
    for table in tables.on_devices:
        table.fetch()
        table.refresh()
    for arena in tables.arenas:
        # the graph reads it when it is replayed
        words, stage = frozen[id(arena)]
        stage.copy_(arena.host)
        for table in tables.on_devices:
            if table.arena is arena:
                table.relocate(stage, words)
    resources = frozen, starts, [t.constants for t in tables.on_devices]
    _keep(bound, tensors, resources)
    return memory


def _keep(bound: Binding, tensors: Sequence[torch.Tensor], resources: Any) -> None:
    """Keep what the user's graph reads alive for as long as the first tensor that it
    writes: the end of the graph cannot be seen, but it is of no use after that.
    """
    mutated = bound.plan.inputs.mutated
    t = tensors[mutated[0] if mutated else 0]
    owner = t if t._base is None else t._base
    weakref.finalize(owner, lambda resources: None, resources).atexit = False

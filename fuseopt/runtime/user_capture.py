"""A step inside a capture of the user's own: it joins that graph.

As torch's own steps do, the graph then holds this call's addresses and numbers, and
each replay does this call's step again. They are copied at each replay from memory that
nobody else writes, so that calls outside of the graph may go on as they like.
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
    """Do a plan's step inside the capture that is under way on the current stream.

    Raises LaunchError if part of the step runs where nothing is captured.
    """
    tables = bound.tables
    others = [str(d) for d in tables.devices if not is_capturing(d)]
    others += ["the CPU"] * bool(tables.on_host)
    if others:
        raise LaunchError(
            "a graph is being captured on the current stream, but the step also "
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
    held = frozen, starts, [t.constants for t in tables.on_devices]
    _keep(bound, tensors, held)
    return memory


def _keep(bound: Binding, tensors: Sequence[torch.Tensor], what: Any) -> None:
    """Nobody says when the user's graph ends. It is of no use without the tensors that
    it writes: so what it reads lives as long as the first of them.
    """
    mutated = bound.plan.inputs.mutated
    t = tensors[mutated[0] if mutated else 0]
    owner = t if t._base is None else t._base
    weakref.finalize(owner, lambda what: None, what).atexit = False

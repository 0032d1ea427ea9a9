"""Calls of ATen whose result is the same at each call of a step, such as `eye`.

They take no tensor and no number that moves, and nothing else writes their results. On
the CPU they run once for a binding, which keeps the results as long as its tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..capture.aten.externs import Call
from ..capture.trace import Captured
from ..compat import OVERLOAD
from ..ir.graph import Batch, Extern, Graph, Run, Schedule, storage_bytes
from .extern_calls import PreparedCall
from .tables.host_numbers import CPU

#: The most bytes that the constants of a plan may take together.
KEPT = 16 << 20


def constants(captured: Captured, schedule: Schedule) -> dict[int, int]:
    """Return the constant calls of a schedule: payload -> storage of the result."""
    graph = captured.graph
    found: dict[int, int] = {}
    writers = _writers(graph, schedule)
    outputs = {graph.buffers[b].storage for b in graph.outputs}
    left = KEPT
    for extern in schedule.externs:
        call = captured.calls[extern.payload]
        if extern.ordered or extern.reads or not _is_constant(call):
            continue
        (b,) = call.outputs
        x = graph.buffers[b]
        members = [y for y in graph.buffers if y.storage == x.storage]
        size = storage_bytes(members)
        if (
            x.kind == "temp"
            and x.device == CPU
            and x.first_byte == 0
            and x.storage not in outputs
            and x.storage not in schedule.memory.offsets
            and writers[x.storage] == 1
            and 0 < size <= left
        ):
            found[extern.payload] = x.storage
            left -= size
    return found


def _writers(graph: Graph, schedule: Schedule) -> dict[int, int]:
    """Return how often the steps of a schedule write each storage."""
    found: dict[int, int] = {}
    for step in schedule.steps:
        if isinstance(step, (Extern, Batch)):
            written = [graph.values[v] for v in step.writes]
        else:
            kernels = step.kernels if isinstance(step, Run) else (step,)
            written = [
                b
                for kernel in kernels
                for v in kernel.every
                for slot, column in zip(v.slots, v.columns, strict=True)
                if slot.write
                for b in column
            ]
        for b in written:
            storage = graph.buffers[b].storage
            found[storage] = found.get(storage, 0) + 1
    return found


def _is_constant(call: Call) -> bool:
    """Returns a call the same numbers whenever it is made?"""
    func = call.func
    if not isinstance(func, OVERLOAD) or call.autocast is not None:
        return False
    name = func._schema.name.removeprefix("aten::")
    plain = (type(None), bool, int, float, torch.dtype, torch.layout, torch.device)
    given = (*call.args, *call.kwargs.values())
    return (
        torch.Tag.nondeterministic_seeded not in func.tags
        and not name.startswith(("empty", "new_empty"))
        and len(call.outputs) == 1
        and call.outputs[0] in call.fresh
        and all(type(x) in plain for x in given)
    )


def made(
    found: Mapping[int, int], externs: Mapping[int, PreparedCall]
) -> dict[int, torch.Tensor]:
    """Make the constant calls; return the bytes of each storage (uint8)."""
    known: dict[Any, torch.Tensor] = {}
    homes: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for payload, storage in found.items():
            x = externs[payload]
            key = (x.call.func, repr(x.args), repr(sorted(x.kwargs.items())))
            if key not in known:
                t = x.function(*x.args, **x.kwargs)
                known[key] = t.contiguous().view(-1).view(torch.uint8)
            homes[storage] = known[key]
    return homes

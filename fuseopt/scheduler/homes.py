"""Leave a number on the device that computes it, if only that device reads it.

`torch.as_tensor(x.item())` makes a tensor on the CPU, of a number that a device
computed. Eager waits for the device. A kernel of the device cannot write that tensor.
If the step only copies the tensor to the same device, fuseopt makes it there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ..ir.graph import Graph, SchedulerNode, rows_of
from .dependencies import CPU

#: What a body may do to a number without another device giving it other bits.
MOVES = {"load", "cast", "const"}


def with_homes(graph: Graph) -> Graph:
    """Move such numbers to their device; the same graph if there are none."""
    if len({b.device for b in graph.buffers}) < 2:
        return graph
    of_storage = Counter(b.storage for b in graph.buffers)
    outputs = set(graph.outputs)
    homes: dict[int, set[str]] = {
        b: set()
        for b, x in enumerate(graph.buffers)
        if (x.kind, x.device, x.shape) == ("temp", CPU, ())
        and of_storage[x.storage] == 1
        and b not in outputs
    }
    refused: set[int] = set()
    for node in graph.nodes:
        for row in rows_of(node):
            reads = [graph.values[v] for v in row.reads]
            writes = [graph.values[v] for v in row.writes]
            if not isinstance(row, SchedulerNode):
                refused.update((*reads, *writes))
                continue
            moves = MOVES.issuperset(x.op for x in row.body.instrs)
            for b in writes:
                if b in homes and moves and reads:
                    homes[b].update(graph.buffers[r].device for r in reads)
                elif b in homes:
                    refused.add(b)
            for b in reads:
                if b in homes:
                    homes[b].update(graph.buffers[w].device for w in writes)
    moved = {
        b: next(iter(devices))
        for b, devices in homes.items()
        if len(devices) == 1 and devices != {CPU} and b not in refused
    }
    if not moved:
        return graph
    buffers = [
        x._replace(device=moved[b]) if b in moved else x
        for b, x in enumerate(graph.buffers)
    ]
    return replace(graph, buffers=tuple(buffers))

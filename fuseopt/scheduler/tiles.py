"""Join the blocks of runs: as many strands in one block as fit the cache.

The previous pass makes a block of each strand. This pass joins adjacent blocks while
their memory fits `Machine.block_bytes`.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.graph import DTYPE_BYTES, Block, Graph, Run, Schedule
from .passes import Machine


def tile(graph: Graph, schedule: Schedule, machine: Machine) -> Schedule:
    """Join the blocks of each run up to the machine's size of a block."""
    if not any(isinstance(s, Run) for s in schedule.steps):
        return schedule
    steps = [
        _tiled(graph, s, machine.block_bytes) if isinstance(s, Run) else s
        for s in schedule.steps
    ]
    return replace(schedule, steps=tuple(steps))


def _tiled(graph: Graph, run: Run, most: int) -> Run:
    """Return a run whose blocks touch up to `most` bytes, or are one larger strand."""
    groups: list[list[Block]] = []
    filled = 0
    for strand in run.blocks:
        touched = _touched_bytes(graph, run, strand)
        if not groups or filled + touched > most:
            groups.append([])
            filled = 0
        groups[-1].append(strand)
        filled += touched
    return replace(run, blocks=tuple(map(_joined, groups)))


def _touched_bytes(graph: Graph, run: Run, block: Block) -> int:
    """Return the bytes of the tensors that the lanes of a block touch."""
    touched = {
        b
        for kernel, lanes in zip(run.kernels, block, strict=True)
        for v, lane in lanes
        for b in kernel.variants[v].touched(lane)
    }
    buffers = [graph.buffers[b] for b in touched]
    return sum(x.numel * DTYPE_BYTES[x.dtype] for x in buffers)


def _joined(blocks: list[Block]) -> Block:
    """Return one block with the lanes of several."""
    if len(blocks) == 1:
        return blocks[0]
    columns = zip(*blocks, strict=True)
    return tuple([tuple(sorted(x for lanes in c for x in lanes)) for c in columns])

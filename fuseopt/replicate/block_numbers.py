"""Buffers with one number for each block of a lane's elements."""

from __future__ import annotations

from ..ir.blocks import count, read_by_block, write_by_block
from ..ir.geometry import numel
from ..ir.graph import Extern, Graph


def block_sizes(graph: Graph) -> dict[int, int]:
    """Return the size of blocks, by buffer."""
    found: dict[int, int] = {}
    for n in graph.nodes:
        if isinstance(n, Extern):
            continue
        columns = {n.reads[k]: s for k, s in read_by_block(n.body.instrs).items()}
        sizes = [write_by_block(n.body, k) for k in range(len(n.writes))]
        columns |= {c: s for c, s in zip(n.writes, sizes, strict=True) if s}
        for column, size in columns.items():
            found.update(dict.fromkeys(map(graph.values.__getitem__, column), size))
    return found


#: Sizes and strides.
Layout = tuple[tuple[int, ...], tuple[int, ...]]


def layout_for(lane: Layout, size: int) -> Layout:
    """Return the layout of the numbers of a lane's blocks of this size.

    Size 0: the lane's own layout.
    """
    return ((count(numel(lane[0]), size),), (1,)) if size else lane

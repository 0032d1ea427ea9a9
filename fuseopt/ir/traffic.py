"""Count the lanes, elements and bytes that a kernel moves."""

from __future__ import annotations

from dataclasses import dataclass

from .blocks import count, slot_sizes
from .geometry import numel
from .graph import DTYPE_BYTES, Graph, Kernel, Variant, read_by


@dataclass(frozen=True)
class Traffic:
    """Memory traffic of a kernel.

    `lanes`: parameters that are updated; a counter that nothing else reads does not
    count. `elements`: of all lanes. `bytes`: read and written for them.
    """

    lanes: int
    elements: int
    bytes: int

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            max(self.lanes, other.lanes),
            max(self.elements, other.elements),
            self.bytes + other.bytes,
        )


def bytes_per_element(v: Variant) -> int:
    """Return the bytes read and written for each element of a variant's lanes."""
    return sum(
        DTYPE_BYTES[s.dtype] * (s.read + s.write)
        for s in v.slots
        if s.domain == "element"
    )


def bytes_per_block(v: Variant) -> dict[int, int]:
    """Bytes that are read and written for each block of a variant's lanes, by the size
    of blocks.
    """
    moved: dict[int, int] = {}
    for k, size in slot_sizes(v.instrs, v.stores).items():
        slot = v.slots[k]
        width = DTYPE_BYTES[slot.dtype] * (slot.read + slot.write)
        moved[size] = moved.get(size, 0) + width
    return moved


def traffic(graph: Graph, kernel: Kernel) -> Traffic:
    """Return the traffic of one kernel of a graph.

    A row that all rows of a lane read counts once.
    """
    elements = moved = 0
    for v in kernel.every:
        of_blocks = bytes_per_block(v)
        widths = [
            (DTYPE_BYTES[s.dtype] * (s.read + s.write), column)
            for s, column in zip(v.slots, v.columns, strict=True)
            if s.domain == "element"
        ]
        for lane, shape in enumerate(v.shapes):
            n = numel(shape)
            elements += n
            for width, column in widths:
                b = graph.buffers[column[lane]]
                moved += width * (n if b.shape == shape else min(n, b.numel))
            moved += sum(count(n, size) * x for size, x in of_blocks.items())
    lanes = sum(v.lanes for v in kernel.variants if bytes_per_element(v))
    return Traffic(lanes or kernel.lanes, elements, moved)


def least_bytes(graph: Graph) -> int:
    """Return the bytes that any implementation of a graph must move.

    Each tensor that the graph reads is read once, and each that it changes is written
    once. Temps are free.
    """
    input_bytes: dict[int, int] = {}
    for b in graph.buffers:
        if b.kind in ("static", "arg"):
            size = b.numel * DTYPE_BYTES[b.dtype]
            input_bytes[b.storage] = input_bytes.get(b.storage, 0) + size
    first = {v: graph.buffers[b].storage for b, v in enumerate(graph.initial) if v >= 0}
    read = {first[v] for node in graph.nodes for v in read_by(node) if v in first}
    written = {graph.buffers[b].storage for b, v in enumerate(graph.final) if v >= 0}
    return sum(input_bytes.get(s, 0) for s in read) + sum(
        input_bytes.get(s, 0) for s in written
    )

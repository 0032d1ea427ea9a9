"""Find the owner of a matrix by the owner of another view of it, its transpose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..ir.graph import DTYPE_BYTES, Buffer, span


def owners_of_views(
    buffers: Sequence[Buffer], owners: Sequence[int], common: int
) -> Iterator[tuple[int, int]]:
    """Yield (buffer, owner) of temps without an owner whose elements another view owns.

    The two views have the very same elements. Views with an additional dimension of one
    element, or with fewer than two dimensions, are left out. They may be stacks of
    values that all lanes share, with one traced lane.
    """
    views: dict[object, list[int]] = {}
    for b, x in enumerate(buffers):
        first, end = span(x)
        whole = end - first == x.numel * DTYPE_BYTES[x.dtype]
        if x.kind == "temp" and len(x.shape) > 1 and whole and x.numel > 1:
            key = (x.storage, x.offset, x.dtype, x.numel, x.shape.count(1))
            views.setdefault(key, []).append(b)
    for alike in views.values():
        found = {owners[b] for b in alike} - {common}
        if len(alike) > 1 and len(found) == 1:
            (owner,) = found
            yield from ((b, owner) for b in alike if owners[b] == common)

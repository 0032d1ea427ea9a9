"""Find the owner of a matrix by the owner of another view of it: of its transpose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..ir.graph import DTYPE_BYTES, Buffer, span


def owners_of_views(
    buffers: Sequence[Buffer], owners: Sequence[int], common: int
) -> Iterator[tuple[int, int]]:
    """(buffer, owner) of temps that belong to nobody yet, where another view of the
    very same elements belongs to somebody.

    What has a dimension of one element more, or no two dimensions, may be a stack of
    what all lanes share, of which one lane was traced.
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

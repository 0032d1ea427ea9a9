"""Alias analysis: which buffers may share memory.

`may_share` proves that two strided buffers are disjoint, or returns True. `overlaps`
applies it to all buffers of all storages. Capture's versions, the scheduler's order and
the checks depend on this analysis.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from operator import attrgetter

from .graph import DTYPE_BYTES, Buffer, span

#: The number of steps after which the search of `may_share` gives up and returns True.
SEARCH = 64


def may_share(a: Buffer, b: Buffer) -> bool:
    """May two buffers of one storage have a byte in common? False is a proof.

    Elements lie at sums of strides times indices. The search looks for two indices
    whose elements meet, with the largest stride first. For each stride, only multiples
    count that the smaller strides can compensate. The remaining distance must be a
    multiple of the strides' common divisor, which separates columns of a matrix, or
    even and odd elements.
    """
    (a0, a1), (b0, b1) = span(a), span(b)
    if a0 >= b1 or b0 >= a1:
        return False
    if _one_block(a) and _one_block(b):
        return True  # without gaps, overlapping ranges share memory
    size, other = DTYPE_BYTES[a.dtype], DTYPE_BYTES[b.dtype]
    common = math.gcd(
        *(s * size for s, n in zip(a.stride, a.shape, strict=True) if n > 1),
        *(s * other for s, n in zip(b.stride, b.shape, strict=True) if n > 1),
    )
    behind = (b.offset * other - a.offset * size) % common if common else 0
    if size <= behind <= common - other:
        return False  # columns of one matrix, mostly
    low: dict[int, int] = {}
    high: dict[int, int] = {}
    for n, s in zip(a.shape, a.stride, strict=True):
        high[s * size] = high.get(s * size, 0) + n - 1
    for n, s in zip(b.shape, b.stride, strict=True):
        low[s * other] = low.get(s * other, 0) - (n - 1)
    steps = [
        (s, low.get(s, 0), high.get(s, 0))
        for s in sorted(low.keys() | high.keys(), reverse=True)
        if s and (low.get(s) or high.get(s))
    ]
    # the least and largest sum of the strides from k on, and their divisor
    rest = [(0, 0, 0)]
    for s, few, many in reversed(steps):
        least, most, divisor = rest[-1]
        rest.append((least + s * few, most + s * many, math.gcd(divisor, s)))
    rest.reverse()
    budget = SEARCH

    def meets(k: int, distance: int) -> bool:
        """Can strides from k on bring `distance` between -size and other?"""
        nonlocal budget
        budget -= 1
        least, most, divisor = rest[k]
        if distance + most <= -size or distance + least >= other:
            return False
        if divisor and size <= -distance % divisor <= divisor - other:
            return False
        if k == len(steps) or budget < 0:
            return True
        s, few, many = steps[k]
        least, most, _ = rest[k + 1]
        first = max(few, -((distance + most + size - 1) // s))
        last = min(many, (other - 1 - distance - least) // s)
        return any(meets(k + 1, distance + s * i) for i in range(first, last + 1))

    return meets(0, a.offset * size - b.offset * other)


def _one_block(b: Buffer) -> bool:
    """Do a buffer's elements fill their range of bytes?"""
    reach = 1
    for s, n in sorted(zip(b.stride, b.shape, strict=True)):
        if n > 1:
            if s > reach:
                return False
            reach += (n - 1) * s
    return True


def self_overlaps(b: Buffer) -> bool:
    """May two elements of a buffer have one place in memory? False is a proof."""
    reach = 0
    for s, n in sorted(zip(b.stride, b.shape, strict=True)):
        if n > 1:
            if s <= reach:
                return True
            reach += (n - 1) * s
    return False


def shared_storages(buffers: Sequence[Buffer]) -> frozenset[int]:
    """Return the storages that hold several buffers."""
    counts = Counter(map(attrgetter("storage"), buffers))
    if len(counts) == len(buffers):
        return frozenset()
    return frozenset([storage for storage, n in counts.items() if n > 1])


def overlaps(buffers: Sequence[Buffer]) -> dict[int, list[int]]:
    """Return, for each buffer, the other buffers that may share memory with it.

    The cost is linear where storages hold one buffer or disjoint ranges, the usual
    case.
    """
    overlapping: dict[int, list[int]] = {}
    shared = shared_storages(buffers)
    if not shared:
        return overlapping
    by_storage: dict[int, list[int]] = defaultdict(list)
    for index, buffer in enumerate(buffers):
        if buffer.storage in shared:
            by_storage[buffer.storage].append(index)
    for members in by_storage.values():
        spans = sorted((*span(buffers[m]), m) for m in members)
        active: list[tuple[int, int]] = []  # (end, buffer) that may overlap later ones
        for start, end, member in spans:
            active = [(e, m) for e, m in active if e > start]
            if start == end:
                continue
            for _, other in active:
                if may_share(buffers[other], buffers[member]):
                    overlapping.setdefault(other, []).append(member)
                    overlapping.setdefault(member, []).append(other)
            active.append((end, member))
    return overlapping

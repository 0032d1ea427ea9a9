"""Buffers -> may they share memory?

`may_share` proves two strided buffers apart or says yes; `overlaps` asks it of all
buffers of all storages. Everything that needs to know what a write may change asks
here: capture's versions, the scheduler's order, the checks.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from operator import attrgetter

from .graph import DTYPE_BYTES, Buffer, span

#: Steps after which the search of `may_share` gives up, and so says yes.
SEARCH = 64


def may_share(a: Buffer, b: Buffer) -> bool:
    """May two buffers of one storage have a byte in common? False is a proof.

    Their elements lie at sums of strides times indices. Looked for are two indices
    whose elements meet, largest stride first: of each only the few multiples count that
    what is left can still make up for, and what is left must be a multiple of the
    strides' common divisor. That tells columns of a matrix apart, or even elements and
    odd ones.
    """
    (a0, a1), (b0, b1) = span(a), span(b)
    if a0 >= b1 or b0 >= a1:
        return False
    if _one_block(a) and _one_block(b):
        return True  # without gaps their ranges say all
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
    # what the strides from k on can add up to, at least and at most; their divisor
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
    """May two elements of a buffer lie in one place? False is a proof."""
    reach = 0
    for s, n in sorted(zip(b.stride, b.shape, strict=True)):
        if n > 1:
            if s <= reach:
                return True
            reach += (n - 1) * s
    return False


def shared_storages(buffers: Sequence[Buffer]) -> frozenset[int]:
    """The storages that several buffers lie in."""
    counts = Counter(map(attrgetter("storage"), buffers))
    if len(counts) == len(buffers):
        return frozenset()
    return frozenset([storage for storage, n in counts.items() if n > 1])


def overlaps(buffers: Sequence[Buffer]) -> dict[int, list[int]]:
    """For each buffer, the other buffers that may share memory with it.

    Linear where storages hold one buffer or disjoint ranges, which is nearly always.
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
        active: list[tuple[int, int]] = []  # (end, buffer) that may reach further
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

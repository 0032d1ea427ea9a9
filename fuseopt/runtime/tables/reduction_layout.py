"""Geometry of a lane whose rows or columns are reduced, for each target.

Dimensions are in the order of memory of the tensor that eager would reduce. If the
innermost is reduced, results are rows: runs of neighbouring elements. If it is kept,
results are columns, folded side by side.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...ir.geometry import Shape, numel
from ...ir.graph import NATIVE


@functools.cache
def register_bytes() -> int:
    """Return the bytes of a register in eager's reductions on a CPU; see `folds.h`."""
    return 16 if platform.machine() in ("aarch64", "arm64") else 32


def result_strides(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    space: tuple[int, ...],
    dims: tuple[int, ...],
) -> tuple[int, ...]:
    """Return strides of results over `space`, with or without the dimensions `dims`."""
    kept = [d for d in range(len(space)) if d not in dims]
    steps = [0] * len(space)
    if len(shape) == len(kept):
        with_strides = zip(kept, shape, stride, strict=True)
    elif len(shape) == len(space):
        with_strides = zip(range(len(space)), shape, stride, strict=True)
    else:
        return tuple(steps)
    for d, n, s in with_strides:
        steps[d] = s if n != 1 else 0
    return tuple(steps)


def longest_run(layout: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[int, bool]:
    """Return the elements of a tensor that one stride serves, and whether it is 1."""
    shape, stride = layout
    dims = sorted((s, n) for n, s in zip(shape, stride, strict=True) if n != 1)
    if not dims:
        return 1, True
    run = 1
    for s, n in dims:
        if s != dims[0][0] * run:
            break
        run *= n
    return run, dims[0][0] == 1


class Folding(NamedTuple):
    """Reduction of one lane.

    `operand`, `elements`, `results` are strides over `space`, whose dimensions `dims`
    are reduced away. `size` is the bytes of an element of the operand; `loaded` is what
    eager loads (ir.NATIVE ...). `dense` is true for an operand without gaps.
    """

    space: Shape
    dims: Shape
    operand: Shape
    elements: Sequence[Shape]
    results: Sequence[Shape]
    size: int
    loaded: int
    dense: bool


class ReducedSpace:
    """Dimensions of a folding, outermost first, in groups that one stride serves.

    `kept` and `folded` are such groups; `columns` is true if the innermost dimension is
    kept. Dimensions of one element are left out. With `join`, neighbours are one group
    where every tensor allows it.
    """

    def __init__(self, lane: Folding, join: bool) -> None:
        self.space = space = lane.space
        order = [d for d in range(len(space)) if space[d] != 1]
        # stable: in the declared order where strides agree
        order.sort(key=lambda d: -lane.operand[d])
        tables = [lane.operand, *lane.elements, *lane.results]
        groups: list[list[int]] = []
        for d in order:
            last = groups[-1][-1] if groups else -1
            if (
                join
                and groups
                and (last in lane.dims) == (d in lane.dims)
                and all(t[last] == t[d] * space[d] for t in tables)
            ):
                groups[-1].append(d)
            else:
                groups.append([d])
        self.kept = [g for g in groups if g[0] not in lane.dims]
        self.folded = [g for g in groups if g[0] in lane.dims]
        self.columns = bool(groups) and groups[-1][0] not in lane.dims

    def sizes(self, groups: Iterable[Sequence[int]]) -> list[int]:
        """Return the number of elements of each group."""
        return [numel(self.space[d] for d in group) for group in groups]


def _strides(table: Shape, groups: Iterable[Sequence[int]]) -> list[int]:
    """Return the stride of each group in a tensor."""
    return [table[group[-1]] for group in groups]


def rows(lane: Folding) -> list[int]:
    """Return the numbers that `struct Rows` of the generated C++ reads."""
    space, operand = lane.space, lane.operand
    reduced = ReducedSpace(lane, join=True)
    # every reduced dimension may have one element
    kept, folded = list(reduced.kept), reduced.folded or [[lane.dims[0]]]
    column = kept.pop() if reduced.columns else None
    (width,) = reduced.sizes([column or ()])
    (run,) = reduced.sizes(folded[-1:])
    contiguous = operand[folded[-1][-1]] == 1 or run == 1
    # numbers in one of eager's registers: it folds shorter rows one by one
    bytes_of_one = register_bytes()
    register = bytes_of_one // (2 if lane.loaded != NATIVE else lane.size)
    # neighbours in the operand are one run, though other tensors separate them
    joined, k = 1, len(folded) - 1
    while k > 0:
        outer, inner = folded[k - 1], folded[k][0]
        if operand[outer[-1]] != operand[inner] * space[inner]:
            break
        joined *= numel(space[d] for d in outer)
        k -= 1
    one_run = k == 0
    group = 0
    if column and one_run and operand[column[-1]] < operand[folded[-1][-1]]:
        wide = operand[column[-1]] == 1 and width >= register
        group = 4 * bytes_of_one // max(lane.size, 4) if wide else 4
    like = [k for k, t in enumerate(lane.elements) if t == operand]
    leader = like[0] if like and lane.dense else -1
    table = [int(reduced.columns), int(contiguous), group, leader, joined]
    table += [len(kept), len(folded), *reduced.sizes([*kept, *folded]), width]
    for t in lane.elements:
        table += [*_strides(t, [*kept, *folded]), t[column[-1]] if column else 0]
    for t in lane.results:
        table += [*_strides(t, kept), t[column[-1]] if column else 0]
    return table


def tiles(lane: Folding) -> list[int]:
    """Return the numbers that a Triton kernel reads, which reduces in a different
    order. They are: whether columns lie side by side; number of results, of elements of
    one; their dimensions, sizes, strides.
    """
    reduced = ReducedSpace(lane, join=False)
    kept, folded = reduced.kept, reduced.folded
    both = [*kept, *folded]
    counts = [numel(reduced.sizes(groups)) for groups in (kept, folded)]
    table = [
        int(reduced.columns),
        *counts,
        len(kept),
        len(folded),
        *reduced.sizes(both),
    ]
    for t in lane.elements:
        table += _strides(t, both)
    for t in lane.results:
        table += _strides(t, kept)
    return table

"""The geometry of a lane whose rows or columns are folded, for the C++ target.

Dimensions are taken in the order of memory of the tensor that eager would reduce, and
joined where every tensor allows it. If the innermost is reduced, results are rows: runs
of neighbouring elements. If it is kept, results are columns, folded side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.graph import NATIVE


def result_strides(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    space: tuple[int, ...],
    dims: tuple[int, ...],
) -> tuple[int, ...]:
    """Strides of results, with or without the reduced dimensions, over `space`."""
    left = [d for d in range(len(space)) if d not in dims]
    steps = [0] * len(space)
    if len(shape) == len(left):
        own = zip(left, shape, stride, strict=True)
    elif len(shape) == len(space):
        own = zip(range(len(space)), shape, stride, strict=True)
    else:
        return tuple(steps)
    for d, n, s in own:
        steps[d] = s if n != 1 else 0
    return tuple(steps)


def longest_run(layout: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[int, bool]:
    """Elements of a tensor that one stride serves, and whether it is 1."""
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


def rows(
    space: tuple[int, ...],
    dims: tuple[int, ...],
    operand: tuple[int, ...],
    elements: Sequence[tuple[int, ...]],
    results: Sequence[tuple[int, ...]],
    size: int,
    loaded: int,
    dense: bool,
) -> list[int]:
    """The numbers that `struct Rows` of the generated source reads.

    `operand`, `elements`, `results`: strides over `space`. `size`: bytes of an element
    of the operand; `loaded`: what eager loads (ir.NATIVE ...). `dense`: the operand
    has no gaps.
    """
    order = [d for d in range(len(space)) if space[d] != 1]
    order.sort(key=lambda d: -operand[d])  # stable: as declared where strides agree
    merged: list[list[int]] = []
    tables = [operand, *elements, *results]
    for d in order:
        last = merged[-1][-1] if merged else -1
        joins = (
            bool(merged)
            and (last in dims) == (d in dims)
            and all(t[last] == t[d] * space[d] for t in tables)
        )
        if joins:
            merged[-1].append(d)
        else:
            merged.append([d])

    def count(group: list[int]) -> int:
        n = 1
        for d in group:
            n *= space[d]
        return n

    def steps(table: tuple[int, ...], groups: list[list[int]]) -> list[int]:
        return [table[g[-1]] for g in groups]

    folded = [g for g in merged if g[0] in dims]
    kept = [g for g in merged if g[0] not in dims]
    if not folded:  # every reduced dimension has one element
        folded = [[dims[0]]]
    columns = bool(kept) and merged[-1][0] not in dims
    column = kept.pop() if columns else None
    width = count(column) if column else 1
    run = count(folded[-1])
    contiguous = operand[folded[-1][-1]] == 1 or run == 1
    # numbers in one of eager's registers: it folds shorter rows one by one
    register = 16 if loaded != NATIVE else 32 // size
    # neighbours in the operand are one run, though other tensors part them
    joined, k = 1, len(folded) - 1
    while k > 0:
        outer, inner = folded[k - 1], folded[k][0]
        if operand[outer[-1]] != operand[inner] * space[inner]:
            break
        joined *= count(outer)
        k -= 1
    one_run = k == 0
    group = 0
    if column and one_run and operand[column[-1]] < operand[folded[-1][-1]]:
        wide = operand[column[-1]] == 1 and width >= register
        group = 4 * 32 // max(size, 4) if wide else 4
    like = [k for k, t in enumerate(elements) if t == operand]
    leader = like[0] if like and dense else -1
    header = [int(columns), int(contiguous), group, leader, joined]
    header += [len(kept), len(folded)]
    sizes = [*(count(g) for g in kept), *(count(g) for g in folded), width]
    table: list[int] = []
    for t in elements:
        table += [*steps(t, kept), *steps(t, folded), t[column[-1]] if column else 0]
    for t in results:
        table += [*steps(t, kept), t[column[-1]] if column else 0]
    return [*header, *sizes, *table]


def tiles(
    space: tuple[int, ...],
    dims: tuple[int, ...],
    operand: tuple[int, ...],
    elements: Sequence[tuple[int, ...]],
    results: Sequence[tuple[int, ...]],
    size: int,
    loaded: int,
    dense: bool,
) -> list[int]:
    """The same for a Triton kernel, which has an order of its own: do columns lie side
    by side; number of results, of elements of one; their dimensions, sizes, strides.
    """
    order = [d for d in range(len(space)) if space[d] != 1]
    order.sort(key=lambda d: -operand[d])
    kept = [d for d in order if d not in dims]
    folded = [d for d in order if d in dims]
    columns = bool(order) and order[-1] not in dims
    counts = [1, 1]
    for k, group in enumerate((kept, folded)):
        for d in group:
            counts[k] *= space[d]
    table = [int(columns), *counts, len(kept), len(folded)]
    table += [space[d] for d in (*kept, *folded)]
    for t in elements:
        table += [t[d] for d in (*kept, *folded)]
    for t in results:
        table += [t[d] for d in kept]
    return table

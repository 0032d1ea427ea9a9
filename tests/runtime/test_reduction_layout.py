"""The geometry of folded rows and columns: both targets reach the same elements."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fuseopt.ir.geometry import Shape, contiguous_strides
from fuseopt.runtime.tables.reduction_layout import (
    Folding,
    ReducedSpace,
    result_strides,
    rows,
    tiles,
)

#: What is added at each place of a result: (place, places of two operands).
Reached = dict[int, list[tuple[int, int]]]


@st.composite
def foldings(draw: Any) -> Folding:
    shape = tuple(
        draw(st.lists(st.sampled_from([1, 1, 2, 3, 4]), min_size=1, max_size=4))
    )
    every = range(len(shape))
    dims = tuple(sorted(draw(st.sets(st.sampled_from(every), min_size=1))))

    def tensor() -> Shape:
        order = draw(st.permutations(every))
        gaps = [draw(st.integers(0, 1)) for _ in every]
        packed = contiguous_strides([shape[d] + g for d, g in zip(order, gaps)])  # noqa: B905
        strides = dict(zip(order, packed, strict=True))
        return tuple([strides[d] for d in every])

    operand = tensor()
    kept = tuple([1 if d in dims else n for d, n in enumerate(shape)])
    result = result_strides(kept, contiguous_strides(kept), shape, dims)
    size, loaded = draw(st.sampled_from([(4, 0), (8, 0), (4, 1)]))
    elements = [operand, draw(st.sampled_from([operand, tensor()]))]
    return Folding(shape, dims, operand, elements, [result], size, loaded, True)


def places(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> Iterator[Any]:
    """The address in each tensor, for each index."""
    for index in itertools.product(*map(range, sizes)):
        yield tuple(
            sum(i * s for i, s in zip(index, own, strict=True)) for own in strides
        )


def as_defined(lane: Folding) -> Reached:
    found: Reached = defaultdict(list)
    tensors = [*lane.results, *lane.elements]
    for r, a, b in places(lane.space, tensors):
        found[r].append((a, b))
    return found


def by_table(kept: int, folded: int, sizes: Sequence[int], table: list[int]) -> Reached:
    """What a target reaches that reads sizes and strides of kept dimensions, then of
    folded ones; a last kept one follows where `sizes` has one more.
    """
    n = len(sizes)
    a, b, left = table[:n], table[n : 2 * n], table[2 * n :]
    result = [*left[:kept], *[0] * folded, *left[kept:]]
    found: Reached = defaultdict(list)
    for r, x, y in places(sizes, (result, a, b)):
        found[r].append((x, y))
    return found


def same(got: Reached, want: Reached) -> bool:
    return {r: sorted(x) for r, x in got.items()} == {
        r: sorted(x) for r, x in want.items()
    }


@settings(deadline=None)
@given(foldings())
def test_both_targets_fold_what_is_to_be_folded(lane: Folding) -> None:
    want = as_defined(lane)
    head, (kept, folded), rest = (table := rows(lane))[:5], table[5:7], table[7:]
    n = kept + folded + 1
    assert same(by_table(kept, folded, rest[:n], rest[n:]), want)
    assert head[0] == ReducedSpace(lane, join=True).columns
    results, each, kept, folded = tiles(lane)[1:5]
    rest = tiles(lane)[5:]
    n = kept + folded
    assert same(by_table(kept, folded, rest[:n], rest[n:]), want)
    assert (results, each) == (len(want), len(want[0]))


def columns(encode: Callable[[Folding], list[int]], dims: Shape) -> int:
    operand, result = (3, 1), tuple([0 if d in dims else 1 for d in (0, 1)])
    return encode(Folding((2, 3), dims, operand, [operand], [result], 4, 0, True))[0]


def test_rows_lie_in_memory_and_columns_side_by_side() -> None:
    assert [columns(rows, (1,)), columns(rows, (0,))] == [0, 1]
    assert [columns(tiles, (1,)), columns(tiles, (0,))] == [0, 1]


def test_neighbours_are_joined_where_all_tensors_allow_it() -> None:
    shape, stride, gap = (2, 3, 4), (12, 4, 1), (24, 4, 1)
    lane = Folding(shape, (0, 1, 2), stride, [stride], [(0, 0, 0)], 4, 0, True)
    assert ReducedSpace(lane, join=True).folded == [[0, 1, 2]]
    assert ReducedSpace(lane, join=False).folded == [[0], [1], [2]]
    parted = lane._replace(elements=[stride, gap])
    assert ReducedSpace(parted, join=True).folded == [[0], [1, 2]]

"""Where the tensors of a call lie: the pool of addresses, and what may share memory."""

from __future__ import annotations

from array import array

import pytest
import torch

from fuseopt.errors import AliasError, UnsupportedInput
from fuseopt.runtime.guards.sharing import ALONE, FREELY, Sharing, inputs
from fuseopt.runtime.tables.addresses import AddressPool, positions
from tests.build_graphs import GraphBuilder

BYTES = 16


def step() -> GraphBuilder:
    """p0 and p1 are updated with g0 and g1, of 16 bytes each."""
    g = GraphBuilder()
    params = [g.tensor(f"p{i}") for i in range(2)]
    grads = [g.tensor(f"g{i}", kind="arg") for i in range(2)]
    for p, grad in zip(params, grads, strict=True):
        g.op("add", p, grad, out=p)
    return g


def sharing(g: GraphBuilder, statics: int = 2) -> Sharing:
    graph = g.graph()
    given = inputs(graph, statics, ())
    reach = {b: BYTES for b, x in enumerate(graph.buffers) if x.source >= 0}
    return Sharing(given, reach)


def at(*addresses: int) -> array[int]:
    return array("Q", addresses)


APART = at(100, 200, 300, 400)


def test_what_a_step_does_to_its_tensors() -> None:
    given = inputs(step().graph(), 2, ())
    assert (given.mutated, given.args) == ([0, 1], {2: 2, 3: 3})
    assert given.written == {0, 1}
    assert not given.writes_args
    assert (given.strides, given.distances) == ([], [])


def test_tensors_that_lie_apart_may_be_anywhere() -> None:
    own = sharing(step())
    assert own.check(APART, None), "the memory that is written was not known"
    assert not own.check(at(100, 200, 350, 400), APART)
    assert own.check(at(150, 200, 300, 400), APART)
    # gradients are only read
    assert not own.check(at(100, 200, 300, 300), APART)


@pytest.mark.parametrize("known", [None, APART], ids=["first", "later"])
@pytest.mark.parametrize(
    ("place", "fine"),
    [(84, True), (85, False), (100, False), (115, False), (116, True), (200, False)],
)
def test_a_gradient_may_not_lie_where_the_step_writes(
    place: int, fine: bool, known: array[int] | None
) -> None:
    own = sharing(step())
    own.check(APART, None)
    if fine:
        own.check(at(100, 200, place, 400), known)
        return
    with pytest.raises(AliasError, match="g0"):
        own.check(at(100, 200, place, 400), known)


def test_parameters_may_not_share_memory() -> None:
    with pytest.raises(AliasError, match="p0 and p1 share memory"):
        sharing(step()).check(at(100, 110, 300, 400), None)


def test_tensors_that_shared_memory_do_so_as_they_did() -> None:
    g = GraphBuilder()
    p = g.tensor("p", (8,))
    part = g.tensor("part", (4,), kind="arg", storage=0, offset=4)
    g.op("mul", p, 2.0, out=p)
    graph = g.graph()
    given = inputs(graph, 1, ())
    assert given.distances == [(1, 0, BYTES)]
    assert given.strides == [(0, (1,)), (1, (1,))]
    assert given.fit([(1,), (1,)])
    assert not given.fit([(2,), (1,)])
    own = Sharing(given, {p: 2 * BYTES, part: BYTES})
    own.check(at(100, 116), None)
    with pytest.raises(AliasError, match="the aliasing between inputs changed"):
        own.check(at(100, 120), None)


def test_one_tensor_that_comes_twice_stays_one() -> None:
    graph = step().graph()
    given = inputs(graph, 2, ((3, 2),))
    assert given.fit([(1,)] * 4)
    assert not given.fit([(1,), (1,), (1,), (2,)])
    own = Sharing(given, dict.fromkeys(range(4), BYTES))
    own.check(at(100, 200, 300, 300), None)
    with pytest.raises(AliasError, match="the aliasing between inputs changed"):
        own.check(APART, None)


def test_a_tensor_with_elements_lies_somewhere() -> None:
    own = sharing(step())
    with pytest.raises(UnsupportedInput, match="g1 has elements and no memory"):
        own.check(at(100, 200, 300, 0), None)
    own.reach = {**own.reach, 3: 0}
    own.check(at(100, 200, 300, 0), None)


def test_what_is_only_read_may_move_unasked() -> None:
    own = sharing(step())
    own.check(APART, None)
    pool = AddressPool(positions(step().graph().buffers, 4))
    pool.move(APART)
    moves = own.moves(pool)
    assert moves.loose == [0, 0, FREELY, FREELY]
    assert moves.reach == [0, 0, BYTES, BYTES]
    assert (moves.starts, moves.ends) == ([100, 200], [116, 216])
    assert moves.stays == ((), ())


def test_what_is_written_or_would_be_moves_to_memory_of_its_own() -> None:
    """Of two arguments one is dropped: nobody looks at it, and it is alone as well."""
    graph = step().graph()
    (dropped,) = [b for b, x in enumerate(graph.buffers) if x.source == 3]
    given = inputs(graph, 2, (), [dropped])
    assert given.mutated == inputs(graph, 2, ()).mutated
    assert given.writes_args
    own = Sharing(given, dict(sharing(step()).reach))
    assert own.check(APART, None)
    pool = AddressPool(positions(graph.buffers, 4))
    pool.move(APART)
    moves = own.moves(pool)
    assert moves.loose == [0, 0, FREELY, ALONE]
    assert moves.stays == ([100, 200], [116, 216])
    with pytest.raises(AliasError):
        own.check(at(100, 200, 300, 304), None)


def test_a_pool_has_inputs_first_and_follows_their_views() -> None:
    g = GraphBuilder()
    p = g.tensor("p", (8,))
    view = g.view(p, "v", (4,), 2)
    empty = g.tensor("e", (0,))
    temp = g.like(p)
    grad = g.tensor("g", (8,), kind="arg")
    places = positions(g.buffers, 3)
    assert places.of == {p: 0, empty: 1, grad: 2, view: 3, temp: 4}
    assert places.views == [(3, 0, 8)]
    pool = AddressPool(places)
    where = pool.words.buffer_info()
    pool.move(at(1000, 0, 3000))
    pool.place(4, 4000)
    assert pool.words.tolist() == [1000, 0, 3000, 1008, 4000]
    copy = pool.copy()
    pool.place_all(torch.tensor([4, 3]), torch.tensor([5000, 1]))
    assert pool.words.tolist() == [1000, 0, 3000, 1, 5000]
    assert copy.words.tolist() == [1000, 0, 3000, 1008, 4000]
    assert pool.tensors().tolist() == [1000, 0, 3000]
    assert pool.words.buffer_info() == where, "kernels know it by its address"

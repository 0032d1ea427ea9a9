"""What is known where two ways meet: never more than in each of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fuseopt.uniformity.memory import Dict, List, Memory, merge
from fuseopt.uniformity.values import (
    Data,
    Items,
    Known,
    Level,
    Many,
    Ref,
    Tensor,
    Unusable,
    Value,
    join,
    level_of,
    types_of,
)

levels = st.sampled_from(list(Level))
types = st.none() | st.frozensets(st.sampled_from([bool, int, float, str]))
flags = st.booleans()
leaves = st.one_of(
    st.builds(Known, st.sampled_from([1, 2.0, "text", True, None])),
    st.builds(Data, levels, types),
    st.builds(Tensor, flags, flags, flags, st.sampled_from(["", "grad"]), flags, flags),
    st.just(Unusable("broken")),
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda x: Items(tuple(x)))
        | st.builds(Many, inner, levels)
    ),
    max_leaves=4,
)


def twin(value: Value) -> Value:
    """Another object of which as much is known."""
    if isinstance(value, Items):
        return Items(tuple(map(twin, value.items)))
    if isinstance(value, Many):
        return Many(twin(value.item), value.level)
    fields = [getattr(value, name) for name in type(value).__slots__]
    return type(value)(*fields)


def least(value: Value) -> Level:
    """The level that all plain data in a value has at least."""
    if isinstance(value, Items):
        return min(map(least, value.items), default=Level.NUMBER)
    if isinstance(value, Many):
        return min(value.level, least(value.item))
    if isinstance(value, Tensor):
        return Level.UNIFORM if value.shared else Level.NUMBER
    level = level_of(value)
    return Level.NUMBER if level is None or isinstance(value, Known) else level


@given(values, levels)
def test_what_neither_way_changed_is_as_it_was(value: Value, level: Level) -> None:
    assert join(value, value, level) is value


@given(values, levels)
def test_what_is_chosen_is_known_no_better_than_the_choice(
    value: Value, level: Level
) -> None:
    """Two values of which as much is known need not be one."""
    assert least(join(value, twin(value), level)) >= min(level, Level.KIND)


@given(values, values, levels)
def test_it_does_not_matter_which_way_comes_first(
    a: Value, b: Value, level: Level
) -> None:
    one, other = join(a, b, level), join(b, a, level)
    assert isinstance(one, Unusable) == isinstance(other, Unusable)
    if not isinstance(one, Unusable):
        assert one == other


@given(values, values, levels)
def test_no_type_and_no_doubt_is_lost(a: Value, b: Value, level: Level) -> None:
    both = join(a, b, level)
    if isinstance(both, Data) and a is not b:
        assert both.level >= max(level_of(a) or 0, level_of(b) or 0)
        for x in (a, b):
            known = types_of(x)
            assert both.types is None or (known is not None and known <= both.types)
    if isinstance(both, Tensor):
        for x in (a, b):
            if isinstance(x, Tensor):
                assert both.none >= x.none
                assert both.number >= x.number
                assert both.foreign >= x.foreign
                assert both.shared <= x.shared


@given(values, levels)
def test_memories_that_differ_in_nothing_that_is_known(
    value: Value, level: Level
) -> None:
    """A variable, a list and a dict that one way has set anew."""
    a = Memory()
    a.scopes = {0: {"kept": value, "set": value}}
    a.heap = {0: List((value,)), 1: Dict((("key", value),)), 2: List((value,))}
    b = a.copy()
    b.scopes[0]["set"] = twin(value)
    b.heap[0] = List((twin(value),))
    b.heap[1] = Dict((("key", twin(value)),))
    met = merge(a, b, level, None)
    assert met.scopes[0]["kept"] is value
    assert met.heap[2] is a.heap[2]
    expected = join(value, twin(value), level)
    assert met.scopes[0]["set"] == expected
    assert met.heap[0].items == (expected,)
    assert met.heap[1].get("key") == expected


def test_a_list_that_both_ways_know_is_one() -> None:
    assert join(Ref(1), Ref(1), Level.KIND) == Ref(1)
    assert isinstance(join(Ref(1), Ref(2), Level.KIND), Unusable)

"""The abstract memory at one point of the code: variables, lists and dicts of the step.

Where two paths through the code meet, their memories are joined: `merge`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from .sequences import Branch, Either, Joined, depends
from .values import (
    Bound,
    Count,
    Group,
    Grouped,
    Index,
    Items,
    Level,
    Many,
    Method,
    Ref,
    Sequence,
    Tensor,
    Unusable,
    Value,
    join,
)


@dataclass(frozen=True)
class Added:
    """The item that one iteration of a loop over lanes appends to a list.

    `branches`: the branches under which it is appended. `loops`: the loops entered
    since the list was created. `writer`: the site of the loop over lanes.
    """

    item: Value
    branches: tuple[Any, ...]
    loops: tuple[Any, ...]
    writer: Any


@dataclass(frozen=True)
class List:
    """A list, in one of three forms.

    `items` has a value for each item. `many` is one value for any of them. `item` is
    one value for each lane of `lanes`, appended by the loop `writer`.

    `created_in`: the loops in which it was created; `lane`: the loop over lanes in
    whose iteration. `added`: the item of the current iteration; `growing`: other
    iterations of that loop append to it. `frozen`: another value may be the same list,
    and would miss a change. `filled`: it is not empty. `broken`: why it may not be
    used, or "".
    """

    items: tuple[Value, ...] | None = ()
    many: Value | None = None
    level: Level = Level.UNIFORM
    lanes: Any = None
    item: Value | None = None
    writer: Any = None
    created_in: tuple[Any, ...] = ()
    lane: Any = None
    added: Added | None = None
    growing: bool = False
    frozen: bool = False
    filled: bool = False
    broken: str = ""


@dataclass(frozen=True)
class Dict:
    """A dict: the values of certain keys (`items`), and of any other key (`other`).

    `created_in`, `lane`, `broken`: as for `List`.
    """

    items: tuple[tuple[Any, Value], ...] = ()
    other: Value | None = None
    created_in: tuple[Any, ...] = ()
    lane: Any = None
    broken: str = ""

    def get(self, key: Any) -> Value | None:
        for k, v in self.items:
            if type(k) is type(key) and k == key:
                return v
        return None

    def put(self, key: Any, value: Value) -> Dict:
        others = [(k, v) for k, v in self.items if type(k) is not type(key) or k != key]
        return replace(self, items=(*others, (key, value)))


class Memory:
    """Abstract memory; see the module. `scopes`: variables by number of the scope and
    by name.

    `heap`: lists and dicts by the number of their `Ref`.
    """

    __slots__ = ("heap", "scopes")

    def __init__(self) -> None:
        self.scopes: dict[int, dict[str, Value]] = {}
        self.heap: dict[int, List | Dict] = {}

    def copy(self) -> Memory:
        copy = Memory()
        copy.scopes = {k: dict(v) for k, v in self.scopes.items()}
        copy.heap = dict(self.heap)
        return copy

    def same(self, other: Memory) -> bool:
        return self.scopes == other.scopes and self.heap == other.heap


def merge(a: Memory | None, b: Memory | None, level: Level, branch: Any) -> Any:
    """Return the memory where two paths meet; None for a path that never arrives.

    `level`: that of the condition that chooses the path; `branch`: its place.
    """
    if a is None or b is None:
        return b if a is None else a
    merged = Memory()
    for number in a.scopes.keys() | b.scopes.keys():
        x, y = a.scopes.get(number), b.scopes.get(number)
        if x is None or y is None:
            merged.scopes[number] = dict(y if x is None else x)  # type: ignore[arg-type]
            continue
        scope = merged.scopes[number] = {}
        for name in x.keys() | y.keys():
            # a variable that is not set raises where it is read, in any run
            if name not in x:
                scope[name] = y[name]
            elif name not in y:
                scope[name] = x[name]
            else:
                scope[name] = meet(x[name], y[name], level, (a, b))
    for number in a.heap.keys() | b.heap.keys():
        p, q = a.heap.get(number), b.heap.get(number)
        if p is None or q is None:
            value = q if p is None else p
            assert value is not None
            merged.heap[number] = value
        elif p is q:
            merged.heap[number] = p
        elif isinstance(p, List) and isinstance(q, List):
            merged.heap[number] = _lists(p, q, level, branch)
        elif isinstance(p, Dict) and isinstance(q, Dict):
            merged.heap[number] = _dicts(p, q, level)
    return merged


def pure(value: Value | None) -> bool:
    """Is it certainly a tensor, and not possibly a number?"""
    return isinstance(value, Tensor) and not value.number and not value.plain


def meet(x: Value, y: Value, level: Level, memories: tuple[Memory, Memory]) -> Value:
    """Return the join of two values, each of which may be a list of its memory.

    Lists that are joined are frozen in both memories: no change may follow.
    """
    if (isinstance(x, Ref) and x == y) or not all(
        isinstance(z, (Ref, Sequence)) for z in (x, y)
    ):
        return join(x, y, level)
    lists: list[List] = []
    for ref in (x, y):
        if isinstance(ref, Sequence):
            lists.append(List(None, lanes=ref.lanes, item=ref.item))
            continue
        assert isinstance(ref, Ref)
        containers = [m.heap.get(ref.number) for m in memories]
        container = next((c for c in containers if c is not None), None)
        if (
            not isinstance(container, List)
            or container.broken
            or container.added is not None
        ):
            return Unusable("it may be one of several objects")
        lists.append(container)
    for ref in (x, y):
        for m in memories if isinstance(ref, Ref) else ():
            assert isinstance(ref, Ref)
            container = m.heap.get(ref.number)
            if isinstance(container, List):
                m.heap[ref.number] = replace(container, frozen=True)
    a, b = lists
    if a.lanes is not None and a.lanes == b.lanes:
        assert a.item is not None
        assert b.item is not None
        return Sequence(a.lanes, join(a.item, b.item, level))
    for p, q in ((a, b), (b, a)):
        if p.items == () and q.lanes is not None and level == Level.UNIFORM:
            assert q.item is not None
            return Sequence(q.lanes, q.item)
    if a.lanes is not None and b.lanes is not None:
        if pure(a.item) and pure(b.item):
            assert a.item is not None
            assert b.item is not None
            return Sequence(Either((a.lanes, b.lanes)), join(a.item, b.item, level))
    if a.lanes is not None or b.lanes is not None:
        return Unusable("it may be one of several objects")
    values = [*_values(a), *_values(b)]
    if not values:
        return Items(())
    item = values[0]
    for z in values[1:]:
        item = join(item, z, level)
    return Many(item, max(a.level, b.level, level))


def _lists(a: List, b: List, level: Level, branch: Any) -> List:
    if a.broken or b.broken:
        return a if a.broken else b
    if a.frozen != b.frozen:
        a, b = replace(a, frozen=True), replace(b, frozen=True)
    if a.filled != b.filled:
        a, b = replace(a, filled=False), replace(b, filled=False)
    if a.added != b.added:
        added = _added(a.added, b.added, level, branch)
        if added is None:
            return replace(a, broken="lanes add to it in several ways")
        a = replace(a, added=added)
        b = replace(b, added=added)
    if _same_contents(a, b):
        return a
    for x, y in ((a, b), (b, a)):
        if x.items == () and y.lanes is not None and level == Level.UNIFORM:
            if _in_turns(y, branch):
                return replace(y, broken="only some turns of a loop add lanes to it")
            return y
    if a.lanes is not None and a.lanes == b.lanes and a.writer == b.writer:
        assert a.item is not None
        assert b.item is not None
        return replace(a, item=join(a.item, b.item, level))
    if a.lanes is not None or b.lanes is not None:
        return replace(a, broken="it holds these lanes or others")
    if a.items is not None and b.items is not None and len(a.items) == len(b.items):
        pairs = zip(a.items, b.items, strict=True)
        return replace(a, items=tuple(join(x, y, level) for x, y in pairs))
    return loose(
        replace(a, level=max(a.level, b.level, level)), [*_values(a), *_values(b)]
    )


def _same_contents(a: List, b: List) -> bool:
    """Do both hold the same items, level and lanes?"""
    items = a.items is b.items and a.many is b.many and a.item is b.item
    return items and (a.lanes, a.writer, a.level) == (b.lanes, b.writer, b.level)


def _in_turns(x: List, branch: Any) -> bool:
    """Is the branch inside one of the loops whose turns append lanes to the list?"""
    inside = isinstance(branch, Branch) and isinstance(x.lanes, Joined)
    return inside and bool(set(branch.turns) & set(x.lanes.loops))


def _values(x: List) -> list[Value]:
    if x.items is not None:
        return list(x.items)
    return [] if x.many is None else [x.many]


def loose(x: List, values: Iterable[Value]) -> List:
    """Return the list with one joined value for any number of items."""
    item: Value | None = None
    for value in values:
        item = value if item is None else join(item, value, x.level)
    return replace(x, items=None, many=item)


def _added(a: Added | None, b: Added | None, level: Level, branch: Any) -> Added | None:
    if a is None or b is None:
        added = b if a is None else a
        assert added is not None
        # under a uniform condition outside of loops, either all lanes have it or none
        if level == Level.UNIFORM and not added.loops:
            return added
        side = "else" if a is None else "then"
        return replace(added, branches=(*added.branches, (branch, side)))
    if (a.branches, a.loops, a.writer) != (b.branches, b.loops, b.writer):
        return None
    return replace(a, item=join(a.item, b.item, level))


def _dicts(a: Dict, b: Dict, level: Level) -> Dict:
    if a.broken or b.broken:
        return a if a.broken else b
    items: list[tuple[Any, Value]] = []
    for key, value in a.items:
        value_in_b = b.get(key)
        if value_in_b is None:
            return replace(a, broken="it has other keys in another way")
        items.append((key, join(value, value_in_b, level)))
    if len(b.items) != len(items):
        return replace(a, broken="it has other keys in another way")
    other = a.other if b.other is None else b.other
    if a.other is not None and b.other is not None:
        other = join(a.other, b.other, level)
    return replace(a, items=tuple(items), other=other)


def forget(memory: Memory, loop: Any) -> None:
    """Make values unusable that refer to the turn of a loop that ends."""
    for scope in memory.scopes.values():
        for name, value in scope.items():
            if follows(value, loop):
                scope[name] = Unusable(
                    f"{name} belongs to an earlier iteration of a loop"
                )
    for number, container in memory.heap.items():
        if isinstance(container, List):
            values = [*(container.items or ()), container.many, container.item]
            if (container.lanes is not None and depends(container.lanes, loop)) or any(
                x is not None and follows(x, loop) for x in values
            ):
                why = "it belongs to an earlier iteration of a loop"
                memory.heap[number] = replace(container, broken=why)
        elif any(follows(x, loop) for _, x in container.items) or (
            container.other is not None and follows(container.other, loop)
        ):
            memory.heap[number] = replace(container, broken="it is of another turn")


def follows(value: Value, loop: Any) -> bool:
    """Does a value have another meaning in each turn of a loop?"""
    if isinstance(value, Group):
        return bool(value.where == loop)
    if isinstance(value, (Sequence, Index, Count, Grouped)):
        return depends(value.lanes, loop)
    if isinstance(value, Method):
        return follows(value.of, loop)
    if isinstance(value, Bound):
        return follows(value.first, loop)
    if isinstance(value, Items):
        return any(follows(x, loop) for x in value.items)
    if isinstance(value, Many):
        return follows(value.item, loop)
    return False


def refs(value: Value) -> list[int]:
    """Return the lists and dicts that a value holds."""
    if isinstance(value, Ref):
        return [value.number]
    if isinstance(value, Items):
        return [n for x in value.items for n in refs(x)]
    return []

"""Compare what an optimizer holds besides its lanes with the last call.

A step may depend on any attribute or option, and Dynamo guards only those that the
models' step reads. In most calls all objects are those of the last call. A schedule
replaces numbers at the same places, and a graph may take these as inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any

from torch.optim import Optimizer

from ..compiler.tables import acts_when_copied
from ..runtime.guards.library import ContainerRecord
from .change import SAME, Change, Difference, MovedNumber
from .contents import Contents, containers_within, moves
from .keys import OddValue
from .values import holdings, own_attributes

#: The name of an attribute, or (group number, key), or (one of these, index in a
#: tuple).
Place = Any


def _items(place: Place, value: Any) -> Iterator[tuple[Place, Any]]:
    """Yield a value with its place; for a tuple, its items with their places."""
    if type(value) is not tuple:
        yield place, value
        return
    yield place, ("items", len(value))
    for i, x in enumerate(value):
        yield (place, i), x


class Epoch:
    """The time from one change of what an optimizer holds to the next one.

    `before`: the epoch before it, if they differ in plain numbers alone. `moved`: these
    numbers.
    """

    __slots__ = ("before", "moved")

    def __init__(
        self, before: Epoch | None = None, moved: Sequence[MovedNumber] = ()
    ) -> None:
        self.before, self.moved = before, moved

    def reached(
        self, epoch: Epoch | None, follow: Callable[[Sequence[MovedNumber]], bool]
    ) -> bool:
        """Bring a copy made in `epoch` here with `follow`; return False if it cannot.

        `follow`: takes over moved numbers, and returns False if it cannot.
        """
        if epoch is None or epoch is self:
            return epoch is self
        return self.before is epoch and follow(self.moved)


class StateGuard:
    """A record of what an optimizer holds; `compare(optimizer)` updates it.

    `epoch` is another one after each change. `count` increases with each change that is
    not of numbers alone. `moved`: the places of numbers that changed since `count`
    increased. `struct`: the record for the compiled helper, whose pass over the lanes
    reports whether a comparison is needed.
    """

    def __init__(self) -> None:
        self.count, self.epoch = 0, Epoch()
        self.moved: set[Place] = set()
        self.struct = ContainerRecord()
        #: the attributes, the groups and their list; None without a record
        self._roots: list[Any] | None = None
        self._contents = Contents()
        self._places: list[Place] = []  # those of attributes and options, else None
        self._held: dict[Place, Any] = {}

    def forget(self) -> None:
        """Let the next comparison treat everything as changed."""
        self._roots = None
        self.struct.n = 0

    def compare(self, optimizer: Optimizer) -> Difference:
        """Compare with the last call. Raises LanesDiffer for what is not plain data."""
        groups = optimizer.param_groups
        roots = [vars(optimizer), *groups, groups]
        before = self._roots
        if before is not None and len(before) == len(roots):
            cells = self._contents.now() if all(map(is_, roots, before)) else None
            changed = [] if cells is None else self._contents.changed(cells)
            if cells is not None and not changed:
                return SAME
            if cells is not None and self._follow(cells, changed):
                return Difference(Change.NUMBERS)
        self.forget()
        self._record(optimizer, roots)
        return Difference(Change.STRUCTURE, "the optimizer holds another object")

    def _follow(self, cells: list[Any], changed: Sequence[int]) -> bool:
        """Record numbers that replaced numbers; return False for any other change."""
        moved: dict[Place, Any] = {}
        plain: list[MovedNumber] | None = []
        for i in changed:
            x, former = cells[i], self._contents.cells[i]
            place = self._places[i] if i < len(self._places) else None
            if place is None:
                return False
            if moves(x, former):
                moved[place] = holdings(x, id)
                if plain is not None:
                    plain.append(self._contents.moved_number(i, x))
                continue
            if [*containers_within((former, x))]:
                return False  # their contents are recorded too
            plain = None
            before, after = dict(_items(place, former)), dict(_items(place, x))
            if before.keys() != after.keys():
                return False
            for at, value in after.items():
                if value is before[at]:
                    continue
                if moves(value, before[at]):
                    moved[at] = holdings(value, id)
                elif holdings(value, id) != self._held[at]:
                    return False
        self._held.update(moved)
        self.moved.update(moved)
        self._contents.take(cells, changed)
        last = self.epoch
        self.epoch = Epoch() if plain is None else Epoch(last, plain)
        last.before = None
        return True

    def _record(self, optimizer: Optimizer, roots: list[Any]) -> None:
        entries, groups = vars(optimizer), optimizer.param_groups
        attributes = own_attributes(optimizer)
        self._places = [None] * len(entries) + [
            k if k in attributes else None for k in entries
        ]
        places: dict[Place, Any] = dict(attributes)
        for g, group in enumerate(groups):
            acts = acts_when_copied(group)
            if acts:
                raise OddValue(f"a group {acts}", group)
            places_of_group = [(g, key) if key != "params" else None for key in group]
            self._places += [None] * len(group) + places_of_group
            for place, value in zip(places_of_group, group.values(), strict=True):
                if place is not None:
                    places[place] = value
        self._held = {
            at: holdings(x, id)
            for place, value in places.items()
            for at, x in _items(place, value)
        }
        known = {*map(id, roots)}
        within = [x for x in containers_within(places.values()) if id(x) not in known]
        self._contents = Contents([*roots[:-1], *within, groups])
        if entries.get("param_groups") is groups:
            self._contents.fill(self.struct)
        self.moved.clear()
        self.count += 1
        self.epoch = Epoch()
        self._roots = roots

    def held(self, moving: frozenset[Place]) -> list[Any]:
        """Return what the optimizer holds, except numbers that are a graph's inputs."""
        return [item for item in self._held.items() if item[0] not in moving]

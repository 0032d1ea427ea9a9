"""What an optimizer holds besides its lanes: has it changed since the last call?

Names, numbers, tables: a step may depend on any of it, and Dynamo guards only what the
leading lanes' step reads. Most calls find the objects of the last one. Those of a
schedule find other numbers in the same places, which a graph may take as they are.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from operator import is_not
from typing import Any

from torch.optim import Optimizer

from ..runtime.guards.holdings import CONTAINERS, told
from ..runtime.guards.library import Held
from .double import holdings, own_attributes

NUMBERS = {int, float}
#: An attribute by name; of a group by number and key; of a tuple there, by index.
Place = Any


def _parts(place: Place, value: Any) -> Iterator[tuple[Place, Any]]:
    """A value by its place; the items of a tuple by theirs."""
    if type(value) is not tuple:
        yield place, value
        return
    yield place, ("items", len(value))
    for i, x in enumerate(value):
        yield (place, i), x


class StateGuard:
    """What an optimizer holds; `look(optimizer)` takes note of what it holds now.

    `count` is another number whenever something changed but numbers, `moved` has the
    places of those that changed since then. `struct`: the same for the compiled helper,
    which says in the pass over an optimizer's lanes whether a look is needed.
    """

    def __init__(self) -> None:
        self.count = 0
        self.moved: set[Place] = set()
        self.struct = Held()
        self._arrays: list[array[int]] = []  # that it points to
        self._groups: list[Any] = []
        # names and values, then what those hold that are containers; are there
        # containers in those?
        self._cells: list[Any] = []
        self._places: list[Place] = []  # of the values among the cells, else None
        self._containers: list[Any] = []
        self._sizes: list[int] = []
        self._deep = False
        self._held: dict[Place, Any] = {}

    def forget(self) -> None:
        """Let the next look take all for changed."""
        self._cells = []
        self.struct.n = 0

    def look(self, optimizer: Optimizer) -> None:
        """Raises Unlike for what is not plain data."""
        groups = optimizer.param_groups
        own = vars(optimizer)
        now: list[Any] = [*own, *own.values()]
        for group in groups:
            now += group
            now += group.values()
        first = len(now)
        for held in self._containers:
            now += held
            if isinstance(held, dict):
                now += held.values()
        same = (
            len(now) == len(self._cells)
            and list(map(len, self._containers)) == self._sizes
            and not self._deep
        )
        other = list(map(is_not, now, self._cells)) if same else []
        if not same or (True in other and not self._follow(now, other)):
            self.struct.n = 0
            self._look_closely(optimizer, now[:first])
            self._tell_helper(optimizer)
        elif len(groups) != len(self._groups) or any(map(is_not, groups, self._groups)):
            self._tell_helper(optimizer)  # other dicts that hold the same

    def _tell_helper(self, optimizer: Optimizer) -> None:
        """Let the compiled helper know what `_cells` are, where it may go through all
        containers.
        """
        groups, own = optimizer.param_groups, vars(optimizer)
        containers = [own, *groups, *self._containers, groups]
        self._groups = groups.copy()  # kept, so that no other dict comes to lie there
        self.struct.n = 0
        if (
            self._deep
            or own.get("param_groups") is not groups
            or not {*map(type, containers)} <= CONTAINERS
        ):
            return
        items = [*self._cells, *groups]
        self._arrays = told(self.struct, containers, map(len, containers), items)

    def _follow(self, now: list[Any], other: list[bool]) -> bool:
        """Take over numbers that are in the places of numbers; False: it is more."""
        moved: dict[Place, Any] = {}
        changes = [i for i, changed in enumerate(other) if changed]
        for i in changes:
            x = now[i]
            place = self._places[i] if i < len(self._places) else None
            before = dict(_parts(place, self._cells[i]))
            after = dict(_parts(place, x))
            if place is None or before.keys() != after.keys():
                return False
            for at, value in after.items():
                if {type(value), type(before[at])} <= NUMBERS:
                    moved[at] = holdings(value, id)
                elif holdings(value, id) != self._held[at]:
                    return False
        self._held.update(moved)
        self.moved.update(moved)
        self._cells = now
        for i in changes if self.struct.n else ():
            self._arrays[-1][i] = id(now[i])
        return True

    def _look_closely(self, optimizer: Optimizer, cells: list[Any]) -> None:
        own = vars(optimizer)
        attributes = own_attributes(optimizer)
        self._places = [None] * len(own) + [k if k in attributes else None for k in own]
        places: dict[Place, Any] = dict(attributes)
        for g, group in enumerate(optimizer.param_groups):
            mine = [(g, key) if key != "params" else None for key in group]
            self._places += [None] * len(group) + mine
            for place, value in zip(mine, group.values(), strict=True):
                if place is not None:
                    places[place] = value
        # what containers hold, one level deep; below that they are compared whole
        self._containers = [v for v in places.values() if isinstance(v, (dict, list))]
        self._sizes = list(map(len, self._containers))
        inner: list[Any] = []
        for held in self._containers:
            inner += held
            inner += held.values() if isinstance(held, dict) else ()
        self._deep = any(isinstance(x, (dict, list)) for x in inner)
        self._cells = cells + inner
        self._held = {
            at: holdings(x, id)
            for place, value in places.items()
            for at, x in _parts(place, value)
        }
        self.moved.clear()
        self.count += 1

    def held(self, moving: frozenset[Place]) -> list[Any]:
        """What the optimizer holds, less the numbers that a graph takes as they are."""
        return [item for item in self._held.items() if item[0] not in moving]

"""Watch what an optimizer holds besides its lanes for changes since the last call.

A step may depend on any attribute or option, and Dynamo guards only what the models'
step reads. In most calls all objects are those of the last one. A schedule puts other
numbers in the same places, and a graph may take these as inputs.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from operator import is_not
from typing import Any

from torch.optim import Optimizer

from ..compiler.tables import acts_when_copied
from ..runtime.guards.holdings import CONTAINERS, told
from ..runtime.guards.library import Held
from .contents import moves
from .double import holdings, own_attributes
from .keys import Hung

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
    """A record of what an optimizer holds; `look(optimizer)` updates it.

    `count` increases whenever something else than numbers changed; `moved`: the places
    of numbers that changed since then. `struct`: the record for the compiled helper,
    which says in its pass over the lanes whether a look is needed.
    """

    def __init__(self) -> None:
        self.count = 0
        self.moved: set[Place] = set()
        self.struct = Held()
        self._arrays: list[array[int]] = []  # to which it points
        self._groups: list[Any] = []
        # names and values, then the contents of values that are containers; `_deep`:
        # are there containers in these?
        self._cells: list[Any] = []
        self._places: list[Place] = []  # of the values among the cells, else None
        self._containers: list[Any] = []
        self._sizes: list[int] = []
        self._deep = False
        self._held: dict[Place, Any] = {}

    def forget(self) -> None:
        """Let the next look treat everything as changed."""
        self._cells = []
        self.struct.n = 0

    def look(self, optimizer: Optimizer) -> None:
        """Compare with the last look. Raises Unlike for what is not plain data."""
        groups = optimizer.param_groups
        attributes = vars(optimizer)
        now: list[Any] = [*attributes, *attributes.values()]
        for group in groups:
            now += group
            now += group.values()
        first = len(now)
        for container in self._containers:
            now += container
            if isinstance(container, dict):
                now += container.values()
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
        """Give the compiled helper the record, if it can compare all containers."""
        groups, attributes = optimizer.param_groups, vars(optimizer)
        containers = [attributes, *groups, *self._containers, groups]
        self._groups = groups.copy()  # kept, so that no other dict comes to lie there
        self.struct.n = 0
        if (
            self._deep
            or attributes.get("param_groups") is not groups
            or not {*map(type, containers)} <= CONTAINERS
        ):
            return
        items = [*self._cells, *groups]
        self._arrays = told(self.struct, containers, map(len, containers), items)

    def _follow(self, now: list[Any], other: list[bool]) -> bool:
        """Take over numbers that replaced numbers; False if anything else changed."""
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
                if moves(value, before[at]):
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
        self._cells = []  # nothing is taken for known if this ends with an error
        entries = vars(optimizer)
        attributes = own_attributes(optimizer)
        self._places = [None] * len(entries) + [
            k if k in attributes else None for k in entries
        ]
        places: dict[Place, Any] = dict(attributes)
        for g, group in enumerate(optimizer.param_groups):
            acts = acts_when_copied(group)
            if acts:
                raise Hung(f"a group {acts}", group)
            places_of_group = [(g, key) if key != "params" else None for key in group]
            self._places += [None] * len(group) + places_of_group
            for place, value in zip(places_of_group, group.values(), strict=True):
                if place is not None:
                    places[place] = value
        # what containers hold, one level deep; below that they are compared whole
        self._containers = [v for v in places.values() if isinstance(v, (dict, list))]
        self._sizes = list(map(len, self._containers))
        inner: list[Any] = []
        for container in self._containers:
            inner += container
            inner += container.values() if isinstance(container, dict) else ()
        self._deep = any(isinstance(x, (dict, list)) for x in inner)
        self._held = {
            at: holdings(x, id)
            for place, value in places.items()
            for at, x in _parts(place, value)
        }
        self._cells = cells + inner
        self.moved.clear()
        self.count += 1

    def held(self, moving: frozenset[Place]) -> list[Any]:
        """What the optimizer holds, without the numbers that are a graph's inputs."""
        return [item for item in self._held.items() if item[0] not in moving]

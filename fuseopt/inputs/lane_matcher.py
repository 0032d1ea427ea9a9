"""Find the lanes of a call among those of the last calls, and their tensors.

`LaneMatcher` compares the objects that recorded lanes hold. From the second call on,
the compiled helper does so in one pass, and compares the tensors too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import and_, attrgetter, is_, is_not, itemgetter
from types import MappingProxyType
from typing import Any

from ..runtime.guards.library import ContainerRecord
from ..runtime.guards.tensors import TensorGuard
from .keys import GRAD, KINDS, NUMBERS, PARAM, Role, exactly
from .lane_guard import LaneGuard
from .lanes import Lanes
from .pending_gradients import PendingGradients
from .presence import narrowed

PARAMS = itemgetter("params")
_GRAD, _FLAG = attrgetter("grad"), attrgetter("requires_grad")
NONE: Mapping[Any, Any] = MappingProxyType({})


class CallTensors:
    """The tensors of all lanes in a call, in the order of `places`.

    `guard`: the guard that compared all but the gradients; None if Python compared
    them. `grads`: the gradients. `late`: for each gradient, its index among the tensors
    and its index in `grads`. `compared`: the guard of the step whose tensors the same
    pass compared. The step sets it to None when it takes the result. `rest_same`: True
    if the pass found all else that the optimizer holds unchanged. `counters`: values,
    in the order of `counter_places`. `numbers`: by kind, the other numbers in the
    state. `present`: a byte for each lane in the order of LaneMatcher.order, 1 if it
    has a gradient. The tensors have None for a missing gradient.
    """

    compared: TensorGuard | None = None
    rest_same = False

    def __init__(
        self,
        tensors: list[Any],
        guard: LaneGuard | None = None,
        grads: Sequence[Any] = (),
        late: Sequence[tuple[int, int]] = (),
        counters: Sequence[int] = (),
        numbers: Mapping[int, Mapping[str, Any]] = NONE,
        present: bytes = b"",
    ) -> None:
        self._tensors = tensors
        self.counters, self.numbers, self.present = counters, numbers, present
        self.guard, self.grads, self.late = guard, grads, late
        if guard is not None:
            self.compared, self.rest_same = guard.tensors, guard.rest_same

    def tensor(self, place: int) -> Any:
        """Return the tensor at one place."""
        t = self._tensors[place]
        return self.tensors()[place] if t is None else t

    def tensors(self) -> list[Any]:
        """Return all tensors."""
        if not self.late:
            return self._tensors
        tensors = self._tensors.copy()
        for place, k in self.late:
            tensors[place] = self.grads[k]
        return tensors


class LaneMatcher:
    """Compares the objects of a call's lanes with those of some `lanes`.

    `may_lack`: True if gradients of `lanes` may be missing. Then `lanes` are the `home`
    of all lanes that are found. `young`: True if the helper waits until a second call
    finds the same lanes. `replaced`: True if lanes have received new objects since the
    helper came into use.
    """

    def __init__(
        self, lanes: Lanes, may_lack: bool = False, young: bool = False
    ) -> None:
        self.lanes = lanes
        self.may_lack = may_lack
        self.order = order_of(lanes)
        self._params = [lanes.params[i] for i in self.order]
        self.first = lanes.params[0] if lanes.params else None
        self._states = [lanes.states[i] for i in self.order]
        kinds = [kind for kind in lanes.kinds for _ in kind.lanes]
        self._flags = [kind.flag for kind in kinds]
        self._had = bytes(kind.has_grad for kind in kinds)
        self._counted = [kind.counters for kind in kinds]
        self.guard: LaneGuard | None = None
        self._young = young
        self._steady = True  # True while only gradients are new
        self._found: list[Any] = []  # the guard's tensors, None for gradients
        self._late: list[tuple[int, int]] = []
        self.replaced = False
        #: True if the last calls found different gradients
        self.alternates = False
        self._last = lanes

    def forget(self) -> None:
        """Let the next comparison read everything in Python."""
        self.guard = None

    def lanes_of(self, present: bytes) -> Lanes:
        """Return the lanes that were found; `present`: as in Found."""
        if not self.may_lack:
            return self.lanes
        self.alternates = self._last.present != present
        if self.alternates:
            self._last = narrowed(self.lanes, present)
        return self._last

    def call_tensors(self, guard: LaneGuard, grads: list[Any]) -> CallTensors:
        """Return the tensors of all lanes, as the helper's pass found them."""
        known = self._found, guard, grads, self._late, guard.counters
        return CallTensors(*known, present=guard.present)

    def compare(
        self,
        optimizer: Any,
        rest: ContainerRecord,
        helper: ctypes.PyDLL | None = None,
        given: PendingGradients | None = None,
    ) -> CallTensors | None:
        """Return the tensors of all lanes, or None if an object but a gradient is new.

        Compares no metadata. `helper`, `rest`: as in LaneGuard. `given`: gradients not
        yet assigned to parameters; assigned before Python compares.
        """
        guard = self.guard
        if guard is not None:
            lists = [*map(PARAMS, optimizer.param_groups)]
            arguments = vars(optimizer), lists, optimizer.state
            found = guard.compare(*arguments, given)
            if found is None and given is not None:
                given.put()
                found = guard.compare(*arguments)
            if found is not None:
                return self.call_tensors(guard, found)
        elif given is not None:
            given.put()
        grads = list(map(_GRAD, self._params))
        there = bytes(map(is_not, grads, repeat(None)))
        may = bytes(map(and_, there, self._had)) if self.may_lack else self._had
        if there != may or not self.lanes.same(optimizer):
            return None
        was_guarded, self.guard, self._found = self.guard is not None, None, []
        read = self._compare_rest(grads, there)
        if read is None:
            return None
        if was_guarded:
            # a step that replaces the objects of lanes each time would need a new guard
            # at each call
            self._steady, self.replaced = False, True
        if helper is not None and self._steady and not self._young:
            self._guard_from_now(helper, read.tensors(), optimizer.state, rest)
        self._young = False
        return read

    def _guard_from_now(
        self,
        helper: ctypes.PyDLL,
        tensors: list[Any],
        state: dict[Any, Any],
        rest: ContainerRecord,
    ) -> None:
        """Use the helper from now on, unless there are numbers to compare."""
        lanes = self.lanes
        if any(kind.numbers for kind in lanes.kinds):
            return
        record = self._params, self._states, KINDS, lanes.lists, state, rest
        may_lack = self._had if self.may_lack else None
        self.guard = LaneGuard(helper, *record, may_lack, self._counted)
        self._found = tensors.copy()
        self._late = []
        place = lane = 0
        for kind in lanes.kinds:
            n = len(kind.lanes)
            if kind.has_grad:
                first = place + n
                self._late += zip(
                    range(first, first + n), range(lane, lane + n), strict=True
                )
                # do not keep gradients alive
                self._found[first : first + n] = [None] * n
            place += n * (1 + kind.has_grad + len(kind.tensors))
            lane += n

    def _compare_rest(self, grads: list[Any], there: bytes) -> CallTensors | None:
        """Do the part of `compare` after the comparison of parameters and states."""
        if list(map(_FLAG, self._params)) != self._flags:
            return None
        tensors: list[Any] = []
        counters: list[int] = []
        new_numbers: dict[int, dict[str, Any]] = {}
        lane = 0
        for k, kind in enumerate(self.lanes.kinds):
            span = slice(lane, lane + len(kind.lanes))
            lane = span.stop
            tensors.extend(self._params[span])
            if kind.has_grad:
                tensors.extend(grads[span])
            states: list[Any] = self._states[span]
            if not kind.has_state:
                continue
            if set(map(len, states)) != {len(kind.keys)}:
                return None
            try:
                for key in kind.tensors:
                    tensors.extend(map(itemgetter(key), states))
                numbers = [list(map(itemgetter(x), states)) for x in kind.numbers]
                counts = [list(map(itemgetter(x), states)) for x in kind.counters]
            except KeyError:
                return None
            for values in numbers:
                # all lanes may have changed to equal numbers
                if all(map(is_, values, repeat(values[0]))):
                    continue
                if len(set(map(exactly, values))) > 1:
                    return None
            if numbers:
                new_numbers[k] = {
                    key: x[0] for key, x in zip(kind.numbers, numbers, strict=True)
                }
                if not set(map(type, new_numbers[k].values())) <= set(NUMBERS):
                    return None
            of_kind = [x for of_lane in zip(*counts, strict=True) for x in of_lane]
            if not {*map(type, of_kind)} <= {int}:
                return None
            counters += of_kind
        allowed = {*KINDS, type(None)} if self.may_lack else {*KINDS}
        if not set(map(type, tensors)) <= allowed:
            return None
        return CallTensors(
            tensors, counters=counters, numbers=new_numbers, present=there
        )


class RecentLanes:
    """The lanes of the last calls, the latest last.

    `helper`: the library of the guards, once it is built. `params_differ`: True if
    different calls may have different parameters.
    """

    helper: ctypes.PyDLL | None = None
    params_differ = False

    def __init__(self) -> None:
        self.every: list[LaneMatcher] = []

    def clear(self) -> None:
        """Forget all lanes."""
        self.every.clear()

    def forget(self) -> None:
        """Let the next comparison read everything in Python."""
        for matcher in self.every:
            matcher.forget()

    def take(self, lanes: Lanes, most: int, young: bool) -> None:
        """Add lanes to the record, which keeps at most `most` (at least 2).

        It keeps those with the same parameters and states. With `params_differ`, it
        keeps those with the same states of common parameters. `young`: see LaneMatcher.
        """
        compatible = [
            x for x in self.every if x.lanes.holds_as(lanes, self.params_differ)
        ]
        self.every = [*compatible[1 - most :], LaneMatcher(lanes, young=young)]

    def live_in(self, home: Lanes) -> None:
        """Find lanes by their home from the next call on."""
        self.every = [x for x in self.every if x.lanes is not home]
        self.every.append(LaneMatcher(home, may_lack=True))

    def _of_other_params(self, matcher: LaneMatcher) -> list[LaneMatcher]:
        """Return the records of different parameters, with `params_differ`.

        The other records keep replaced objects alive, or their lanes have the same
        home.
        """
        others = self.every if self.params_differ else []
        return [x for x in others if x.first is not matcher.first]

    def compare(
        self,
        optimizer: Any,
        rest: ContainerRecord,
        given: PendingGradients | None,
    ) -> tuple[Lanes, CallTensors] | None:
        """Return the lanes that the optimizer still has, and their tensors, or None.

        The arguments are those of LaneMatcher.compare.
        """
        several = len(self.every) > 1
        first = first_param(optimizer) if several else None
        for matcher in reversed(self.every):
            if several and matcher.first is not first:
                continue
            found = matcher.compare(optimizer, rest, self.helper, given)
            if found is not None:
                if matcher.replaced or matcher.may_lack:
                    matcher.replaced = False
                    self.every = (
                        [*self._of_other_params(matcher), matcher]
                        if several
                        else [matcher]
                    )
                elif matcher is not self.every[-1]:
                    self.every.remove(matcher)
                    self.every.append(matcher)
                return matcher.lanes_of(found.present), found
        return None


def first_param(optimizer: Any) -> Any:
    """Return the first parameter of an optimizer, or None.

    None too if a list of parameters is anything but a list.
    """
    for params in map(PARAMS, optimizer.param_groups):
        if type(params) is not list:
            return None
        if params:
            return params[0]
    return None


def order_of(lanes: Lanes) -> list[int]:
    """Return the lanes in the order in which a LaneMatcher compares them."""
    return [i for kind in lanes.kinds for i in kind.lanes]


def places(lanes: Lanes) -> list[tuple[int, Role]]:
    """Return lane and role of each tensor that a LaneMatcher finds."""
    every: list[tuple[int, Role]] = []
    for kind in lanes.kinds:
        every.extend((i, (PARAM, "")) for i in kind.lanes)
        if kind.has_grad:
            every.extend((i, (GRAD, "")) for i in kind.lanes)
        for key in kind.tensors:
            every.extend((i, ("state", key)) for i in kind.lanes)
    return every


def counter_places(lanes: Lanes) -> list[tuple[int, str]]:
    """Return lane and key of each counter that a LaneMatcher finds."""
    return [(i, key) for x in lanes.kinds for i in x.lanes for key in x.counters]


__all__ = [
    "CallTensors",
    "LaneMatcher",
    "RecentLanes",
    "counter_places",
    "first_param",
    "order_of",
    "places",
]

"""Do the lanes of an optimizer hold what they held? Asked of all in one C call.

A lane is a parameter and its state, a dict. Between two calls only gradients are other
objects, as a rule; to see that in Python costs more than Dynamo's guards would. The
compiled helper compares what lists and dicts hold by identity, and reads the gradients.
"""

from __future__ import annotations

import collections
import ctypes
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ... import compat
from .given import Given
from .library import Held, Lanes
from .tensors import TensorGuard, address

#: Dicts whose entries the helper may go through.
DICTS = (dict, collections.defaultdict)
_GRAD, _FLAG = "grad", "requires_grad"


def _flat(dicts: Sequence[dict[Any, Any] | None]) -> list[Any]:
    """What dicts hold: key, value, key, value ..."""
    return [x for d in dicts for item in (d or {}).items() for x in item]


class Meeting(NamedTuple):
    """Where the tensors of lanes are among those of a step.

    `gradients`: by lane. `held`: ranges (from, to, from, to ...) of what lanes hold.
    `others`: all that belong to no lane of these, in the order of a call.
    """

    gradients: array[int]
    held: array[int]
    others: array[int]


class LaneGuard:
    """What some lanes hold now, in order: parameters, states (None: no state).

    `lists`: the parameters of each group; `state`: the optimizer's. `helper`: the
    library, built. `kinds`: the two types that a parameter or a gradient may have.
    `look(lists, state)` returns the lanes' gradients, or None if anything but those is
    another object than it was. `tensors`: the guard of a step, whose tensors the look
    compares as it meets them. `rest`: what else the optimizer holds; `rest_same`: did
    the look find that?
    """

    def __init__(
        self,
        helper: ctypes.PyDLL,
        params: Sequence[Any],
        states: Sequence[dict[str, Any] | None],
        kinds: tuple[type, type],
        lists: Sequence[Sequence[Any]],
        state: dict[Any, Any],
        rest: Held,
    ) -> None:
        # kept, so that no other object can come to lie where one of these lay
        objects = [
            list(params),
            list(states),
            _flat(states),
            [p for own in lists for p in own],
            _flat([state]),
        ]
        at = [array("Q", map(id, x)) for x in objects]
        counts = array("q", [-1 if s is None else len(s) for s in states])
        flags = array("q", [p.requires_grad for p in params])
        grads = array("q", [p.grad is not None for p in params])
        sizes = array("q", map(len, lists))
        versions = array("Q", [0] * (1 + len(params)))
        self._keep = objects, at, counts, flags, grads, sizes, kinds, versions
        get = compat.gradient_getter(kinds)
        asked = compat.requires_grad_function(params)
        plain = all(type(p) in kinds for p in params)
        self._n = len(params)
        struct = self._struct = Lanes(
            n=self._n,
            lists=len(sizes),
            entries=len(state),
            none=id(None),
            yes=id(True),
            grad=id(_GRAD),
            flag=id(_FLAG),
            # CPython: a count of references, then the type
            type=object.__basicsize__ - ctypes.sizeof(ctypes.c_void_p),
            kinds=(ctypes.c_void_p * 2)(*map(id, kinds)),
        )
        for name, a in zip(
            ("params", "states", "held", "members", "owned"), at, strict=True
        ):
            setattr(struct, name, a.buffer_info()[0])
        struct.counts, struct.flags, struct.grads, struct.sizes = (
            a.buffer_info()[0] for a in (counts, flags, grads, sizes)
        )
        if get is not None and plain:
            struct.descriptor, struct.read = id(get[0]), get[1]
        if asked is not None and plain:
            struct.handle, struct.required = asked
            direct = compat.gradient_functions()
            if get is not None and direct is not None:
                struct.gradient, struct.wrapped, struct.mode = direct
        struct.version = compat.dict_version()
        struct.versions = versions.buffer_info()[0]
        self._none = [None] * self._n
        self._given: Given | None = None
        self._where = ctypes.addressof(struct)
        self.tensors: TensorGuard | None = None
        self.rest_same = False
        self._rest, struct.rest = rest, ctypes.addressof(rest)
        call = helper.fuseopt_lanes
        call.restype = ctypes.c_int64
        call.argtypes = [ctypes.c_void_p, *(ctypes.py_object,) * 5]
        self._call: Callable[..., int] = call

    def compare_with(self, tensors: TensorGuard, meeting: Meeting) -> None:
        """Compare the tensors of a step from now on, the last of whose looks was at all
        of them. This guard keeps alive what lanes hold; the rest is the caller's.
        """
        struct = self._struct
        self.tensors = struct.known = None
        if not tensors.comparable:
            return
        struct.gradients, struct.held_in = address(meeting[0]), address(meeting[1])
        struct.ranges = len(meeting.held) // 2
        struct.functions, struct.known = tensors.structs
        self.tensors, self._meeting = tensors, meeting

    def look(
        self,
        attributes: dict[str, Any],
        lists: list[Any],
        state: Any,
        given: Given | None = None,
    ) -> list[Any] | None:
        """The gradients of all lanes, or None; see the class. `attributes`: the
        optimizer's. `given`: what it gives is taken for the gradients of its
        parameters, if all tensors are compared as they are met; else None.
        """
        if type(state) not in DICTS or len(lists) != self._struct.lists:
            return None
        for own in lists:
            if type(own) is not list:
                return None
        if given is not None:
            if self.tensors is None:
                return None
            if given is not self._given:
                self._take(given)
        grads = self._none.copy()
        found = self._call(
            self._where,
            attributes,
            lists,
            state,
            grads,
            None if given is None else given.grads,
        )
        self.rest_same = found == 0
        return None if found == 1 else grads

    def _take(self, given: Given) -> None:
        """Know which lane is which of the parameters to which gradients are given."""
        places = array("q", [given.places.get(id(p), -1) for p in self._keep[0][0]])
        self._struct.given = address(places)
        self._given, self._places = given, places

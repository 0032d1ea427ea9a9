"""Compare the lanes of an optimizer with those of the last call, all in one C call.

A lane is a parameter and its state, a dict. Usually only gradients are new objects in
the next call. Python would take longer to find that than Dynamo's guards take. The
compiled helper compares the items of lists and dicts by identity, and reads the
gradients.
"""

from __future__ import annotations

import collections
import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .. import compat
from ..runtime.guards.library import ContainerRecord, LaneRecord
from ..runtime.guards.tensors import TensorGuard, address
from .pending_gradients import PendingGradients

#: Dicts whose entries the helper may iterate over.
DICTS = (dict, collections.defaultdict)
LIST = frozenset({list})
_GRAD, _FLAG = "grad", "requires_grad"
_BYTES = ctypes.c_void_p


def _flat(dicts: Sequence[dict[Any, Any] | None]) -> list[Any]:
    """Return the entries of dicts: key, value, key, value ..."""
    return [x for d in dicts for item in (d or {}).items() for x in item]


def _ids(objects: Sequence[Any]) -> array[int]:
    return array("Q", map(id, objects))


class GuardIndexMap(NamedTuple):
    """The indices of lanes' tensors among the tensors of a step.

    `gradients`: the index of each lane's gradient. `held`: ranges (from, to, from, to
    ...) of parameters and state. `others`: the indices of tensors of no lane, in the
    order of a call. `stand_ins`: for each lane, the step's replacement for a missing
    gradient, or None.
    """

    gradients: array[int]
    held: array[int]
    others: array[int]
    stand_ins: Sequence[Any] = ()


class LaneGuard:
    """A record of lanes, in order: their parameters and states (None: no state).

    `compare` returns the lanes' gradients, or None if an object other than a gradient
    has changed.

    `lists`: the parameters of each group. `state`: the optimizer's state. `helper`: the
    library, built. `kinds`: the two types that a parameter or a gradient may have.
    `tensors`: the guard of a step; `compare` reads its tensors in the same pass.
    `rest`: a record of all else that the optimizer holds. `rest_same`: True if the last
    comparison found `rest` unchanged. `may_lack`: a byte for each lane, 1 if its
    gradient may come and go. `present`: a byte for each lane, 1 if the last comparison
    found a gradient. `counted`: for each lane, the keys of integers in its state that
    may change. `counters`: these integers in the last comparison, lane by lane.
    """

    def __init__(
        self,
        helper: ctypes.PyDLL,
        params: Sequence[Any],
        states: Sequence[dict[str, Any] | None],
        kinds: tuple[type, type],
        lists: Sequence[Sequence[Any]],
        state: dict[Any, Any],
        rest: ContainerRecord,
        may_lack: bytes | None = None,
        counted: Sequence[Sequence[str]] | None = None,
    ) -> None:
        # kept alive: a new object at one of these addresses would pass for the old one
        objects = [
            list(params),
            list(states),
            _flat(states),
            [p for params_of_group in lists for p in params_of_group],
            _flat([state]),
        ]
        of_lane = counted or ((),) * len(params)
        at = [*map(_ids, objects)]
        keys = [
            (key, key in counters)
            for state, counters in zip(states, of_lane, strict=True)
            for key in state or ()
        ]
        for i, (_, is_counter) in enumerate(keys):
            if is_counter:
                at[2][2 * i + 1] = 0
        #: described at the class; the helper writes it
        self.counters: list[Any] = [
            value
            for state, counters in zip(states, of_lane, strict=True)
            for key, value in (state or {}).items()
            if key in counters
        ]
        counts = array("q", [-1 if s is None else len(s) for s in states])
        flags = array("q", [p.requires_grad for p in params])
        had = array("B", [p.grad is not None for p in params])
        self._has = array("B", had)
        may = array("B", may_lack or bytes(len(params)))
        numbers = array("q", map(len, of_lane))
        sizes = array("q", map(len, lists))
        versions = array("Q", [0] * (1 + len(params)))
        record = objects, at, counts, flags, had, may, numbers, sizes, kinds, versions
        self._keep = record
        self.present = bytes(had)
        get = compat.gradient_getter(kinds)
        reader = compat.requires_grad_function(params)
        plain = all(type(p) in kinds for p in params)
        self._n, self._lists = len(params), len(sizes)
        struct = self._struct = LaneRecord(
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
            integer=id(int),
            counters=id(self.counters),
        )
        for name, a in zip(
            ("params", "states", "held", "members", "owned"), at, strict=True
        ):
            setattr(struct, name, a.buffer_info()[0])
        struct.counts, struct.flags, struct.sizes, struct.counted = (
            a.buffer_info()[0] for a in (counts, flags, sizes, numbers)
        )
        struct.had, struct.has, struct.may_lack = (
            a.buffer_info()[0] for a in (had, self._has, may)
        )
        if get is not None and plain:
            struct.descriptor, struct.read = id(get[0]), get[1]
        if reader is not None and plain:
            struct.handle, struct.required = reader
            direct = compat.gradient_functions()
            if get is not None and direct is not None:
                struct.gradient, struct.wrapped, struct.mode = direct
        struct.version = compat.dict_version()
        struct.versions = versions.buffer_info()[0]
        self._none = [None] * self._n
        self._given: PendingGradients | None = None
        self._where = ctypes.addressof(struct)
        self.tensors: TensorGuard | None = None
        self.rest_same = False
        self._rest, struct.rest = rest, ctypes.addressof(rest)
        self._helper, call = helper, helper.fuseopt_lanes
        call.restype = ctypes.c_int64
        call.argtypes = [ctypes.c_void_p, *(ctypes.py_object,) * 5]
        self._call: Callable[..., int] = call

    def compare_with(self, tensors: TensorGuard, meeting: GuardIndexMap) -> None:
        """Compare the tensors of a step in each comparison from now on.

        The last `compare` of the step's guard must have read all of them. This guard
        keeps alive what lanes hold; the caller keeps the other tensors alive.
        """
        struct = self._struct
        self.tensors = struct.known = None
        if not tensors.comparable:
            return
        struct.gradients, struct.held_in = address(meeting[0]), address(meeting[1])
        struct.ranges = len(meeting.held) // 2
        instead = meeting.stand_ins or self._none
        self._stand_ins = array("Q", [0 if x is None else id(x) for x in instead])
        struct.stand_ins = address(self._stand_ins)
        struct.functions, struct.known = tensors.structs
        self.tensors, self._meeting = tensors, meeting

    def compare_no_more(self) -> None:
        """Stop comparing the tensors of a step."""
        self.tensors = self._struct.known = None

    def compare(
        self,
        attributes: dict[str, Any],
        lists: list[Any],
        state: Any,
        given: PendingGradients | None = None,
    ) -> list[Any] | None:
        """Return the gradients of all lanes, or None; see the class.

        `attributes`: those of the optimizer. `lists`: the parameters of each group.
        `given`: gradients that replace those of parameters, unless they were assigned.
        With them, the result is also None unless all tensors are compared.
        """
        if type(state) not in DICTS or {*map(type, lists)} != LIST:
            return None
        if len(lists) != self._lists:
            return None
        from_ = None
        if given is not None and given.grads is not None:
            if self.tensors is None:
                return None
            if given is not self._given:
                self._take(given)
            from_ = given.grads
        grads = self._none.copy()
        verdict = self._call(self._where, attributes, lists, state, grads, from_)
        self.rest_same = verdict == 0
        self.present = bytes(self._has)
        return None if verdict == 1 else grads

    def as_calls(
        self,
        attributes: dict[str, Any],
        lists: list[Any],
        state: Any,
        given: list[Any] | None,
    ) -> tuple[list[Callable[[], int]], list[Any]]:
        """Return `compare` as calls of C, and the list that gets the gradients.

        All return 0 if only gradients are new objects, and the same lanes have one as
        in the last comparison. The caller compares the lists of parameters. `given`:
        the gradients that an earlier call of C has given, if the last comparison had
        such ones.
        """
        grads, same = self._none.copy(), self._helper.fuseopt_bytes
        arguments = self._where, attributes, lists, state, grads, given
        same.restype, same.argtypes = ctypes.c_int64, [ctypes.c_int64, _BYTES, _BYTES]
        now = self._n, address(self._has), self.present
        return [
            functools.partial(self._call, *arguments),
            functools.partial(same, *now),
        ], grads

    def _take(self, given: PendingGradients) -> None:
        """Give the helper the index of each lane's gradient among the given ones."""
        places = array("q", [given.places.get(id(p), -1) for p in self._keep[0][0]])
        self._struct.given = address(places)
        self._given, self._places = given, places

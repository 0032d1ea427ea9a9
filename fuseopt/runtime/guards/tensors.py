"""Have the tensors of a call moved or changed? Asked of all of them in one C call.

Parameters, gradients and state may be swapped, moved or given other strides between two
calls, and Dynamo guards none of that. Asking 1,500 tensors from Python costs more than
a small step. The compiled helper finds them in the graph module's dicts and the call's
arguments and compares the fields that lie in each with those it saw last, in about 5 ns
each. A tensor whose fields differ is asked through the C functions that torch exports
for ahead-of-time compiled code. Where those are missing, all are asked from Python.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ... import compat
from .library import Followed, Functions, Known
from .sharing import ALONE, Moves

MOVED, CHANGED = 1, 2
#: What the helper says of tensors that cannot be asked.
UNKNOWN = 4
#: Where in the metadata of a tensor the number of its dimensions is.
DIMS = 3


def address(a: array[int]) -> int:
    """Where the numbers of an array lie."""
    return a.buffer_info()[0]


class TensorGuard:
    """What is known of a call's tensors. `look(...)` compares and remembers.

    `helper`: the library, built, or None to ask from Python. After `look` returned with
    MOVED set, `accept()` takes the new addresses as known. `mutated`: tensors whose
    version counters `bump` counts up. `raw_fields`: compare the fields of tensors where
    they lie in memory.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        helper: ctypes.PyDLL | None,
        mutated: Sequence[int] = (),
        raw_fields: bool = True,
    ) -> None:
        n = self.n = len(tensors)
        self.mutated = mutated
        self.addresses = array("Q", bytes(8 * n))
        self._now = array("Q", bytes(8 * n))
        self._call: Any = None
        self._bump: Any = None
        #: `bump` as a call of C, which says whether it failed; None if there is none
        self.count: Callable[[], object] | None = None
        #: does the helper compare fields where they lie in memory?
        self.raw = False
        #: did the last look compare all tensors?
        self.comparable = False
        if helper is not None and n:
            known = compat.tensor_functions(tensors, raw_fields)
            if known is not None:
                self._ask_helper(helper, known, tensors)
        if self._call is None:
            self._guard = compat.metadata_guard(tensors)

    def _ask_helper(
        self,
        helper: ctypes.PyDLL,
        known: compat.TensorFunctions,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        """Use the helper, if it finds that the tensors are what they are."""
        metadata, begins, codes = array("q"), array("q"), compat.Codes()
        firsts: dict[tuple[int, ...], int] = {}
        kin = array("q")
        for i, t in enumerate(tensors):
            begins.append(len(metadata))
            own = (*codes.of(t), t.dim(), *t.shape, *t.stride())
            metadata.extend(own)
            kin.append(firsts.setdefault(own, i))
        words = 8 * self.n
        #: arrays that the struct points to; all ones: nothing was seen yet
        arrays = {
            "addresses": self.addresses,
            "now": self._now,
            "metadata": metadata,
            "begins": begins,
            "seen": array("Q", b"\xff" * (words * 3)),
            "fields": array("Q", b"\xff" * (2 * words * known.words)),
            "like": array("q", range(self.n, 2 * self.n)),
            "kin": kin,
            "tensors": array("Q", bytes(words)),
            "moved": array("q", bytes(words)),
        }
        self._functions = Functions(**known._asdict())
        self._known = Known(n=self.n, **{k: address(a) for k, a in arrays.items()})
        self._keep: dict[str, array[int]] = arrays
        self._begins = begins
        #: what all functions of the helper take first: the addresses of both structs
        self.structs = ctypes.addressof(self._functions), ctypes.addressof(self._known)
        both = (ctypes.c_void_p, ctypes.c_void_p)
        call = helper.fuseopt_tensors
        call.restype, call.argtypes = ctypes.c_int64, [*both, *(ctypes.py_object,) * 3]
        if call(*self.structs, {}, {}, tuple(tensors)) & ~MOVED:
            return
        self._call, self.raw = call, known.words > 0
        rest: tuple[Any, ...] = ctypes.c_void_p, ctypes.c_int64
        self._others = helper.fuseopt_others
        self._others.restype = ctypes.c_int64
        self._others.argtypes = [*both, ctypes.py_object, *rest]
        self._follow = helper.fuseopt_follow
        self._follow.restype = ctypes.c_int64
        self._follow.argtypes = [ctypes.c_void_p, ctypes.py_object]
        self._accept = helper.fuseopt_accept
        self._accept.restype, self._accept.argtypes = None, [*both]
        self._accept(*self.structs)
        if known.bump and self.mutated:
            which = arrays["which"] = array("q", self.mutated)
            self._bump = helper.fuseopt_bump
            self._bump.restype, self._bump.argtypes = ctypes.c_int64, [*both, *rest]
            self._which = (address(which), len(which))
            self.count = functools.partial(self._bump, *self.structs, *self._which)

    def let_move(self, moves: Moves) -> None:
        """Let `look` follow tensors that may move: it then says that nothing did.

        The addresses that are known must be those in the pool. Holds until the next
        call of this; without the helper it says what moved, as ever.
        """
        if self._call is None:
            return
        views = moves.pool.places.views
        mobile = [i for i, how in enumerate(moves.loose) if how]
        if ALONE not in moves.loose:
            mobile = []
        arrays = {
            "loose": array("B", moves.loose),
            "reach": array("Q", moves.reach),
            "starts": array("Q", moves.starts),
            "ends": array("Q", moves.ends),
            "stay_starts": array("Q", moves.stays[0]),
            "stay_ends": array("Q", moves.stays[1]),
            "order": array("q", mobile),
            "views": array("q", [x for view in views for x in view]),
            "pool": moves.pool.words,
        }
        known = self._known
        for name, a in arrays.items():
            setattr(known, name, address(a))
        known.spans, known.n_views = len(moves.starts), len(views)
        known.stays, known.mobile = len(moves.stays[0]), len(mobile)
        self._keep.update(arrays)

    def look(
        self,
        buffers: Mapping[str, Any],
        parameters: Mapping[str, Any],
        given: tuple[Any, ...],
    ) -> int:
        """0, or MOVED and CHANGED: of the values of two dicts and of arguments."""
        if self._call is not None:
            found = self._call(*self.structs, buffers, parameters, given)
            self.comparable = found in (0, MOVED)
            return int(found) if found < UNKNOWN else CHANGED | MOVED
        tensors = [*buffers.values(), *parameters.values(), *given]
        if not self._guard(*tensors):
            return CHANGED | MOVED
        self._now[:] = array("Q", map(torch.Tensor.data_ptr, tensors))
        return MOVED * (self._now != self.addresses)

    def look_at_others(self, tensors: list[Any], places: int, n: int) -> int:
        """What `look` says, where lanes.LaneGuard has compared all but these.

        `places`: the address of `n` int64, their places among all tensors.
        """
        if len(tensors) != n:
            return CHANGED | MOVED
        found = self._others(*self.structs, tensors, places, n)
        self.comparable = found in (0, MOVED)
        return int(found) if found < UNKNOWN else CHANGED | MOVED

    def same_as(self, other: TensorGuard, places: Sequence[int]) -> bool:
        """Are the first tensors of the last call, which moved as they may, those at
        some places of another guard's last call, by all that both know of them?
        """
        if not (self._call and other._call and self._known.pool):
            return False
        mine, theirs = (guard._keep for guard in (self, other))
        for i, place in enumerate(places):
            if self.addresses[i] != other.addresses[place]:
                return False
            of = mine["metadata"], self._begins[i], theirs["metadata"]
            if not _alike(*of, other._begins[place]):
                return False
        return True

    def following(
        self, other: TensorGuard, places: array[int], own: tuple[int, int], rest: int
    ) -> Callable[[list[Any]], int] | None:
        """What says, in place of `look`, what became of a call's tensors, where another
        guard has compared the first ones in the same call, at `places` of its own.

        It is given the `own[1]` tensors at `own[0]`, which nobody else knows, and those
        from `rest` on. None where both guards have not just seen the same.
        """
        if not other.comparable or not self.same_as(other, places):
            return None
        struct = Followed(
            functions=self.structs[0],
            known=self.structs[1],
            other=other.structs[1],
            n=len(places),
            own=own[0],
            fresh=own[1],
            rest=rest,
            others=self.n - rest,
        )
        setattr(struct, "from", address(places))
        call, where = self._follow, ctypes.addressof(struct)

        def look(tensors: list[Any], _: Any = (struct, places, other)) -> int:
            found = call(where, tensors)
            self.comparable = found in (0, MOVED)
            return int(found)

        return look

    def found(self) -> list[int]:
        """The addresses of the last look, if it found nothing but those changed."""
        return self._now.tolist()

    def moved(self) -> list[int]:
        """Tensors whose addresses the last look found changed."""
        both = zip(self._now, self.addresses, strict=True)
        return [i for i, (now, known) in enumerate(both) if now != known]

    def accept(self) -> None:
        """Take the addresses of the last look as known, while its tensors live."""
        if self._call is None:
            self.addresses[:] = self._now
        elif self.comparable:
            self._accept(*self.structs)

    def bump(self) -> bool:
        """Count up the version counters of `mutated`, as an ATen call would.

        Their tensors are those of the last look and still alive. False if the helper
        cannot.
        """
        if self._bump is None:
            return not self.mutated
        return not self._bump(*self.structs, *self._which)


def _alike(mine: array[int], at: int, theirs: array[int], place: int) -> bool:
    """Do metadata say the same of a tensor?"""
    n = DIMS + 1 + 2 * mine[at + DIMS]
    return mine[at : at + n] == theirs[place : place + n]

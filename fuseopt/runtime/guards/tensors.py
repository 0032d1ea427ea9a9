"""Compare the tensors of a call with those of the last one, all in one C call.

Users may swap or move parameters, gradients and state, or give them new strides,
between two calls. Dynamo guards none of that. To compare 1,500 tensors in Python takes
longer than a small step. The compiled helper finds the tensors in the graph module's
dicts and the call's arguments. It compares the fields of each in memory with its
record, in about 5 ns each. Where fields differ, it reads the tensor's properties
through the C functions that torch exports for ahead-of-time compiled code. Where torch
lacks these functions, all tensors are compared in Python.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ... import compat
from .facts import Kept
from .library import Functions, LinkedRecord, TensorRecord
from .sharing import ALONE, Moves

MOVED, CHANGED = 1, 2
#: Result of the helper where it cannot read a tensor's properties.
UNKNOWN = 4
#: Index of the number of dimensions in a tensor's metadata.
DIMS = 3


def address(a: array[int]) -> int:
    """Return the address of an array's elements."""
    return a.buffer_info()[0]


class TensorGuard:
    """Record of a call's tensors, with which `compare(...)` compares those of the next
    call.

    `helper` is the built library, or None to compare in Python. If `compare` returned
    MOVED, `accept()` records the new addresses. `mutated` are the indices of the
    tensors whose version counters `bump` increments. With `raw_fields`, the helper
    compares the fields of tensors in memory.
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
        #: `bump` as a call of C, which returns whether it failed; None without a helper
        self.count: Callable[[], object] | None = None
        #: true if the helper compares fields in memory
        self.raw = False
        #: true if the last comparison compared all tensors
        self.comparable = False
        #: `compare_others` as a call of C, which leaves `comparable` unchanged
        self.others: Callable[..., int] | None = None
        if helper is not None and n:
            functions = compat.tensor_functions(tensors, raw_fields)
            if functions is not None:
                self._use_helper(helper, functions, tensors)
        if self._call is None:
            self._guard = compat.metadata_guard(tensors)

    def _use_helper(
        self,
        helper: ctypes.PyDLL,
        functions: compat.TensorFunctions,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        """Use the helper, if it agrees with torch on the metadata of the tensors."""
        metadata, begins, codes = array("q"), array("q"), compat.Codes()
        firsts: dict[tuple[int, ...], int] = {}
        kin = array("q")
        for i, t in enumerate(tensors):
            begins.append(len(metadata))
            description = (*codes.of(t), t.dim(), *t.shape, *t.stride())
            metadata.extend(description)
            kin.append(firsts.setdefault(description, i))
        words = 8 * self.n
        #: arrays that the struct points to; all bits are set until something is
        #: recorded
        arrays = {
            "addresses": self.addresses,
            "now": self._now,
            "metadata": metadata,
            "begins": begins,
            "seen": array("Q", b"\xff" * (words * 3)),
            "fields": array("Q", b"\xff" * (2 * words * functions.words)),
            "like": array("q", range(self.n, 2 * self.n)),
            "kin": kin,
            "tensors": array("Q", bytes(words)),
            "moved": array("q", bytes(words)),
        }
        self._functions = Functions(**functions._asdict())
        self._known = TensorRecord(
            n=self.n, **{k: address(a) for k, a in arrays.items()}
        )
        self._keep: dict[str, array[int]] = arrays
        self._begins = begins
        #: the first arguments of the helper's functions: the addresses of both structs
        self.structs = ctypes.addressof(self._functions), ctypes.addressof(self._known)
        both = (ctypes.c_void_p, ctypes.c_void_p)
        call = helper.fuseopt_tensors
        call.restype, call.argtypes = ctypes.c_int64, [*both, *(ctypes.py_object,) * 3]
        if call(*self.structs, {}, {}, tuple(tensors)) & ~MOVED:
            return
        self._call, self.raw = call, functions.words > 0
        indices: tuple[Any, ...] = ctypes.c_void_p, ctypes.c_int64
        others = helper.fuseopt_others
        others.restype, others.argtypes = (
            ctypes.c_int64,
            [*both, ctypes.py_object, *indices],
        )
        self.others = functools.partial(others, *self.structs)
        self._follow = helper.fuseopt_follow
        self._follow.restype = ctypes.c_int64
        self._follow.argtypes = [ctypes.c_void_p, ctypes.py_object]
        self._accept = helper.fuseopt_accept
        self._accept.restype, self._accept.argtypes = None, [*both]
        self._accept(*self.structs)
        if functions.bump and self.mutated:
            self._bump = helper.fuseopt_bump
            self._bump.restype, self._bump.argtypes = ctypes.c_int64, [*both, *indices]
            self.count_up(self.mutated)

    def count_up(self, mutated: Sequence[int]) -> None:
        """Let `bump` increment the versions of these tensors alone from now on."""
        self.mutated = mutated
        if self._bump is not None:
            which = self._keep["which"] = array("q", mutated)
            self._which = (address(which), len(which))
            self.count = functools.partial(self._bump, *self.structs, *self._which)

    def let_move(self, moves: Moves) -> None:
        """Let `compare` follow tensors that may move: it returns 0 if only they moved.

        The recorded addresses must be those in the pool. The effect lasts until the
        next call of this method. Without the helper `compare` returns MOVED.
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
        struct = self._known
        for name, a in arrays.items():
            setattr(struct, name, address(a))
        struct.spans, struct.n_views = len(moves.starts), len(views)
        struct.stays, struct.mobile = len(moves.stays[0]), len(mobile)
        self._keep.update(arrays)

    def compare(
        self,
        buffers: Mapping[str, Any],
        parameters: Mapping[str, Any],
        given: tuple[Any, ...],
    ) -> int:
        """Compare two dicts' values, then the arguments: 0, or MOVED | CHANGED."""
        if self._call is not None:
            verdict = self._call(*self.structs, buffers, parameters, given)
            self.comparable = verdict in (0, MOVED)
            return int(verdict) if verdict < UNKNOWN else CHANGED | MOVED
        tensors = [*buffers.values(), *parameters.values(), *given]
        if not self._guard(*tensors):
            return CHANGED | MOVED
        self._now[:] = array("Q", map(torch.Tensor.data_ptr, tensors))
        if self._now == self.addresses:
            return 0
        full = [t for t in tensors if t.numel()]
        held = all(t.untyped_storage().nbytes() for t in full)
        return MOVED if held else CHANGED | MOVED

    def compare_others(self, tensors: list[Any], places: int, n: int) -> int:
        """Return the result of `compare`, where lanes.LaneGuard has compared all other
        tensors.

        `places` is the address of `n` int64, the indices of `tensors` among all.
        """
        if len(tensors) != n:
            return CHANGED | MOVED
        assert self.others is not None
        verdict = self.others(tensors, places, n)
        self.comparable = verdict in (0, MOVED)
        return int(verdict) if verdict < UNKNOWN else CHANGED | MOVED

    def same_as(self, other: TensorGuard, places: Sequence[int]) -> bool:
        """Do the first tensors of this guard's last call have the addresses and the
        metadata of those at `places` of another guard's last call?
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
        self,
        other: TensorGuard,
        places: array[int],
        unshared: tuple[int, int],
        rest: int,
    ) -> Callable[[list[Any]], int] | None:
        """Return a call of C in place of `compare`, where another guard has compared
        the first tensors in the same call. Their indices there are `places`. Its result
        is for `follow`.

        It takes a list, which has the `unshared[1]` tensors from index `unshared[0]`
        on, which the other guard lacks, and those from `rest` on. Returns None unless
        the last comparisons of both guards compared the same tensors.
        """
        if not other.comparable or not self.same_as(other, places):
            return None
        struct = LinkedRecord(
            functions=self.structs[0],
            known=self.structs[1],
            other=other.structs[1],
            n=len(places),
            own=unshared[0],
            fresh=unshared[1],
            rest=rest,
            others=self.n - rest,
        )
        setattr(struct, "from", address(places))
        call = Kept(self._follow, ctypes.addressof(struct))
        call.objects = struct, places, other
        return call

    def follow(self, verdict: int) -> bool:
        """Take the result of a call of `following`; return whether all is the same."""
        self.comparable = verdict in (0, MOVED)
        return verdict == 0

    def found(self) -> list[int]:
        """Return the addresses of the last call, if nothing but addresses changed."""
        return self._now.tolist()

    def moved(self) -> list[int]:
        """Return the indices of tensors whose addresses changed by the last call."""
        both = zip(self._now, self.addresses, strict=True)
        return [i for i, (now, address) in enumerate(both) if now != address]

    def accept(self) -> None:
        """Record the addresses of the last comparison, while its tensors are alive."""
        if self._call is None:
            self.addresses[:] = self._now
        elif self.comparable:
            self._accept(*self.structs)

    def bump(self) -> bool:
        """Increment the version counters of `mutated`, as an ATen call would.

        Their tensors are those of the last comparison and alive. Returns False if the
        helper cannot do it.
        """
        if self._bump is None:
            return not self.mutated
        return not self._bump(*self.structs, *self._which)


def _alike(mine: array[int], at: int, theirs: array[int], place: int) -> bool:
    """Are the metadata of a tensor equal in two arrays, at `at` and at `place`?"""
    n = DIMS + 1 + 2 * mine[at + DIMS]
    return mine[at : at + n] == theirs[place : place + n]

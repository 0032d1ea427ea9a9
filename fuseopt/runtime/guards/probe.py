"""Have the tensors of a call moved or changed? Asked of all of them in one C call.

Parameters, gradients and state may be swapped, moved or given other strides between two
calls, and Dynamo guards none of that. Asking 1,500 tensors from Python costs more than
a small step. A compiled helper finds them in the graph module's dicts and the call's
arguments and compares the fields that lie in each with those it saw last, in about 5 ns
each. A tensor whose fields differ is asked through the C functions that torch exports
for ahead-of-time compiled code. Where those are missing, all are asked from Python.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ... import compat
from .helper import Known

MOVED, CHANGED = 1, 2
#: What the helper says of tensors that cannot be asked.
UNKNOWN = 4


def _address(a: array[int]) -> int:
    return a.buffer_info()[0]


class Moves(NamedTuple):
    """Which tensors may move between two calls unasked, and what then changes.

    `loose[i]`: may tensor i lie in any memory that the step does not write? `reach[i]`:
    bytes from its first element to behind its last. `starts`, `ends`: the memory that
    is written, sorted. `pool`: the address of each tensor, then those of `views`:
    (place in the pool, that of what is viewed, bytes between both).
    """

    loose: Sequence[bool]
    reach: Sequence[int]
    starts: Sequence[int]
    ends: Sequence[int]
    pool: array[int]
    views: Sequence[tuple[int, int, int]]


class Probe:
    """What is known of a call's tensors. `look(...)` compares and remembers.

    `helper`: PROBE, built, or None to ask from Python. After `look` returned with MOVED
    set, `accept()` takes the new addresses as known. `mutated`: tensors whose version
    counters `bump` counts up.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        helper: ctypes.PyDLL | None,
        mutated: Sequence[int] = (),
    ) -> None:
        n = self.n = len(tensors)
        self.mutated = mutated
        self.addresses = array("Q", bytes(8 * n))
        self._now = array("Q", bytes(8 * n))
        self._call: Any = None
        self._bump: Any = None
        #: `bump` as a call of C, which says whether it failed; None if there is none
        self.count: Callable[[], object] | None = None
        self._comparable = False  # did the last look compare all tensors?
        #: who keeps the tensors of the last look, but for some; see `hold`
        self.holder: Any = None
        functions = (
            compat.tensor_functions(tensors) if helper is not None and n else None
        )
        if functions is not None and helper is not None:
            self._ask_helper(helper, functions, tensors)
        if self._call is None:
            self._guard = compat.metadata_guard(tensors)

    def _ask_helper(
        self,
        helper: ctypes.PyDLL,
        functions: compat.TensorFunctions,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        """Use the helper, if it finds that the tensors are what they are."""
        metadata, begins, codes = array("q"), array("q"), compat.Codes()
        for t in tensors:
            begins.append(len(metadata))
            metadata.extend((*codes.of(t), t.dim(), *t.shape, *t.stride()))
        # all ones: nothing was seen yet
        seen = array("Q", b"\xff" * (8 * self.n * (functions.words + 3)))
        known = array("Q", bytes(8 * self.n))
        moved = array("q", bytes(8 * self.n))
        which = array("q", self.mutated)
        struct = self._struct = Known(
            self.n,
            *map(_address, (self.addresses, self._now, metadata, begins)),
            *map(_address, (seen, known, moved)),
        )
        self._keep = (functions, metadata, begins, seen, known, moved, which)
        self._args = (ctypes.addressof(functions), ctypes.addressof(struct))
        call = helper.fuseopt_probe
        call.restype = ctypes.c_int64
        call.argtypes = [*(ctypes.c_void_p,) * 2, *(ctypes.py_object,) * 3]
        again = self._again = helper.fuseopt_probe_again
        again.restype = ctypes.c_int64
        again.argtypes = [
            *(ctypes.c_void_p,) * 2,
            ctypes.py_object,
            ctypes.c_void_p,
            ctypes.c_int64,
        ]
        if call(*self._args, {}, {}, tuple(tensors)) & ~MOVED == 0:
            self._call = call
            self._accept = helper.fuseopt_accept
            self._accept.restype = None
            self._accept.argtypes = [ctypes.c_void_p] * 2
            self._accept(*self._args)
            if functions.bump and self.mutated:
                bump = helper.fuseopt_bump
                bump.restype = ctypes.c_int64
                bump.argtypes = [*(ctypes.c_void_p,) * 3, ctypes.c_int64]
                self._bump = bump
                self._which = (_address(which), len(which))
                self.count = functools.partial(bump, *self._args, *self._which)

    def let_move(self, moves: Moves) -> None:
        """Let `look` follow tensors that may move: it then says that nothing did.

        The addresses that are known must be those in the pool. Holds until the next
        call of this; without the helper it says what moved, as ever.
        """
        if self._call is None:
            return
        kept = (
            array("B", moves.loose),
            array("Q", moves.reach),
            array("Q", moves.starts),
            array("Q", moves.ends),
            array("q", [x for view in moves.views for x in view]),
        )
        loose, reach, starts, ends, views = map(_address, kept)
        struct = self._struct
        struct.loose, struct.reach = loose, reach
        struct.spans, struct.starts, struct.ends = len(moves.starts), starts, ends
        struct.n_views, struct.views = len(moves.views), views
        struct.pool = _address(moves.pool)
        self._moves = kept, moves.pool

    def look(
        self,
        buffers: Mapping[str, Any],
        parameters: Mapping[str, Any],
        given: tuple[Any, ...],
    ) -> int:
        """0, or MOVED and CHANGED: of the values of two dicts and of arguments."""
        self.holder = None
        if self._call is not None:
            found = self._call(*self._args, buffers, parameters, given)
            self._comparable = found in (0, MOVED)
            return int(found) if found < UNKNOWN else CHANGED | MOVED
        tensors = [*buffers.values(), *parameters.values(), *given]
        if not self._guard(*tensors):
            return CHANGED | MOVED
        self._now[:] = array("Q", map(torch.Tensor.data_ptr, tensors))
        return MOVED * (self._now != self.addresses)

    def hold(self, holder: Any, late: Sequence[tuple[int, int]], size: int) -> None:
        """Say that the last look's tensors are the same objects as long as `holder` is.

        But for some: (place among the tensors, in the list of `look_again`), a list of
        this size.
        """
        if self._call is not None and self._comparable:
            places = array("q", [x for pair in late for x in pair])
            self._late = places, _address(places), len(late), size
            self.holder = holder

    def look_again(self, late: list[Any]) -> int:
        """What `look` says, where all but these are the tensors that `holder` keeps."""
        _, places, n, size = self._late
        if len(late) != size:
            return CHANGED | MOVED
        found = self._again(*self._args, late, places, n)
        self._comparable = found in (0, MOVED)
        return int(found) if found < UNKNOWN else CHANGED | MOVED

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
        elif self._comparable:
            self._accept(*self._args)

    def bump(self) -> bool:
        """Count up the version counters of `mutated`, as an ATen call would.

        Their tensors are those of the last look and still alive. False if the helper
        cannot.
        """
        if self._bump is None:
            return not self.mutated
        return not self._bump(*self._args, *self._which)

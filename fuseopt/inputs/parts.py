"""Compare an optimizer of DTensors with the last call that read its local parts.

Usually only gradients are new objects, with the same specs. One call of the compiled
helper compares the local part and the spec of each DTensor by identity. It compares the
memory of the parts by address, and reads the parts of the gradients. Python compares
all of these where the helper cannot.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence
from itertools import compress
from operator import attrgetter, is_, ne
from typing import Any

import torch

from .. import compat
from ..compat.facts import attributes, result
from ..runtime.guards.library import PartRecord
from ..runtime.guards.tensors import TensorGuard, address
from .change import Change
from .contents import Contents
from .pending_gradients import GradientsInC

_FLAG = attrgetter("requires_grad")
_VERSION = attrgetter("_version")
#: Results of `compare`: a change besides gradients; a change of gradients alone; the
#: helper cannot compare.
OTHER, GRADIENTS, UNASKED = 1, 2, 3


class DTensorRecord:
    """A record of the contents of an optimizer and of its DTensors.

    `pairs`: the optimizer's attributes and each of its groups, each with that of the
    local optimizer, to which this copies changed numbers. `tables`, `lists`: the dicts
    of the state, and its lists. `whole`: the parameters that are DTensors.
    `state_dtensors`: the DTensors in the state. `local_params`: the local optimizer's
    parameter for each of `whole`.

    A step calls `compare` first. If that returns None, it calls `same` and `begin`. At
    the end it calls `count_up`, which increases the versions of changed parameters.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]] = (),
        tables: Sequence[Any] = (),
        lists: Sequence[Any] = (),
        whole: Sequence[Any] = (),
        state_dtensors: Sequence[Any] = (),
        local_params: Sequence[torch.Tensor] = (),
    ) -> None:
        self._copies = {id(source): copy for source, copy in pairs}
        self._plain = Contents([source for source, _ in pairs])
        self._held = Contents([*tables, *lists])
        self._whole, self._local_params = whole, local_params
        self._seen = [*whole, *state_dtensors]
        self._locals = [*map(compat.local_part, self._seen)]
        self._specs = [*map(compat.spec_of, self._seen)]
        self._at = [*map(torch.Tensor.data_ptr, self._locals)]
        self._flags = [*map(_FLAG, whole)]
        self._guard: PartGuard | None = None
        self._guarded = False  # True once a guard was made
        self._in_c: tuple[PartGuard, GradientsInC] | None = None
        self._versions: list[int] = []  # before the step; [] if the guard has them

    def compare(self, helper: ctypes.PyDLL | None) -> list[Any] | None:
        """Return the local parts of all gradients, or None.

        Returns None unless compiled code finds no change except numbers. `helper`: the
        library of the guards.
        """
        if self._guard is None or not self._follow(helper):
            return None
        grads = self._guard.compare()
        if grads is not None:
            self._versions = []
        return grads

    def in_c(self) -> GradientsInC | None:
        """Return `compare` and `count_up` as calls of C, after a `compare` that has
        returned parts. None while Python does a part of it.
        """
        guard, plain = self._guard, self._plain.in_c
        if guard is None or plain is None:
            return None
        if self._in_c is None or self._in_c[0] is not guard:
            facts = [*attributes(self, "_guard", "_plain"), result(1, plain)]
            read, grads, count = guard.as_calls()
            in_c = GradientsInC(facts, read, grads, count, self._count_again)
            self._in_c = guard, in_c
        return self._in_c[1]

    def count_gradients(self) -> bool:
        """Increase the versions of gradients after a `compare` that has returned parts.

        Returns False if the helper cannot do it.
        """
        return self._guard is not None and self._guard.bump_gradients()

    def _count_again(self) -> None:
        """Do `count_up` after a call of C in place of `compare`."""
        self._versions = []
        self.count_up()

    def _follow(self, helper: ctypes.PyDLL | None) -> bool:
        """Are the attributes and groups unchanged except for numbers?

        Copies these numbers to the local optimizer.
        """
        found = self._plain.compare(helper)
        if found.change is Change.NUMBERS:
            for cell, source, key, number in found.moved:
                self._copies[id(source)][key] = number
                self._plain.put(cell, number)
        return found.change is not Change.STRUCTURE

    def same(self, helper: ctypes.PyDLL | None) -> bool:
        """Is all unchanged except numbers? Compares in Python, after `compare`."""
        change = None if self._guard is None else self._guard.found
        if not self._follow(helper):
            return False
        if change == GRADIENTS:
            return True
        same = (
            self._held.same(helper)
            and all(map(is_, map(compat.local_part, self._seen), self._locals))
            and all(map(is_, map(compat.spec_of, self._seen), self._specs))
            and [*map(torch.Tensor.data_ptr, self._locals)] == self._at
            and [*map(_FLAG, self._whole)] == self._flags
        )
        if change == OTHER:
            self._guard = None  # it would report a change in each call
        elif same and not self._guarded and helper and self._held.struct:
            self._guarded = True
            guard = PartGuard(helper, self._seen, self._local_params, self._held)
            self._guard = guard if guard.works else None
        return same

    def begin(self, specs: Sequence[Any]) -> None:
        """Begin a step if `compare` returned None; `specs`: those of its gradients."""
        self._versions = [*map(_VERSION, self._local_params)]
        if self._guard is not None:
            self._guard.expect(specs)

    def count_up(self) -> None:
        """End a step: increase the versions of the changed parameters."""
        before: Sequence[int] = self._versions
        if not before and self._guard is not None:
            if self._guard.bump():
                return
            before = self._guard.versions
        changed = map(ne, map(_VERSION, self._local_params), before)
        compat.bump_versions([*compress(self._whole, changed)])


class PartGuard:
    """A record of DTensors, and of the dicts and lists that hold them.

    `wholes`: the DTensors, parameters first. `heres`: the tensor that is stepped in
    place of each parameter. `versions`: those of `heres` before the step.
    `expect(specs)` sets the specs that gradients must have, by identity. `compare()`
    returns the parts of gradients, with None for a parameter without one. If it returns
    None, `found` has the result.
    """

    def __init__(
        self,
        helper: ctypes.PyDLL,
        wholes: Sequence[Any],
        heres: Sequence[torch.Tensor],
        held: Contents,
    ) -> None:
        self.found = UNASKED
        self._n = n = len(heres)
        self._call: Any = None
        locals_ = [*map(compat.local_part, wholes)]
        places = compat.part_places()
        reader = compat.requires_grad_function([*wholes, *locals_, *heres])
        direct, versions = compat.gradient_functions(), compat.version_functions()
        tensors = TensorGuard(locals_[:n], helper)
        same = tensors.compare({}, {}, tuple(locals_[:n])) == 0 and tensors.comparable
        raw = same and tensors.raw
        if not (places and reader and direct and versions and raw and held.struct):
            return
        specs = [*map(compat.spec_of, wholes)]
        self._specs = array("Q", bytes(8 * n))
        kinds = compat.dtensor_type(), torch.Tensor
        lists = [array("Q", map(id, x)) for x in (wholes, locals_, specs, heres)]
        flags = array("q", [p.requires_grad for p in wholes[:n]])
        self.versions = array("q", bytes(8 * n))
        grads = array("Q", bytes(8 * n))
        # kept alive: a new object at one of these addresses would pass for the old one
        self._keep = wholes, locals_, specs, heres, held, kinds
        at = array("Q", bytes(16 * (len(wholes) - n)))
        self._arrays = lists, flags, tensors, grads, at
        struct = self._struct = PartRecord(
            n=n,
            all=len(wholes),
            flags=address(flags),
            spreads=address(self._specs),
            versions=address(self.versions),
            grads=address(grads),
            at=address(at),
            none=id(None),
            # CPython: a count of references, then the type
            type=object.__basicsize__ - ctypes.sizeof(ctypes.c_void_p),
            kind=id(kinds[0]),
            plain=id(kinds[1]),
            held=ctypes.addressof(held.struct),
        )
        struct.wholes, struct.locals, struct.specs, struct.heres = map(address, lists)
        struct.local, struct.spec = places
        struct.handle, struct.required = reader
        struct.gradient, struct.wrapped, struct.mode = direct
        struct.version, struct.bump = versions
        struct.functions, struct.known = tensors.structs
        self._none = [None] * n
        self._where = ctypes.addressof(struct)
        call, self._read = helper.fuseopt_parts, helper.fuseopt_parts_but_state
        for look in (call, self._read):
            look.restype = ctypes.c_int64
            look.argtypes = [ctypes.c_void_p, ctypes.py_object]
        self._bump = helper.fuseopt_parts_bump
        self._bump_gradients = helper.fuseopt_parts_bump_gradients
        for bump in (self._bump, self._bump_gradients):
            bump.restype, bump.argtypes = ctypes.c_int64, [ctypes.c_void_p]
        self._call = call
        note = helper.fuseopt_parts_note
        note.restype, note.argtypes = None, [ctypes.c_void_p]
        note(self._where)

    @property
    def works(self) -> bool:
        """Does torch have all functions that the helper calls?"""
        return self._call is not None

    def expect(self, specs: Sequence[Any]) -> None:
        """Let `compare` accept gradients with these specs, one for each parameter."""
        self._spreads = specs
        self._specs[:] = array("Q", map(id, specs))

    def compare(self) -> list[Any] | None:
        """Return the parts of gradients, or None; see the class."""
        grads = self._none.copy()
        self.found = self._call(self._where, grads)
        return None if self.found else grads

    def as_calls(self) -> tuple[Callable[[], int], list[Any], Callable[[], int]]:
        """Return `compare` and `bump` as calls of C; the first returns 0 and fills the
        list, the second returns a negative number if it cannot. The first does not
        compare where the memory of the state is: the step of the parts does.
        """
        grads = self._none.copy()
        read = functools.partial(self._read, self._where, grads)
        return read, grads, functools.partial(self._bump, self._where)

    def bump(self) -> bool:
        """Increase the versions of parameters whose parts changed since `compare`.

        Returns False if the helper cannot do it.
        """
        return not self._bump(self._where)

    def bump_gradients(self) -> bool:
        """Increase the versions of gradients; as `bump`."""
        return not self._bump_gradients(self._where)

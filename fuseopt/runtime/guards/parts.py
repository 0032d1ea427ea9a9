"""Compare the DTensors of an optimizer with those of the last call, in one C call.

As a rule only gradients are other objects in the next call, with the same specs. The
compiled helper compares the local part and the spec of each DTensor by identity and the
memory of the parts by address, and returns the parts of the gradients.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from ... import compat
from .holdings import Holdings
from .library import Parts
from .tensors import TensorGuard, address

#: Results of a look: something else than gradients changed; gradients alone did; the
#: helper cannot compare.
OTHER, GRADIENTS, UNASKED = 1, 2, 3


class PartGuard:
    """A record of DTensors, and of the dicts and lists that hold them.

    `wholes`: the DTensors, parameters first; `heres`: the tensor that is stepped in
    place of each parameter. `expect(specs)` sets the specs that gradients must have, by
    identity. `look()` returns the parts of gradients, None for a parameter without one;
    or None, and `found` says why. `versions`: of `heres`, before the step.
    """

    def __init__(
        self,
        helper: ctypes.PyDLL,
        wholes: Sequence[Any],
        heres: Sequence[torch.Tensor],
        held: Holdings,
    ) -> None:
        self.found = UNASKED
        self._n = n = len(heres)
        self._call: Any = None
        locals_ = [*map(compat.local_part, wholes)]
        places = compat.part_places()
        asked = compat.requires_grad_function([*wholes, *locals_, *heres])
        direct, versions = compat.gradient_functions(), compat.version_functions()
        tensors = TensorGuard(locals_[:n], helper)
        same = tensors.look({}, {}, tuple(locals_[:n])) == 0 and tensors.comparable
        raw = same and tensors.raw
        if not (places and asked and direct and versions and raw):
            return
        specs = [*map(compat.spec_of, wholes)]
        self._specs = array("Q", bytes(8 * n))
        kinds = compat.dtensor_type(), torch.Tensor
        lists = [array("Q", map(id, x)) for x in (wholes, locals_, specs, heres)]
        flags = array("q", [p.requires_grad for p in wholes[:n]])
        self.versions = array("q", bytes(8 * n))
        grads = array("Q", bytes(8 * n))
        # kept alive: another object at one of these addresses would pass for the first
        self._keep = wholes, locals_, specs, heres, held, kinds
        at = array("Q", bytes(16 * (len(wholes) - n)))
        self._arrays = lists, flags, tensors, grads, at
        struct = self._struct = Parts(
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
            held=held.where,
        )
        struct.wholes, struct.locals, struct.specs, struct.heres = map(address, lists)
        struct.local, struct.spec = places
        struct.handle, struct.required = asked
        struct.gradient, struct.wrapped, struct.mode = direct
        struct.version, struct.bump = versions
        struct.functions, struct.known = tensors.structs
        self._none = [None] * n
        self._where = ctypes.addressof(struct)
        call = helper.fuseopt_parts
        call.restype = ctypes.c_int64
        call.argtypes = [ctypes.c_void_p, ctypes.py_object]
        self._bump = helper.fuseopt_parts_bump
        self._bump.restype, self._bump.argtypes = ctypes.c_int64, [ctypes.c_void_p]
        self._call = call
        note = helper.fuseopt_parts_note
        note.restype, note.argtypes = None, [ctypes.c_void_p]
        note(self._where)

    @property
    def works(self) -> bool:
        """Does torch have all functions that the helper calls?"""
        return self._call is not None

    def expect(self, specs: Sequence[Any]) -> None:
        """Let `look` take gradients with these specs, one of each parameter."""
        self._spreads = specs
        self._specs[:] = array("Q", map(id, specs))

    def look(self) -> list[Any] | None:
        """See the class."""
        grads = self._none.copy()
        self.found = self._call(self._where, grads)
        return None if self.found else grads

    def bump(self) -> bool:
        """Count up the versions of parameters whose parts have changed since the last
        look; False if that cannot be done.
        """
        return not self._bump(self._where)

"""Compare facts that a call depends on, all in one C call."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

from ...compat.facts import ABSENT, ITEM, LENGTH, Fact
from .library import FactRecord


def in_c(helper: ctypes.PyDLL, facts: Sequence[Fact]) -> Callable[[], int]:
    """Return `first_untrue` of these facts as a call of C, which keeps them alive.

    A function among them that runs Python may let a signal handler run.
    """
    records = (FactRecord * len(facts))()
    for record, (kind, of, key, value) in zip(records, facts, strict=True):
        record.kind, record.of = kind, id(of)
        if kind in (ITEM, LENGTH):
            record.number = key
        else:
            record.key = id(key)
        record.value = None if value is ABSENT else id(value)
    call = helper.fuseopt_facts
    call.restype, call.argtypes = ctypes.c_int64, [ctypes.c_int64, ctypes.c_void_p]
    kept = Kept(call, len(facts), ctypes.addressof(records))
    kept.objects = records, facts
    return kept


class Kept(functools.partial[int]):
    """A partial of a function of C, with the objects that its arguments point to."""

    objects: object

"""The C++ of the guards: one library, built once, that all steps share.

tensors.h compares the tensors of a call with what is known of them (see tensors.py),
lanes.h what an optimizer holds (see lanes.py), parts.h one of DTensors (see parts.py);
launches.h starts several kernels. words.h of `tables` is in it, too.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from ...codegen import Source
from ...codegen.cpp.structs import fields
from ..tables import words

FOLDER = Path(__file__).parent
HEADERS = ("tensors", "lanes", "parts", "launches")
TEXT = "\n".join(
    [*((FOLDER / f"{name}.h").read_text("utf-8") for name in HEADERS), words.TEXT]
)
HELPER = Source("cpp", TEXT, "fuseopt_tensors", (), throws=True)


class Functions(ctypes.Structure):
    """How to ask a tensor."""

    _fields_ = fields(TEXT, "Functions")


class Known(ctypes.Structure):
    """What is known of the tensors of a call."""

    _fields_ = fields(TEXT, "Known")


class Followed(ctypes.Structure):
    """What a step follows."""

    _fields_ = fields(TEXT, "Followed")


class Held(ctypes.Structure):
    """What is known of the contents of dicts and lists."""

    _fields_ = fields(TEXT, "Held")


class Lanes(ctypes.Structure):
    """What is known of the lanes of an optimizer."""

    _fields_ = fields(TEXT, "Lanes")


class Parts(ctypes.Structure):
    """What is known of DTensors and of their parts."""

    _fields_ = fields(TEXT, "Parts")

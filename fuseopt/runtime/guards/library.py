"""C++ of the guards: one library, built once, that all steps share.

tensors.h compares the tensors of a call with a record of them (see tensors.py). lanes.h
does so for the lanes of an optimizer (see lanes.py), parts.h for its DTensors (see
parts.py). facts.h compares facts about objects (see facts.py). launches.h starts
several kernels, products.h calls several products. words.h and rows.h of `tables` are
parts of the library too.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from ...codegen import Source
from ...codegen.cpp.structs import fields
from ..tables import rows, words

FOLDER = Path(__file__).parent
HEADERS = ("tensors", "lanes", "parts", "facts", "launches", "products")
TEXT = "\n".join(
    [
        *((FOLDER / f"{name}.h").read_text("utf-8") for name in HEADERS),
        words.TEXT,
        rows.TEXT,
    ]
)
HELPER = Source("cpp", TEXT, "fuseopt_tensors", (), throws=True)


class Functions(ctypes.Structure):
    """Functions and offsets that read tensors."""

    _fields_ = fields(TEXT, "Functions")


class TensorRecord(ctypes.Structure):
    """Record of the tensors of a call."""

    _fields_ = fields(TEXT, "TensorRecord")


class ProductSeries(ctypes.Structure):
    """Products of matrices that run one after another."""

    _fields_ = fields(TEXT, "ProductSeries")


class LinkedRecord(ctypes.Structure):
    """Step whose first tensors another step compares."""

    _fields_ = fields(TEXT, "LinkedRecord")


class ContainerRecord(ctypes.Structure):
    """Record of the contents of dicts and lists."""

    _fields_ = fields(TEXT, "ContainerRecord")


class LaneRecord(ctypes.Structure):
    """Record of the lanes of an optimizer."""

    _fields_ = fields(TEXT, "LaneRecord")


class PartRecord(ctypes.Structure):
    """Record of DTensors and of their local parts."""

    _fields_ = fields(TEXT, "PartRecord")


class FactRecord(ctypes.Structure):
    """Record of a fact about an object."""

    _fields_ = fields(TEXT, "FactRecord")

"""The C++ of the guards: one library, built once, that all steps share.

tensors.h compares the tensors of a call with what is known of them (see tensors.py),
lanes.h what an optimizer holds (see lanes.py); launches.h starts several kernels.
"""

from __future__ import annotations

from ...codegen import Source
from .structs import header, structure

HEADERS = ("tensors", "lanes", "launches")
HELPER = Source(
    "cpp", "\n".join(map(header, HEADERS)), "fuseopt_tensors", (), throws=True
)
Functions = structure(header("tensors"), "Functions")
Known = structure(header("tensors"), "Known")
Lanes = structure(header("lanes"), "Lanes")

"""Open the shared libraries that torch is built of."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TypeVar

import torch

Library = TypeVar("Library", bound=ctypes.CDLL)


def torch_library(name: str, kind: type[Library]) -> Library:
    """One of torch's libraries by its stem, opened; OSError where there is none.

    Relies on where they lie beside torch's modules. `kind`: CDLL lets go of the GIL
    while a function runs, PyDLL does not.
    """
    for path in (Path(torch.__file__).parent / "lib").glob(f"{name}.*"):
        return kind(str(path))
    raise OSError(f"torch has no {name}")

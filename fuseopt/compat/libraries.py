"""Open the shared libraries of torch."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TypeVar

import torch

Library = TypeVar("Library", bound=ctypes.CDLL)


def torch_library(name: str, kind: type[Library]) -> Library:
    """Open one of torch's libraries by its stem. Raises OSError if there is none.

    Relies on their place beside torch's modules. `kind`: CDLL releases the GIL while a
    function runs, PyDLL does not.
    """
    for path in (Path(torch.__file__).parent / "lib").glob(f"{name}.*"):
        return kind(str(path))
    raise OSError(f"torch has no {name}")

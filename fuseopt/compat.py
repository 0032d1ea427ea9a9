"""All uses of torch that are not its public API. Checked with torch 2.11.0 and 2.13.0.

Each function says what it relies on, and what happens where it is missing.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch


def metadata_guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A fast `check(*tensors)`: same dtype, device, sizes and strides as these have now.

    Relies on Dynamo's TensorGuards (C++); without it, compares in Python.
    """
    if not tensors:
        return lambda: True
    try:
        from torch._C._dynamo.guards import TensorGuards

        guard = TensorGuards(
            *tensors,
            dynamic_dims_sizes=[list(t.shape) for t in tensors],
            dynamic_dims_strides=[list(t.stride()) for t in tensors],
        )
        if guard.check(*tensors):
            return guard.check  # type: ignore[no-any-return]
    except (ImportError, TypeError, AttributeError):
        pass
    expected = [_metadata(t) for t in tensors]
    return lambda *now: [_metadata(t) for t in now] == expected


def _metadata(t: torch.Tensor) -> tuple[Any, ...]:
    return (t.dtype, t.device, tuple(t.shape), t.stride())


def bump_versions(tensors: Sequence[torch.Tensor]) -> None:
    """Tell autograd that tensors were changed in place, as an ATen call would."""
    if tensors:
        torch.autograd.graph.increment_version(tensors)


class LibraryStruct(ctypes.Structure):
    """Mirrors `struct Library` of the generated C++."""

    _fields_ = [("sqrt_f32", ctypes.c_void_p), ("sqrt_f64", ctypes.c_void_p)]


@functools.cache
def vector_library() -> LibraryStruct:
    """The vector functions that eager's CPU kernels call.

    Relies on libtorch_cpu exporting MKL's names; where it does not (a build without MKL),
    eager uses correctly rounded roots, and so does generated code.
    """
    struct = LibraryStruct(None, None)
    try:
        path = next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))
        library = ctypes.CDLL(str(path))
        struct.sqrt_f32 = ctypes.cast(library.vmsSqrt, ctypes.c_void_p).value
        struct.sqrt_f64 = ctypes.cast(library.vmdSqrt, ctypes.c_void_p).value
    except (StopIteration, OSError, AttributeError):
        pass
    return struct

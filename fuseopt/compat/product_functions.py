"""C functions of libtorch that compute products of matrices on the CPU."""

from __future__ import annotations

import ctypes
import functools
from array import array

import torch

from .capability import probed
from .libraries import torch_library
from .names import Missing

#: By the op: functions of the stable C shim of AOTInductor.
_NAMES = {
    "mm": "aoti_torch_cpu_mm_out",
    "addmm": "aoti_torch_cpu_addmm_out",
    "bmm": "aoti_torch_cpu_bmm_out",
    "baddbmm": "aoti_torch_cpu_baddbmm_out",
}


@functools.cache
def _functions() -> dict[str, int] | None:
    """Return the addresses of the functions by op; None if libtorch lacks one."""
    try:
        library = torch_library("libtorch_cpu", ctypes.CDLL)
        return {
            op: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
            for op, name in _NAMES.items()
        }
    except (OSError, AttributeError):
        return None


@probed(
    "products-in-c",
    "products of small matrices are called from C, one after another",
    "each is called from Python",
)
def PRODUCTS() -> None:
    found = _functions()
    if found is None:
        raise Missing("libtorch exports no products")
    one = torch.arange(12.0, device="cpu")
    for op, address in found.items():
        shapes = ((2, 3), (3, 2)) if op in ("mm", "addmm") else None
        left, right = (
            one[:6].view(shape) for shape in shapes or ((1, 2, 3), (1, 3, 2))
        )
        add = one[:4].view(2, 2) if shapes else one[:4].view(1, 2, 2)
        out = torch.empty_like(add)
        words = array("Q", [t._cdata for t in (out, add, left, right)])
        first = words.buffer_info()[0]
        handles = [first + 8 * k for k in range(4)]
        pointer = ctypes.c_void_p
        if op in ("mm", "bmm"):
            times = ctypes.CFUNCTYPE(ctypes.c_int32, *[pointer] * 3)(address)
            error = times(handles[0], handles[2], handles[3])
            expected = left @ right
        else:
            numbers = [ctypes.c_double] * 2
            kind = ctypes.CFUNCTYPE(ctypes.c_int32, *[pointer] * 4, *numbers)
            error = kind(address)(*handles, 2.0, 3.0)
            expected = 2 * add + 3 * (left @ right)
        if error or not torch.equal(out, expected):
            raise Missing(f"{_NAMES[op]} computes something else")


def product_functions() -> dict[str, int] | None:
    """Return the addresses of C functions by op ("mm", "addmm", "bmm", "baddbmm").

    Relies on the stable C shim of AOTInductor, and on `Tensor._cdata`: a handle is the
    address of a word with it (torch 2.11 to 2.15). None without either.
    """
    return _functions() if PRODUCTS.available() else None

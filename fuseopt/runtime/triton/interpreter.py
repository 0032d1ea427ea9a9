"""Make Triton's interpreter round as a GPU does.

`interpreting()` is a context in which a kernel runs in the interpreter and gives the
bits that it would give on a device.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ...codegen.optable import DEVICE_FUNCTIONS
from ...locks import new_lock


@functools.cache
def _interpreter_lock() -> threading.Lock:
    """Return the lock of Triton's interpreter, which keeps its state in globals."""
    return new_lock()


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """Make Triton's interpreter round as a GPU does, while a kernel runs in it.

    The plain interpreter rounds an fma twice, truncates a float to make a bf16, and
    lacks the math library. That of 3.6 refuses a bound of a loop from numpy 2.4 on.
    Within the context exact parts replace these. Checked with triton 3.6.0 and 3.7.1.
    """
    import numpy as np
    from triton.language.extra import libdevice
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder

    patches = [
        (interpreter, "_patch_lang_tensor", _indexed(interpreter._patch_lang_tensor)),
        (InterpreterBuilder, "create_fma", _create_fma),
        (InterpreterBuilder, "cast_impl", _exact_cast(InterpreterBuilder.cast_impl)),
        *((libdevice, name, _library_function(name)) for name in DEVICE_FUNCTIONS),
    ]
    with _interpreter_lock():
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
        try:
            for owner, name, new in patches:
                setattr(owner, name, new)
            # a GPU does not warn of an overflow, nor of masked elements
            with np.errstate(all="ignore"):
                yield
        finally:
            for owner, name, old in before:
                setattr(owner, name, old)


def _indexed(plain: Callable[..., None]) -> Callable[..., None]:
    """Extend the interpreter's patch of tensors by the method `__index__`. A number,
    for numpy an array of one element, can then be the bound of a loop.
    """

    def patch(tensor: Any, scope: Any) -> None:
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch


def _libm(name: str, dtype: Any) -> Callable[..., Any]:
    """Return a function of the C library, over arrays of f32 or f64."""
    import numpy as np

    library = ctypes.CDLL(ctypes.util.find_library("m"))
    single = dtype == np.float32
    function = getattr(library, name + ("f" if single else ""))
    number = ctypes.c_float if single else ctypes.c_double
    arity = 3 if name == "fma" else DEVICE_FUNCTIONS[name]
    function.restype, function.argtypes = number, [number] * arity
    over = np.frompyfunc(function, arity, 1)
    return lambda *xs: np.asarray(over(*xs)).astype(dtype)


def _fma_f32(x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once.

    In double the product is exact. The sum is rounded to odd, and so can be rounded
    again, to f32, without harm.
    """
    import numpy as np

    product, z = x.astype(np.float64) * y, z.astype(np.float64)
    total = product + z
    part = total - product
    error = (product - (total - part)) + (z - part)
    bits = total.view(np.int64)
    even = (np.abs(error) > 0) & np.isfinite(error) & (bits & 1 == 0)
    odd = bits + np.where((error > 0) == (total > 0), 1, -1)
    return np.where(even, odd.view(np.float64), total).astype(np.float32)


def _create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    import numpy as np

    kind = z.data.dtype
    exact = _fma_f32 if kind == np.float32 else _libm("fma", kind)
    return type(z)(exact(x.data, y.data, z.data), z.dtype.scalar)


def _exact_cast(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return the interpreter's cast, with f32 and bf16 rounded to nearest even."""

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        import numpy as np
        import triton.language as tl

        source, wanted = src.dtype.scalar, dst_type.scalar
        if source == tl.float32 and wanted == tl.bfloat16:
            bits = src.data.view(np.uint32)
            near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            data = np.where(np.isnan(src.data), 0x7FC0, near).astype(np.uint16)
            return type(src)(data, wanted)
        if source == tl.bfloat16 and wanted == tl.float32:
            wide = src.data.astype(np.uint32) << 16
            return type(src)(wide.view(np.float32), wanted)
        return plain(self, src, dst_type)

    return cast_impl


def _library_function(name: str) -> Callable[..., Any]:
    """Return a function of the device's math library, for the interpreter's tensors."""

    def function(*xs: Any) -> Any:
        import triton.language as tl

        block = next((x for x in xs if x.type.is_block()), xs[0])
        data = _libm(name, xs[0].handle.data.dtype)(*(x.handle.data for x in xs))
        handle = type(block.handle)(data, block.dtype.scalar)
        return tl.tensor(handle, block.type)

    return function

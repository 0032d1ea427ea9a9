"""torch's type promotion for pointwise ops, and the names the IR gives to dtypes."""

from __future__ import annotations

from collections.abc import Iterable

import torch

DTYPE_NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
}
#: dtypes that only externs compute with.
OPAQUE_NAMES = {
    torch.complex128: "c128",
    torch.complex64: "c64",
    torch.complex32: "c32",
    torch.uint64: "u64",
    torch.uint32: "u32",
    torch.uint16: "u16",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e4m3fnuz: "f8e4m3z",
    torch.float8_e5m2: "f8e5m2",
    torch.float8_e5m2fnuz: "f8e5m2z",
    torch.float8_e8m0fnu: "f8e8m0",
}
#: The name of every dtype that a buffer may have.
BUFFER_NAMES = {**DTYPE_NAMES, **OPAQUE_NAMES}
NAMED_DTYPES = {name: dtype for dtype, name in BUFFER_NAMES.items()}


def _merge(a: torch.dtype | None, b: torch.dtype | None) -> torch.dtype | None:
    if a is None or b is None:
        return a if b is None else b
    return torch.promote_types(a, b)


def _combine(
    higher: torch.dtype | None, lower: torch.dtype | None
) -> torch.dtype | None:
    """A lower category changes the result only if it is of a higher kind."""
    if higher is None:
        return lower
    if higher.is_complex:
        return higher
    if higher.is_floating_point:
        if lower is not None and lower.is_complex:
            return torch.promote_types(higher, torch.complex32)
        return higher
    if higher == torch.bool or (
        lower is not None and (lower.is_floating_point or lower.is_complex)
    ):
        return _merge(higher, lower)
    return higher


def result_type(operands: Iterable[torch.Tensor | float | int | bool]) -> torch.dtype:
    """The common dtype of an op's operands, as ATen's TensorIterator computes it.

    Tensors with dimensions come before 0-d tensors, and those before Python numbers.
    """
    dims: torch.dtype | None = None
    zeros: torch.dtype | None = None
    numbers: torch.dtype | None = None
    for x in operands:
        if isinstance(x, torch.Tensor):
            if x.dim():
                dims = _merge(dims, x.dtype)
            else:
                zeros = _merge(zeros, x.dtype)
        elif isinstance(x, bool):
            numbers = _merge(numbers, torch.bool)
        elif isinstance(x, int):
            numbers = _merge(numbers, torch.int64)
        else:
            numbers = _merge(numbers, torch.get_default_dtype())
    result = _combine(dims, _combine(zeros, numbers))
    return torch.get_default_dtype() if result is None else result

"""Type promotion of torch for pointwise ops, and the IR's names of dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...ir.opcodes import ARITHMETIC, TORCH_NAMES

#: The dtype of each name that a buffer's elements may have in the IR.
NAMED_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, attribute) for name, attribute in TORCH_NAMES.items()
}
#: Names of all dtypes that a buffer may have, then of those that bodies compute with.
BUFFER_NAMES = {dtype: name for name, dtype in NAMED_DTYPES.items()}
DTYPE_NAMES = {NAMED_DTYPES[name]: name for name in ARITHMETIC}

#: The dtype of the parts of a complex number. The IR has real memory only: a complex
#: tensor is the buffer of its real view, which has one more dimension, of size 2.
PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor's memory; for a complex dtype, that of its parts."""
    return PARTS.get(dtype, dtype)


def real_layout(t: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return shape, stride and offset of a tensor; if complex, of its real view."""
    shape, stride, offset = tuple(t.shape), t.stride(), int(t.storage_offset())
    if t.dtype not in PARTS:
        return shape, stride, offset
    return (*shape, 2), (*(2 * s for s in stride), 1), 2 * offset


def by_parts(
    name: str, operands: Sequence[tuple[str, Any]], out: torch.dtype
) -> str | None:
    """Return the rule that computes a complex result part by part; None if there is
    none.

    Sums of complex tensors, and products with a real number, never mix the parts.
    """
    tensors = [x for _, x in operands if isinstance(x, torch.Tensor)]
    others = [x for _, x in operands if not isinstance(x, torch.Tensor)]
    whole = [x for x in tensors if x.dtype in PARTS]
    if out not in PARTS or any(isinstance(x, complex) for x in others):
        return None
    if name in ("copy", "neg") and len(whole) == 1:
        return name
    if name == "fill" and not tensors and others == [0]:
        return name
    if name in ("add", "sub") and len(whole) == 2 and len(operands) <= 3:
        return f"{name}_parts"
    if name in ("mul", "mul_rounded") and len(whole) == 1 and len(operands) == 2:
        if all(x.dim() == 0 for x in tensors if x.dtype not in PARTS):
            return "mul"
    return None


def _merge(a: torch.dtype | None, b: torch.dtype | None) -> torch.dtype | None:
    if a is None or b is None:
        return a if b is None else b
    return torch.promote_types(a, b)


def _combine(
    higher: torch.dtype | None, lower: torch.dtype | None
) -> torch.dtype | None:
    """Combine two categories: the lower one counts only if its kind of number is
    higher.
    """
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
    """Return the common dtype of an op's operands, as ATen's TensorIterator computes
    it.

    Tensors with dimensions have priority over 0-d tensors, and those over Python
    numbers.
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

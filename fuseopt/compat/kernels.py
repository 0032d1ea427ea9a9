"""CPU kernels of eager whose bits differ between versions of torch.

The rules of `lowering` have the bits of one of two forms. A test of eager shows which
form this torch has. A call with the other form takes another rule, if there is one, or
runs as an ATen call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from .vector_functions import has_vendor, vector_library


def _numbers(n: int, dtype: torch.dtype) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(0)
    return torch.randn(n, generator=drawn).to(dtype) * 4


def _has_two_ways(function: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Does eager compute leftover elements differently from those in whole vectors?"""
    x = _numbers(4096, torch.float32)
    parts = torch.cat([function(part.clone()) for part in torch.split(x, 31)])
    return not torch.equal(function(x), parts)


def _softshrink_keeps_its_number() -> bool:
    """Does softshrink subtract its number without rounding it to bfloat16?"""
    x = torch.tensor([0.30078125], dtype=torch.bfloat16, device="cpu")
    return bool(torch.nn.functional.softshrink(x, 0.3) != 0)


def _erf_is_of_a_library(dtype: torch.dtype) -> bool:
    """Does a library compute erf? Without MKL, erf of float32 is a polynomial."""
    return dtype != torch.float32 or has_vendor()


def _takes_the_second_zero(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
) -> bool:
    """Has the result for two zeros of different signs the second's sign, in vectors?"""
    zeros = torch.zeros(64, dtype=dtype, device="cpu")
    results = function(zeros, -zeros), function(-zeros, zeros)
    return bool(results[0].signbit().all()) and not bool(results[1].signbit().any())


def _orders_zeros(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
) -> bool:
    """Is -0 below 0 in whole vectors, and is the first of two leftover zeros taken?

    NEON does so. Its vectors of 16-bit floats have another number of elements than
    those of `Builder.tail`.
    """
    if dtype not in (torch.float32, torch.float64):
        return False
    few, many = (torch.zeros(n, dtype=dtype, device="cpu") for n in (1, 64))
    whole = [function(x, -x).signbit() for x in (many, -many)]
    left = torch.cat([function(x, -x) for x in (few, -few)]).signbit()
    alike = bool(whole[0].all()) or not whole[0].any()
    return alike and torch.equal(whole[0], whole[1]) and left.tolist() == [False, True]


def _relu_keeps_zeros(dtype: torch.dtype) -> bool:
    """Is relu of a negative zero that zero, in vectors?"""
    zeros = torch.zeros(64, dtype=dtype, device="cpu")
    return bool((-zeros).relu().signbit().all())


def _goes_by_vectors(dtype: torch.dtype, found: torch.Tensor) -> bool:
    """Is what was found in all 64 elements what vectors compute, where 16-bit floats go
    by vectors? With NEON, the rules take them one after another.
    """
    narrow = dtype in (torch.bfloat16, torch.float16)
    return not narrow or bool(found.all()) == (vector_library().vector > 16)


def _softshrink(dtype: torch.dtype) -> bool:
    """Is a small number 0, and not its product with 0, in vectors?"""
    x = torch.full((64,), -0.125, dtype=dtype, device="cpu")
    shrunk = torch.nn.functional.softshrink(x, 0.5)
    of_vectors = _goes_by_vectors(dtype, ~shrunk.signbit())
    return of_vectors and _softshrink_keeps_its_number()


def _remainder(dtype: torch.dtype) -> bool:
    """Is the remainder by a subnormal number that of Sleef, NaN, in vectors?"""
    least = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    x = torch.full((64,), 0.5, dtype=dtype, device="cpu")
    rest = torch.remainder(x, torch.full_like(x, least))
    return dtype != torch.bfloat16 or _goes_by_vectors(dtype, rest.isnan())


def _clamp(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.clamp(torch.full_like(x, -1), y)


def _clamp_min(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.clamp_min(y)


def _mm_is_a_bare_product(dtype: torch.dtype) -> bool:
    """Is a column times a row the product alone, which is not added to 0?"""
    column = torch.zeros(3, 1, dtype=dtype, device="cpu")
    row = torch.ones(1, 4, dtype=dtype, device="cpu")
    return bool((-column).mm(row).signbit().all())


#: Tests by the name of a rule, for a dtype: True if eager has the form of the rule.
FORMS: dict[str, Callable[[torch.dtype], bool]] = {
    "cosh": lambda _: _has_two_ways(torch.cosh),
    "sinh": lambda _: _has_two_ways(torch.sinh),
    "softshrink": _softshrink,
    "remainder": _remainder,
    "erf": _erf_is_of_a_library,
    "mm": _mm_is_a_bare_product,
    "relu": _relu_keeps_zeros,
    "maximum": functools.partial(_takes_the_second_zero, torch.maximum),
    "minimum": functools.partial(_takes_the_second_zero, torch.minimum),
    "clamp of tensors": functools.partial(_takes_the_second_zero, _clamp),
    "clamp_min of tensors": functools.partial(_takes_the_second_zero, _clamp_min),
    "clamp_max of tensors": functools.partial(_takes_the_second_zero, _clamp),
}

#: Rules of two tensors that have the other form, with a test of eager.
OTHERS: dict[str, tuple[str, Callable[[torch.dtype], bool]]] = {
    "maximum": (
        "maximum_of_ordered_zeros",
        functools.partial(_orders_zeros, torch.maximum),
    ),
    "minimum": (
        "minimum_of_ordered_zeros",
        functools.partial(_orders_zeros, torch.minimum),
    ),
}


@functools.cache
def is_as_ruled(name: str, dtype: torch.dtype | None, n_tensors: int = 1) -> bool:
    """Does this torch's kernel of an op have the form of the rule with that name?

    `dtype`: that of its first tensor; `n_tensors`: the number of its tensors.
    """
    form = FORMS.get(f"{name} of tensors" if n_tensors > 1 else name) or FORMS.get(name)
    if form is None or dtype is None or not dtype.is_floating_point:
        return True
    return form(dtype)


@functools.cache
def rule_of_form(name: str, dtype: torch.dtype | None, n_tensors: int = 1) -> str:
    """Return the rule that has the form of this torch's kernel of an op, "" for none.

    The arguments are those of `is_as_ruled`.
    """
    if is_as_ruled(name, dtype, n_tensors):
        return name
    if n_tensors == 2 and dtype is not None and name in OTHERS:
        other, has_its_form = OTHERS[name]
        return other if has_its_form(dtype) else ""
    return ""

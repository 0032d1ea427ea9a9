"""Numbers by which a probe distinguishes the ways to compute a product.

Each function returns a Fill, which writes the numbers of one round.
"""

from __future__ import annotations

import torch

from .matrix_rows import Fill, Numbers


def cancelling(numbers: Numbers, inner: int, operands: int) -> Fill:
    """Return terms of all sizes, each with both signs, at random places. Their sum has
    only the errors of its order's roundings.
    """
    order = torch.randperm(inner, generator=numbers.generator)
    half = inner // 2
    one, other, left = order[:half], order[half : 2 * half], order[2 * half :]

    def fill(t: torch.Tensor, k: int, row: int) -> None:
        t.copy_(numbers.window(numbers.spread, t.shape))
        if k == operands - 2:
            t[..., other] = -t[..., one]
            if half:
                t[..., left] = 0.0
        elif k == operands - 1:
            t[..., other, :] = t[..., one, :]
        else:
            t.mul_(2**-10)

    return fill


def normal(numbers: Numbers) -> Fill:
    """Return normal numbers."""

    def fill(t: torch.Tensor, k: int, row: int) -> None:
        t.copy_(numbers.window(numbers.normal, t.shape))

    return fill


def every_other(numbers: Numbers, odd: int) -> Fill:
    """Return NaN in every second row, which must not reach the rows beside it."""

    def fill(t: torch.Tensor, k: int, row: int) -> None:
        if row >= 0 and row % 2 == odd:
            t.fill_(float("nan"))
        else:
            t.copy_(numbers.window(numbers.normal, t.shape))

    return fill


def denormal(numbers: Numbers) -> Fill:
    """Return numbers whose products are the smallest denormals."""

    def fill(t: torch.Tensor, k: int, row: int) -> None:
        small = torch.finfo(t.dtype).tiny ** 0.5 * 2**-4
        t.copy_(numbers.window(numbers.normal, t.shape) * small)

    return fill


def overflowing(numbers: Numbers) -> Fill:
    """Return numbers whose products are the largest numbers, or overflow.

    A rounding of each product gives infinities of both signs, and so NaN.
    """

    def fill(t: torch.Tensor, k: int, row: int) -> None:
        large = torch.finfo(t.dtype).max ** 0.5
        t.copy_(numbers.window(numbers.normal, t.shape) * large)

    return fill


def vanishing(numbers: Numbers, operands: int, turn: int) -> Fill:
    """Return terms that are zeros, or round to zeros, of both signs.

    All results are zeros. Their signs depend on how a sum begins, on what is added to
    it, and on which matrix is scaled.
    """

    def fill(t: torch.Tensor, k: int, row: int) -> None:
        t.copy_(numbers.window(numbers.normal, t.shape) * torch.finfo(t.dtype).tiny)
        if k == operands - 2:
            t.copy_(-t.abs())
            t[..., turn::3, :] = 0.0
            t[..., turn + 1 :: 3, :] = -0.0
        elif k == operands - 1:
            t[..., ::2] = t[..., ::2].abs()
        else:
            t.mul_(0.0)

    return fill


def special(numbers: Numbers) -> Fill:
    """Return zeros of both signs, infinities, NaN, largest numbers, and others."""

    def fill(t: torch.Tensor, k: int, row: int) -> None:
        most = torch.finfo(t.dtype).max
        special = (0.0, -0.0, 0.0, float("inf"), float("nan"), most, -most, 1.0)
        kinds = numbers.window(numbers.kinds, t.shape)
        t.copy_(numbers.window(numbers.normal, t.shape))
        for number, kind in enumerate(special):
            t[kinds == number] = kind

    return fill

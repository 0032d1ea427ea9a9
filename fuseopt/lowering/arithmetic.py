"""Sums, products, powers, roots and bounds, contracted as eager contracts them."""

from __future__ import annotations

from ..ir.graph import FLOATS
from .builder import Builder
from .functions import in_vectors, loop


def add(b: Builder, x: int, y: int, alpha: int | None = None) -> int:
    """x + alpha * y; of bools, x or y."""
    if b.compute == "b8":
        return b.op("or", x, y if alpha is None else b.op("and", y, alpha))
    if alpha is None or b.is_number(alpha, 1):
        return b.op("add", x, y)
    if b.compute in FLOATS:
        # for bf16 and f16 the vector loop rounds once; the leftover elements round
        # twice
        leftover = b.op("add", x, b.rounded(b.op("mul", y, alpha)))
        body = b.op("fma", y, alpha, x)
        return b.tail(leftover, body) if b.common != b.compute else body
    return b.op("add", x, b.op("mul", y, alpha))


def sub(b: Builder, x: int, y: int, alpha: int | None = None) -> int:
    """x - alpha * y, as eager adds -alpha * y."""
    if alpha is None or b.is_number(alpha, 1):
        return b.op("sub", x, y)
    # eager calls add with -alpha
    return add(b, x, y, b.op("neg", alpha))


def rsub(b: Builder, x: int, y: int, alpha: int | None = None) -> int:
    """y - alpha * x."""
    return sub(b, y, x, alpha)


def add_parts(b: Builder, x: int, y: int, alpha: int | None = None) -> int:
    """Add parts of complex numbers: eager rounds the product, then the sum."""
    return b.op("add", x, y if alpha is None else b.op("mul", y, alpha))


def sub_parts(b: Builder, x: int, y: int, alpha: int | None = None) -> int:
    """x - alpha * y of the parts of complex numbers."""
    if alpha is None:
        return b.op("sub", x, y)
    return add_parts(b, x, y, b.op("neg", alpha))


def mul(b: Builder, x: int, y: int) -> int:
    """x * y; of bools, x and y."""
    return b.op("and" if b.compute == "b8" else "mul", x, y)


def div(b: Builder, x: int, y: int) -> int:
    """x / y; by a number, on a GPU, x times the inverse, which is taken in float64."""
    if b.on_gpu and b.is_given(y) and b.compute in FLOATS:
        wide = b.op("div", b.const(1.0, "f64"), b.unrounded(y), dtype="f64")
        return b.op("mul", x, b.cast(wide, b.compute))
    return b.op("div", x, y)


def addcmul(b: Builder, x: int, s: int, t: int, value: int | None = None) -> int:
    """fma(value * s, t, x); on a GPU fma(s * t, value, x)."""
    if value is not None and not b.is_number(value, 1):
        if b.on_gpu:
            return b.op("fma", b.op("mul", s, t), value, x)
        s = b.op("mul", value, s)
    return b.op("fma", s, t, x)


def addcdiv(b: Builder, x: int, s: int, t: int, value: int | None = None) -> int:
    """x + (value * s) / t; on a GPU fma(s / t, value, x)."""
    if value is not None and not b.is_number(value, 1):
        if b.on_gpu:
            return b.op("fma", b.op("div", s, t), value, x)
        s = b.op("mul", value, s)
    return b.op("add", x, b.op("div", s, t))


def lerp(b: Builder, start: int, end: int, weight: int) -> int:
    """`|w| < 0.5 ? fma(w, end - start, start) : fma(w - 1, end - start, end)`."""
    one = b.const(1.0)
    low = b.compare("lt", b.op("abs", weight), b.const(0.5))
    factor = b.op("where", low, weight, b.op("sub", weight, one))
    base = b.op("where", low, start, end)
    return b.op("fma", factor, b.op("sub", end, start), base)


def pow(b: Builder, x: int, y: int) -> int | None:
    """Compute a power: products for small exponents, else a function."""
    exponent = b.numbers.get(y)
    if b.is_int():
        return integer_power(b, x, exponent)
    if exponent is not None and x not in b.numbers:
        if b.common == "f16" and abs(exponent) == 0.5:
            # eager calls pow for float16, whose roots of -0 and -inf are 0 and inf
            finite = b.compare("eq", b.op("sub", x, x), b.const(0.0))
            x = b.op("where", finite, b.op("add", x, b.const(0.0)), b.op("abs", x))
        if exponent == 2:
            return b.op("mul", x, x)
        if exponent == 3:
            square = b.op("mul", x, x)
            return b.op("mul", b.rounded(square) if b.common == "bf16" else square, x)
        if exponent == 0.5:
            return sqrt(b, x)
        if exponent == 1:
            return x
        if exponent == -1:
            return b.op("div", b.const(1.0), x)
        if exponent == -2:
            square = b.op("mul", x, x)
            square = b.rounded(square) if b.common == "bf16" else square
            return b.op("div", b.const(1.0), square)
        if exponent == -0.5:
            twice = 2 if b.common == "bf16" else None
            return rsqrt(b, x, twice) if b.common != "f16" else inverse_sqrt(b, x)
        if b.common == "f32" and not b.on_gpu:
            # eager computes the power in double, like the exponent, except in its
            # vector loop
            wide = b.cast(x, "f64"), b.emit(b.instrs[y]._replace(dtype="f64"))
            plain = b.cast(b.op("pow", *wide, dtype="f64"), "f32")
            return in_vectors(b, plain, "pow", x, y)
    return loop("pow")(b, x, y)


def integer_power(b: Builder, x: int, exponent: float | None) -> int | None:
    """Compute a power as products, if the exponent is 1, 2 or 3."""
    if exponent not in (1, 2, 3) or x in b.numbers:
        return None
    result = x
    for _ in range(int(exponent) - 1):
        result = b.op("mul", result, x)
    return result


def sign(b: Builder, x: int) -> int:
    """-1, 0 or 1; 0 of NaN."""
    if b.compute == "b8":
        return x
    zero, one = b.const(0.0), b.const(1.0)
    below = b.op("where", b.compare("lt", x, zero), b.op("neg", one), zero)
    return b.op("where", b.compare("lt", zero, x), one, below)


def clamp(b: Builder, x: int, low: int | None = None, high: int | None = None) -> int:
    """Clamp x. A NaN, or an x equal to the bound, stays x; tensor bounds spread their
    NaN.
    """
    if low is not None:
        number = low in b.numbers
        x = (
            b.op("where", b.compare("lt", x, low), low, x)
            if number
            else b.op("max", x, low)
        )
    if high is not None:
        number = high in b.numbers
        x = (
            b.op("where", b.compare("lt", high, x), high, x)
            if number
            else b.op("min", x, high)
        )
    return x


def clamp_max(b: Builder, x: int, high: int) -> int:
    """Return the smaller of x and high."""
    return clamp(b, x, None, high)


def sqrt(b: Builder, x: int) -> int:
    """Compute a root; for f32 and f64 on a CPU, eager uses a vector library."""
    return b.op(
        "vsqrt" if b.vector_library and b.common in ("f32", "f64") else "sqrt", x
    )


def reciprocal(b: Builder, x: int) -> int:
    """1 / x."""
    return b.op("div", b.const(1.0), x)


def inverse_sqrt(b: Builder, x: int) -> int:
    """Compute 1 / sqrt(x), both with IEEE rounding."""
    return b.op("div", b.const(1.0), b.op("sqrt", x))


def rsqrt(b: Builder, x: int, size: int | None = None) -> int:
    """Compute 1 / sqrt(x); leftover 16-bit elements are rounded twice."""
    leftover = b.op("div", b.const(1.0), b.rounded(b.op("sqrt", x)))
    return b.tail(leftover, inverse_sqrt(b, x), size)

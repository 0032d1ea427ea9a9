"""Division to whole numbers, and its remainders."""

from __future__ import annotations

from ..ir.graph import AVX2, DTYPE_BYTES
from .builder import Builder
from .functions import in_vectors
from .select import copysign


def not_zero(b: Builder, y: int) -> int:
    """Replace a zero divisor by 1, since a processor traps; eager raises an error."""
    return b.op("where", b.compare("eq", y, b.const(0)), b.const(1), y)


def integer_quotient(b: Builder, x: int, y: int) -> tuple[int, int, int] | None:
    """Return divisor, truncated quotient and remainder; None where y may be zero."""
    if y not in b.numbers or x in b.numbers:
        return None
    y = not_zero(b, y)
    quotient = b.op("div", x, y)
    return y, quotient, b.op("sub", x, b.op("mul", quotient, y))


def other_side(b: Builder, rest: int, y: int) -> int:
    """Test for a nonzero remainder whose sign differs from the divisor's."""
    zero = b.const(0)
    above, below = b.compare("lt", zero, rest), b.compare("lt", rest, zero)
    return b.op("where", b.compare("lt", y, zero), above, below, dtype="b8")


def div_trunc(b: Builder, x: int, y: int) -> int | None:
    """Compute x / y without its fraction."""
    if not b.is_int():
        quotient = b.op("div", x, y)
        # eager computes in float32 throughout, if one number divides all
        return b.op("trunc", quotient if y in b.shared else b.rounded(quotient))
    integer = integer_quotient(b, x, y)
    return integer and integer[1]


def div_floor(b: Builder, x: int, y: int) -> int | None:
    """Compute Python's floor division: the quotient of x - fmod(x, y), rounded to
    whole.
    """
    if b.is_int():
        integer = integer_quotient(b, x, y)
        if integer is None:
            return None
        y, quotient, rest = integer
        less = b.op("sub", quotient, b.const(1))
        return b.op("where", other_side(b, rest, y), less, quotient)
    zero, one = b.const(0.0), b.const(1.0)

    def kept(value: int) -> int:
        # eager rounds each intermediate result, except if one number divides all
        return value if y in b.shared else b.rounded(value)

    plain = kept(b.op("div", x, y))
    rest = b.op("fmod", x, y)
    quotient = kept(b.op("div", kept(b.op("sub", x, rest)), y))
    less = kept(b.op("sub", quotient, one))
    quotient = b.op("where", other_side(b, rest, y), less, quotient)
    whole = b.op("floor", quotient)
    over = kept(b.op("sub", quotient, whole))
    near = b.compare("lt", b.const(0.5), over)
    whole = b.op("where", near, kept(b.op("add", whole, one)), whole)
    signed = copysign(b, zero, plain)
    whole = b.op("where", b.compare("eq", quotient, zero), signed, whole)
    return b.op("where", b.compare("eq", y, zero), plain, whole)


def float_fmod(b: Builder, x: int, y: int) -> int:
    """Compute Sleef's fmod in vectors (NaN for some subnormal y), then C's."""
    size = AVX2 + DTYPE_BYTES[b.common]
    return in_vectors(b, b.op("fmod", x, y), "fmod", x, y, size=size)


def remainder(b: Builder, x: int, y: int) -> int | None:
    """Compute the remainder with the sign of the divisor."""
    if b.is_int():
        quotient = integer_quotient(b, x, y)
        if quotient is None:
            return None
        y, _, rest = quotient
    else:
        rest = float_fmod(b, x, y)
    return b.op("where", other_side(b, rest, y), b.op("add", rest, y), rest)


def fmod(b: Builder, x: int, y: int) -> int | None:
    """Compute the remainder with the sign of the dividend."""
    if not b.is_int():
        return float_fmod(b, x, y)
    quotient = integer_quotient(b, x, y)
    return quotient and quotient[2]


def frac(b: Builder, x: int) -> int:
    """x - trunc(x)."""
    return b.op("sub", x, x if b.is_int() else b.op("trunc", x))

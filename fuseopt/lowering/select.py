"""Comparisons, selections, and operations on the bits of numbers."""

from __future__ import annotations

from ..ir.graph import AVX2, DTYPE_BYTES
from .builder import Builder, Rule

#: The largest finite number of a type.
LARGEST = {
    "f64": float.fromhex("0x1.fffffffffffffp+1023"),
    "f32": float.fromhex("0x1.fffffep+127"),
    "bf16": float.fromhex("0x1.fep+127"),
    "f16": 65504.0,
}


def where(b: Builder, mask: int, x: int, y: int) -> int:
    """x where the mask is true, else y."""
    return b.op("where", mask, x, y)


def plain(op: str) -> Rule:
    """Make the rule of an op that is one instruction."""
    return lambda b, *args: b.op(op, *args)


def whole(op: str) -> Rule:
    """Make the rule of a rounding to whole numbers; integers stay unchanged."""
    return lambda b, x: x if b.is_int() else b.op(op, x)


def comparison(op: str, swap: bool = False) -> Rule:
    """Make the rule of a comparison of x and y."""

    def rule(b: Builder, x: int, y: int) -> int:
        return b.compare(op, y, x) if swap else b.compare(op, x, y)

    return rule


def logical(op: str) -> Rule:
    """Make the rule of a logical op; nonzero operands count as true."""

    def rule(b: Builder, *args: int) -> int:
        zero = b.const(0.0)
        masks = [
            a if b.instrs[a].dtype == "b8" else b.compare("ne", a, zero) for a in args
        ]
        return b.op(op, *masks, dtype="b8")

    return rule


def identity(b: Builder, x: int) -> int:
    """Return x itself."""
    return x


def bitwise(op: str) -> Rule:
    """Make the rule of an operation on the bits of integers."""

    def rule(b: Builder, *args: int) -> int | None:
        return b.op(op, *args) if b.is_int() else None

    return rule


def shift(op: str) -> Rule:
    """Make the rule of a shift; a negative or too large shift leaves no digit."""

    def rule(b: Builder, x: int, y: int) -> int | None:
        if not b.is_int() or b.compute == "b8":
            return None
        bits = 8 * DTYPE_BYTES[b.compute]
        last = b.const(bits - 1)
        legal = b.compare("le", y, last)
        if b.compute != "u8":
            legal = b.both(legal, b.compare("le", b.const(0), y))
        zero = b.const(0)
        shifted = b.op(op, x, b.op("where", legal, y, zero))
        if op == "shl" or b.compute == "u8":
            return b.op("where", legal, shifted, zero)
        return b.op("where", legal, shifted, b.op(op, x, last))

    return rule


def sign_bit(b: Builder, x: int) -> int:
    """Test the sign bit of x, also of zero and NaN."""
    if b.is_int():
        return b.compare("lt", x, b.const(0))
    whole = "i64" if b.compute == "f64" else "i32"
    bits = b.op("bitcast", x, dtype=whole)
    return b.compare("lt", bits, b.const(0, whole))


def copysign(b: Builder, x: int, y: int) -> int:
    """The size of x with the sign of y."""
    size = b.op("abs", x)
    return b.op("where", sign_bit(b, y), b.op("neg", size), size)


def is_infinite(b: Builder, x: int) -> int:
    """Test whether x is infinite."""
    if b.is_int():
        return b.const(0, "b8")
    return b.compare("eq", b.op("abs", x), b.const(float("inf")))


def nextafter(b: Builder, x: int, y: int) -> int | None:
    """Return the float next to x towards y; None for 16-bit floats (an extern)."""
    return None if b.narrow() else b.op("nextafter", x, y)


def masked_fill(b: Builder, x: int, mask: int, value: int) -> int:
    """value where the mask is true, else x."""
    return b.op("where", mask, value, x)


def heaviside(b: Builder, x: int, y: int) -> int:
    """0 below zero, 1 above it, y at zero."""
    zero = b.const(0)
    above = b.cast(b.compare("lt", zero, x), b.compute)
    return b.op("where", b.compare("eq", x, zero), y, above)


def threshold(b: Builder, x: int, threshold: int, value: int) -> int:
    """value up to the threshold, x above it."""
    return b.op("where", b.compare("le", x, threshold), value, x)


def hardshrink(b: Builder, x: int, most: int) -> int:
    """Return 0 where |x| <= `most`, else x."""
    least = b.op("neg", most)
    above = b.op("where", b.compare("le", x, most), b.const(0), x)
    return b.op("where", b.compare("le", least, x), above, x)


def softshrink(b: Builder, x: int, most: int) -> int:
    """Move x towards 0 by `most`, and no further; NaN stays.

    This is the proximal map of `most` times the 1-norm. Between the bounds, eager's
    vectorized loops give 0; leftover elements are a product with 0, which keeps the
    sign.
    """
    least = b.op("neg", most)
    vector = b.op("where", b.compare("eq", x, x), b.const(0), x)
    within = vector
    if not b.on_gpu:
        leftover = b.op("mul", x, b.const(0))
        within = b.tail(leftover, vector, AVX2 + DTYPE_BYTES[b.common])
    below = b.op("where", b.compare("lt", x, least), b.op("add", x, most), within)
    return b.op("where", b.compare("lt", most, x), b.op("sub", x, most), below)


def of_ordered_zeros(op: str) -> Rule:
    """Make the rule of "max" or "min" where -0 is below 0, as NEON has it.

    Of two zeros left over after the whole vectors, eager takes the first.
    """

    def rule(b: Builder, x: int, y: int) -> int:
        result = b.op(op, x, y)
        if b.on_gpu:
            return result
        # 0 + -0 is 0
        sign = (lambda z: z) if op == "max" else (lambda z: b.op("neg", z))
        zero = sign(b.op("add", sign(x), sign(y)))
        zeros = [b.compare("eq", z, b.const(0)) for z in (x, y)]
        within = b.tail(x, zero, DTYPE_BYTES[b.common])
        return b.op("where", b.both(*zeros), within, result)

    return rule


def leaky_relu(b: Builder, x: int, slope: int) -> int:
    """x above zero, else x * slope."""
    above = b.compare("lt", b.const(0), x)
    return b.op("where", above, x, b.op("mul", x, slope))


def nan_to_num(
    b: Builder,
    x: int,
    nan: int | None = None,
    above: int | None = None,
    below: int | None = None,
) -> int:
    """Replace NaN and the infinities in x by numbers."""
    if b.is_int():
        return x
    largest, infinity = LARGEST[b.common], float("inf")
    result = x
    for value, number, default in (
        (infinity, above, largest),
        (-infinity, below, -largest),
    ):
        other = b.const(default) if number is None else number
        is_value = b.compare("eq", x, b.const(value))
        result = b.op("where", is_value, other, result)
    other = b.const(0.0) if nan is None else nan
    return b.op("where", b.compare("ne", x, x), other, result)

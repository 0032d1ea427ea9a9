"""The arithmetic of ATen's pointwise operations, as functions that write instructions.

A rule takes a `Builder` and the instructions of its operands, already in the type eager
computes in, and returns that of the result, not rounded to the type it is stored in;
None where it does not cover a type. `lowering.RULES` gives the rule of each ATen name.

The formulas were found by comparing bits with eager over random data (torch 2.13, AVX2
and AVX-512): where eager's compiler contracted a product and a sum, the rule says
`fma`; where it did not, it says `mul` and `add`.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import pack, unpack

from .ir import DTYPE_BYTES, FLOATS, Instr

#: The largest finite number of a type.
LARGEST = {
    "f64": float.fromhex("0x1.fffffffffffffp+1023"),
    "f32": float.fromhex("0x1.fffffep+127"),
    "bf16": float.fromhex("0x1.fep+127"),
    "f16": 65504.0,
}

#: Those it takes from Sleef for every element of a tensor.
MAPPED = ("expm1", "log1p", "lgamma")
#: Those it takes from Sleef in vectorized loops, and from C's library in what is left.
LOOPS = ("exp2", "sinh", "cosh", "atanh", "atan2", "hypot")


def single(value: float) -> float:
    """The float32 nearest to a number."""
    return float(unpack("f", pack("f", value))[0])


class Builder:
    """Collects the instructions of one body, reusing those that are equal.

    `single`: the operands are numbers without dimensions, which no vector holds.
    """

    def __init__(
        self, common: str, compute: str, vector_library: bool, single: bool = False
    ) -> None:
        self.single = single
        self.common = common
        self.compute = compute
        self.vector_library = vector_library
        self.instrs: list[Instr] = []
        self.known: dict[Instr, int] = {}
        self.numbers: dict[int, float | None] = {}
        #: operands that are one number for all elements, written or without dimensions
        self.shared: set[int] = set()

    def emit(self, instr: Instr) -> int:
        if instr not in self.known:
            self.known[instr] = len(self.instrs)
            self.instrs.append(instr)
        return self.known[instr]

    def op(self, op: str, *args: int, dtype: str | None = None) -> int:
        return self.emit(Instr(op, args, dtype or self.compute))

    def const(self, value: float, dtype: str | None = None) -> int:
        return self.emit(Instr("const", (), dtype or self.compute, value))

    def zero(self) -> int:
        """The number 0, as an operand that stood in the call."""
        x = self.const(0.0)
        self.numbers[x] = 0.0
        return x

    def cast(self, x: int, dtype: str) -> int:
        return x if self.instrs[x].dtype == dtype else self.op("cast", x, dtype=dtype)

    def is_number(self, x: int, value: float) -> bool:
        """Was operand x written in the graph as exactly this number?"""
        return self.numbers.get(x) == value

    def rounded(self, x: int) -> int:
        """x as a tensor of the common dtype would hold it."""
        return self.cast(self.cast(x, self.common), self.compute)

    def tail(self, tail: int, body: int, size: int | None = None) -> int:
        """`tail` where eager's vectorized loop has ended, `body` inside it.

        `size`: bytes of an element, where the loop takes two vectors of the processor
        at a time; None where it takes 32 elements.
        """
        if tail == body or self.single:
            return tail
        return self.op("where", self.emit(Instr("tail", (), "b8", size)), tail, body)

    def narrow(self) -> bool:
        """Is this computed in float32 and stored in 16 bits?"""
        return self.common != self.compute

    def is_int(self) -> bool:
        return self.compute not in FLOATS

    def both(self, *masks: int) -> int:
        return self.op("and", *masks, dtype="b8")

    def compare(self, op: str, x: int, y: int) -> int:
        return self.op(op, x, y, dtype="b8")


Rule = Callable[..., int | None]


def add(b: Builder, x: int, y: int, alpha: int | None = None) -> int:
    """x + alpha * y; of bools, x or y."""
    if b.compute == "b8":
        return b.op("or", x, y if alpha is None else b.op("and", y, alpha))
    if alpha is None or b.is_number(alpha, 1):
        return b.op("add", x, y)
    if b.compute in FLOATS:
        # for bf16 and f16 the vector loop rounds once, what it leaves over rounds twice
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
    """Eager multiplies complex numbers first, and then adds: two roundings."""
    return b.op("add", x, y if alpha is None else b.op("mul", y, alpha))


def sub_parts(b: Builder, x: int, y: int, alpha: int | None = None) -> int:
    """x - alpha * y of the parts of complex numbers."""
    if alpha is None:
        return b.op("sub", x, y)
    return add_parts(b, x, y, b.op("neg", alpha))


def mul(b: Builder, x: int, y: int) -> int:
    """x * y; of bools, x and y."""
    return b.op("and" if b.compute == "b8" else "mul", x, y)


def addcmul(b: Builder, x: int, s: int, t: int, value: int | None = None) -> int:
    """fma(value * s, t, x)."""
    if value is not None and not b.is_number(value, 1):
        s = b.op("mul", value, s)
    return b.op("fma", s, t, x)


def addcdiv(b: Builder, x: int, s: int, t: int, value: int | None = None) -> int:
    """x + (value * s) / t."""
    if value is not None and not b.is_number(value, 1):
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
    """A power: products for small exponents, else a function."""
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
        if b.common == "f32":
            # eager takes the power in double, the exponent being one, but in its
            # vector loop
            wide = b.cast(x, "f64"), b.emit(b.instrs[y]._replace(dtype="f64"))
            plain = b.cast(b.op("pow", *wide, dtype="f64"), "f32")
            return in_vectors(b, plain, "pow", x, y)
    return loop("pow")(b, x, y)


def integer_power(b: Builder, x: int, exponent: float | None) -> int | None:
    """A product, where the exponent is a small number."""
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
    """A NaN, or an x equal to the bound, stays x; tensor bounds spread their NaN."""
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
    """The smaller of x and high."""
    return clamp(b, x, None, high)


def sqrt(b: Builder, x: int) -> int:
    """Eager takes the roots of f32 and f64 from a vector library, on a CPU."""
    return b.op(
        "vsqrt" if b.vector_library and b.common in ("f32", "f64") else "sqrt", x
    )


def reciprocal(b: Builder, x: int) -> int:
    """1 / x."""
    return b.op("div", b.const(1.0), x)


def inverse_sqrt(b: Builder, x: int) -> int:
    """1 / sqrt(x), both as IEEE rounds."""
    return b.op("div", b.const(1.0), b.op("sqrt", x))


def rsqrt(b: Builder, x: int, size: int | None = None) -> int:
    """1 / sqrt(x); of 16-bit floats, what loops leave over is rounded twice."""
    leftover = b.op("div", b.const(1.0), b.rounded(b.op("sqrt", x)))
    return b.tail(leftover, inverse_sqrt(b, x), size)


def in_vectors(b: Builder, plain: int, function: str, *args: int) -> int:
    """Sleef's function where eager's loop has whole vectors, `plain` in what is left.

    Of 16-bit floats too few numbers differ to tell the two apart.
    """
    if not b.vector_library or b.single:
        return plain
    vector = b.op(f"sleef_{function}", *args)
    return vector if b.narrow() else b.tail(plain, vector, DTYPE_BYTES[b.compute])


def loop(function: str) -> Callable[..., int]:
    """A function of eager's vectorized loops."""

    def rule(b: Builder, *args: int) -> int:
        return in_vectors(b, b.op(function, *args), function, *args)

    return rule


def mapped(function: str) -> Rule:
    """A function that eager takes from Sleef for every element, left over or not."""

    def rule(b: Builder, x: int) -> int:
        return b.op(f"sleef_{function}" if b.vector_library else function, x)

    return rule


def library(function: str) -> Callable[..., int]:
    """A function of a vector library on f32 and f64, of Sleef on 16-bit floats."""

    def rule(b: Builder, x: int) -> int:
        if not b.vector_library:
            return b.op(function, x)
        return b.op(f"{'sleef_' if b.narrow() else 'v'}{function}", x)

    return rule


def erf(b: Builder, x: int) -> int:
    """As the library has it; of 16-bit floats a polynomial (Abramowitz and Stegun)."""
    if not b.vector_library or not b.narrow():
        return library("erf")(b, x)
    size, one = b.op("abs", x), b.const(1.0)
    t = b.op("div", one, b.op("fma", b.const(single(0.3275911)), size, one))
    factors = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
    series = b.const(single(factors[0]))
    for factor in factors[1:]:
        series = b.op("fma", series, t, b.const(single(factor)))
    bell = b.op("neg", b.op("sleef_exp", b.op("neg", b.op("mul", x, x))))
    value = b.op("fma", b.op("mul", bell, t), series, one)
    return b.op("where", sign_bit(b, x), b.op("neg", value), value)


def over_exp(b: Builder, top: int, x: int) -> int:
    """top / (1 + exp(-x))."""
    one, minus = b.const(1.0), b.op("neg", x)
    made = []
    for function in ("exp", "sleef_exp"):
        made.append(b.op("div", top, b.op("add", one, b.op(function, minus))))
    plain, vector = made
    if not b.vector_library:
        return plain
    return vector if b.narrow() else b.tail(plain, vector, DTYPE_BYTES[b.compute])


def sigmoid(b: Builder, x: int) -> int:
    """1 / (1 + exp(-x))."""
    return over_exp(b, b.const(1.0), x)


def silu(b: Builder, x: int) -> int:
    """x / (1 + exp(-x))."""
    return over_exp(b, x, x)


def where(b: Builder, mask: int, x: int, y: int) -> int:
    """x where the mask is true, else y."""
    return b.op("where", mask, x, y)


def plain(op: str) -> Rule:
    """An op that is one instruction."""
    return lambda b, *args: b.op(op, *args)


def whole(op: str) -> Rule:
    """A rounding to whole numbers, which integers are."""
    return lambda b, x: x if b.is_int() else b.op(op, x)


def comparison(op: str, swap: bool = False) -> Rule:
    """A comparison of x and y."""

    def rule(b: Builder, x: int, y: int) -> int:
        return b.compare(op, y, x) if swap else b.compare(op, x, y)

    return rule


def logical(op: str) -> Rule:
    """Operands count as true where they are not zero."""

    def rule(b: Builder, *args: int) -> int:
        zero = b.const(0.0)
        masks = [
            a if b.instrs[a].dtype == "b8" else b.compare("ne", a, zero) for a in args
        ]
        return b.op(op, *masks, dtype="b8")

    return rule


def identity(b: Builder, x: int) -> int:
    """x itself."""
    return x


# ---------------------------------------------------------------- division


def not_zero(b: Builder, y: int) -> int:
    """A divisor that a processor does not stop at; eager raises an error."""
    return b.op("where", b.compare("eq", y, b.const(0)), b.const(1), y)


def integer_quotient(b: Builder, x: int, y: int) -> tuple[int, int, int] | None:
    """The divisor, the quotient cut off, and the rest; None where y may be zero."""
    if y not in b.numbers or x in b.numbers:
        return None
    y = not_zero(b, y)
    quotient = b.op("div", x, y)
    return y, quotient, b.op("sub", x, b.op("mul", quotient, y))


def other_side(b: Builder, rest: int, y: int) -> int:
    """Is a rest not zero, and of the other sign than the divisor?"""
    zero = b.const(0)
    above, below = b.compare("lt", zero, rest), b.compare("lt", rest, zero)
    return b.op("where", b.compare("lt", y, zero), above, below, dtype="b8")


def div_trunc(b: Builder, x: int, y: int) -> int | None:
    """x / y without its fraction."""
    if not b.is_int():
        quotient = b.op("div", x, y)
        # eager computes in float32 throughout, if one number divides all
        return b.op("trunc", quotient if y in b.shared else b.rounded(quotient))
    made = integer_quotient(b, x, y)
    return made and made[1]


def div_floor(b: Builder, x: int, y: int) -> int | None:
    """As Python does it: the quotient of what fmod leaves, made whole."""
    if b.is_int():
        made = integer_quotient(b, x, y)
        if made is None:
            return None
        y, quotient, rest = made
        less = b.op("sub", quotient, b.const(1))
        return b.op("where", other_side(b, rest, y), less, quotient)
    zero, one = b.const(0.0), b.const(1.0)

    def kept(value: int) -> int:
        # eager rounds all on the way, but where one number divides all
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


def remainder(b: Builder, x: int, y: int) -> int | None:
    """With the sign of the divisor."""
    if b.is_int():
        made = integer_quotient(b, x, y)
        if made is None:
            return None
        y, _, rest = made
    else:
        rest = loop("fmod")(b, x, y)
    return b.op("where", other_side(b, rest, y), b.op("add", rest, y), rest)


def fmod(b: Builder, x: int, y: int) -> int | None:
    """With the sign of the dividend."""
    if not b.is_int():
        return loop("fmod")(b, x, y)
    made = integer_quotient(b, x, y)
    return made and made[2]


def frac(b: Builder, x: int) -> int:
    """x - trunc(x)."""
    return b.op("sub", x, x if b.is_int() else b.op("trunc", x))


# ---------------------------------------------------------------- bits


def bitwise(op: str) -> Rule:
    """An operation on the bits of integers."""

    def rule(b: Builder, *args: int) -> int | None:
        return b.op(op, *args) if b.is_int() else None

    return rule


def shift(op: str) -> Rule:
    """A shift by less than nothing, or by more than there is, leaves no digit."""

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
    """Is the sign of x negative, that of zero or NaN too?"""
    if b.is_int():
        return b.compare("lt", x, b.const(0))
    whole = "i64" if b.compute == "f64" else "i32"
    bits = b.op("bitcast", x, dtype=whole)
    return b.compare("lt", bits, b.const(0, whole))


def copysign(b: Builder, x: int, y: int) -> int:
    """The size of x with the sign of y."""
    size = b.op("abs", x)
    return b.op("where", sign_bit(b, y), b.op("neg", size), size)


# ---------------------------------------------------------------- choices


def is_infinite(b: Builder, x: int) -> int:
    """Is the size of x infinite?"""
    if b.is_int():
        return b.const(0, "b8")
    return b.compare("eq", b.op("abs", x), b.const(float("inf")))


def nextafter(b: Builder, x: int, y: int) -> int | None:
    """The number beside x on the way to y; of 16-bit floats an extern's."""
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


def leaky_relu(b: Builder, x: int, slope: int) -> int:
    """x above zero, else x * slope."""
    above = b.compare("lt", b.const(0), x)
    return b.op("where", above, x, b.op("mul", x, slope))


def softplus(b: Builder, x: int, beta: int, threshold: int) -> int:
    """log1p(exp(beta * x)) / beta; x where beta * x is over the threshold."""
    scaled = b.op("mul", x, beta)
    made = []
    for library in ("", "sleef_"):
        grown = b.op(f"{library}log1p", b.op(f"{library}exp", scaled))
        made.append(b.op("div", grown, beta))
    plain, vector = made
    if b.vector_library:
        size = DTYPE_BYTES[b.compute]
        plain = vector if b.narrow() else b.tail(plain, vector, size)
    return b.op("where", b.compare("lt", threshold, scaled), x, plain)


def nan_to_num(
    b: Builder,
    x: int,
    nan: int | None = None,
    above: int | None = None,
    below: int | None = None,
) -> int:
    """x, with numbers for NaN and the infinities."""
    if b.is_int():
        return x
    largest, infinity = LARGEST[b.common], float("inf")
    result = x
    for value, number, default in (
        (infinity, above, largest),
        (-infinity, below, -largest),
    ):
        other = b.const(default) if number is None else number
        found = b.compare("eq", x, b.const(value))
        result = b.op("where", found, other, result)
    other = b.const(0.0) if nan is None else nan
    return b.op("where", b.compare("ne", x, x), other, result)


def xlogy(b: Builder, x: int, y: int) -> int:
    """0 where x is, whatever y is, save NaN."""
    zero = b.const(0.0)
    product = b.op("mul", x, b.rounded(b.op("log", y)))
    product = b.op("where", b.compare("eq", x, zero), zero, product)
    return b.op("where", b.compare("ne", y, y), y, product)

"""Functions such as exp, each from the library that eager calls."""

from __future__ import annotations

from collections.abc import Callable

from ..ir.graph import DTYPE_BYTES
from .builder import Builder, Rule, single
from .select import sign_bit

#: Functions that eager takes from Sleef for every element of a tensor.
MAPPED = ("expm1", "log1p", "lgamma")
#: Functions that eager takes from Sleef in vectorized loops, and from C's library for
#: leftover elements.
LOOPS = ("exp2", "sinh", "cosh", "atanh", "atan2", "hypot")


def in_vectors(
    b: Builder, plain: int, function: str, *args: int, size: int | None = None
) -> int:
    """Select Sleef's function in eager's whole vectors, and `plain` for leftover
    elements.

    `size`: as in `Builder.tail`; by default the processor's vectors. For 16-bit floats
    Sleef's function is used everywhere: too few results differ to distinguish the two.
    """
    if not b.vector_library or b.single:
        return plain
    vector = b.op(f"sleef_{function}", *args)
    if size is not None:
        return b.tail(plain, vector, size)
    return vector if b.narrow() else b.tail(plain, vector, DTYPE_BYTES[b.compute])


def loop(function: str) -> Callable[..., int]:
    """Make the rule of a function that eager calls in vectorized loops."""

    def rule(b: Builder, *args: int) -> int:
        return in_vectors(b, b.op(function, *args), function, *args)

    return rule


def mapped(function: str) -> Rule:
    """Make the rule of a function that eager takes from Sleef for every element."""

    def rule(b: Builder, x: int) -> int:
        return b.op(f"sleef_{function}" if b.vector_library else function, x)

    return rule


def library(function: str) -> Callable[..., int]:
    """Make a rule: a vector library on f32 and f64, Sleef on 16-bit floats."""

    def rule(b: Builder, x: int) -> int:
        if not b.vector_library:
            return b.op(function, x)
        return b.op(f"{'sleef_' if b.narrow() else 'v'}{function}", x)

    return rule


def erf(b: Builder, x: int) -> int:
    """Call the library; for 16-bit floats a polynomial (Abramowitz and Stegun)."""
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
    terms = []
    for function in ("exp", "sleef_exp"):
        terms.append(b.op("div", top, b.op("add", one, b.op(function, minus))))
    plain, vector = terms
    if not b.vector_library:
        return plain
    return vector if b.narrow() else b.tail(plain, vector, DTYPE_BYTES[b.compute])


def sigmoid(b: Builder, x: int) -> int:
    """1 / (1 + exp(-x))."""
    return over_exp(b, b.const(1.0), x)


def silu(b: Builder, x: int) -> int:
    """x / (1 + exp(-x))."""
    return over_exp(b, x, x)


def softplus(b: Builder, x: int, beta: int, threshold: int) -> int:
    """log1p(exp(beta * x)) / beta; x where beta * x is over the threshold."""
    scaled = b.op("mul", x, beta)
    terms = []
    for library in ("", "sleef_"):
        grown = b.op(f"{library}log1p", b.op(f"{library}exp", scaled))
        terms.append(b.op("div", grown, beta))
    plain, vector = terms
    if b.vector_library:
        size = DTYPE_BYTES[b.compute]
        plain = vector if b.narrow() else b.tail(plain, vector, size)
    return b.op("where", b.compare("lt", threshold, scaled), x, plain)


def xlogy(b: Builder, x: int, y: int) -> int:
    """Compute x * log(y): 0 where x is 0, for any y but NaN."""
    zero = b.const(0.0)
    product = b.op("mul", x, b.rounded(b.op("log", y)))
    product = b.op("where", b.compare("eq", x, zero), zero, product)
    return b.op("where", b.compare("ne", y, y), y, product)

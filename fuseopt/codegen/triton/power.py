"""Powers of float32: the text of `power(x, y)`, with eager's bits.

Triton includes a math library whose `powf` differs from that of torch's CUDA toolkit.
`1 - beta ** t` differs in one step of a hundred or so. From CUDA 12.1 on, `powf` is the
algorithm here (11.8 and 12.0 have Triton's; 12.1 to 13.5 were compared). It takes a
logarithm to the base 2 in two floats, times y in two floats, then the power of two of
that. The text follows its steps, rounded one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

#: The first CUDA version with the `powf` below.
OWN = (12, 1)

FROM_LIBRARY = """\
@triton.jit
def power(x, y):
    # x ** y, as the device's library has it
    return libdevice.pow(x, y)
"""
FROM_CUDA = """\
@triton.jit
def power(x, y):
    # x ** y, with the bits of CUDA's powf: log2(|x|) in two floats ...
    one = tl.full((), 1.0, tl.float32)
    size = tl.abs(x)
    tiny = size < 1.1754943508222875e-38
    bits = tl.where(tiny, size * 16777216.0, size).to(tl.int32, bitcast=True)
    scale = (bits - 1060439283) & -8388608
    m = (bits - scale).to(tl.float32, bitcast=True)
    whole = tl.where(tiny, -24.0, 0.0)
    whole = tl.fma(scale.to(tl.float32), 1.1920928955078125e-07, whole)
    less = m - 1.0
    # in this range a quotient as Triton has it is the processor's estimate of it
    near = one / (m + 1.0)
    q = (less + less) * near
    half = less - q
    rest = near * tl.fma(q * -1, less, half + half)
    square = q * q
    series = tl.fma(square, 0.0006568862590938807, 0.0032181653659790754)
    series = tl.fma(series, square, 0.018033718690276146)
    series = tl.fma(series, square, 0.12022458761930466) * square
    high = tl.fma(q, 1.4426950216293335, whole)
    low = tl.fma(q, 1.4426950216293335, whole - high)
    low = tl.fma(rest, 1.4426950216293335, low)
    low = tl.fma(q, 1.925136672298322e-08, low)
    low = tl.fma(series * 3.0, rest, low)
    low = tl.fma(series, q, low)
    log = high + low
    low = low - (log - high)
    # ... times y ...
    product = log * y
    low = tl.fma(low, y, tl.fma(log, y, product * -1))
    near = libdevice.rint(product)
    f = (product - near) + low
    # ... and two to the power of that, in two factors none of which is out of range
    r = tl.fma(f, 0.00015239251661114395, 0.0013391353422775865)
    r = tl.fma(r, f, 0.009618839249014854)
    r = tl.fma(r, f, 0.055503588169813156)
    r = tl.fma(r, f, 0.24022644758224487)
    r = tl.fma(r, f, 0.6931471824645996)
    r = tl.fma(r, f, 1.0)
    first = tl.where(near > 0, 2130706432, 33554432)
    second = (near.to(tl.int32) << 23) + (2130706432 - first)
    r = r * first.to(tl.float32, bitcast=True) * second.to(tl.float32, bitcast=True)
    r = tl.where(tl.abs(product) > 152.0, tl.where(product < 0, 0.0, float("inf")), r)
    # of a number below 0: only whole powers
    pairs = libdevice.trunc(y * 0.5)
    odd = tl.abs(y - (pairs + pairs)) == 1.0
    below = tl.where(odd, r * -1, r)
    below = tl.where(tl.floor(y) == y, below, float("nan"))
    r = tl.where(x < 0, below, r)
    # of 0 and of infinities: one of both, with the sign of x if the power is odd
    limit = (x + x).to(tl.int32, bitcast=True)
    limit = tl.where(y < 0, limit ^ 2139095040, limit)
    limit = tl.where(odd, limit, limit & 2147483647).to(tl.float32, bitcast=True)
    r = tl.where((x == 0) | (size == float("inf")), limit, r)
    r = tl.where((x == -1.0) & (tl.abs(y) == float("inf")), 1.0, r)
    r = tl.where((x != x) | (y != y), x + y, r)
    return tl.where((x == 1.0) | (y == 0), 1.0, r)
"""
BESIDE = """\
@triton.jit
def either(a, b):
    return a | b


@triton.jit
def numbered(numbers, which, k):
    # the k-th of numbers that lie in several threads, for all threads: its bits
    bits = tl.where(which == k, numbers.to(tl.int32, bitcast=True), 0)
    return tl.reduce(bits, 0, either).to(tl.float32, bitcast=True)
"""


def side_by_side(calls: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return lines for several `name = power(x, y)` of one lane's numbers.

    All threads compute a lane's numbers. Here each thread takes one power, and shares
    the result with the others.
    """

    def dealt(numbers: Sequence[str]) -> str:
        *others, text = numbers
        for k in reversed(range(len(others))):
            text = f"tl.where(which == {k}, {others[k]}, {text})"
        return text

    names, x, y = zip(*calls, strict=True)
    return [
        f"which = tl.arange(0, {1 << (len(calls) - 1).bit_length()})",
        f"powers = power({dealt(x)}, {y[0] if len(set(y)) == 1 else dealt(y)})",
        *(f"{name} = numbered(powers, which, {k})" for k, name in enumerate(names)),
    ]

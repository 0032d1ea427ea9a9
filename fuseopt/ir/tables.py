"""Tables of numbers that bodies look up and search, as data without torch.

A table has parts, of which an instruction chooses one for each element. A part has
`values`, by code, and `steps`, in ascending order: the code of x is the number of steps
that are at most x. So codes are found for any rule of rounding that is monotone.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

Part = tuple[float, ...]


class Table(NamedTuple):
    """`values[part][code]`, and the `steps` of each part; all are float32."""

    name: str
    values: tuple[Part, ...]
    steps: tuple[Part, ...]


def single(x: float) -> float:
    """The float32 nearest to a number."""
    return float(struct.unpack("f", struct.pack("f", x))[0])


def _ordered(x: float) -> int:
    """An integer that orders float32 as numbers."""
    bits = int(struct.unpack("i", struct.pack("f", x))[0])
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)


def _number(ordered: int) -> float:
    bits = ordered if ordered >= 0 else 0x80000000 - ordered
    return float(struct.unpack("f", struct.pack("I", bits))[0])


def _first(low: float, high: float, reaches: Callable[[float], bool]) -> float:
    """The least float32 above `low`, and at most `high`, that reaches something."""
    below, above = _ordered(low), _ordered(high)
    while above - below > 1:
        middle = (below + above) // 2
        if reaches(_number(middle)):
            above = middle
        else:
            below = middle
    return _number(above)


# ---------------------------------------------------------------- dynamic quantization


def _line(count: int) -> list[float]:
    """`torch.linspace(0.1, 1, count)` in float32, which goes from both ends."""
    start, end = single(0.1), 1.0
    step = single(single(end - start) / (count - 1))
    # the product and the sum are rounded once
    return [
        single(start + step * i)
        if i < count // 2
        else single(end - step * (count - i - 1))
        for i in range(count)
    ]


def dynamic_map(signed: bool) -> Part:
    """Return the 256 numbers of dynamic quantization (T. Dettmers, arXiv 1511.04561).

    bitsandbytes and torchao compute the same: 7 decades, each with twice as many
    numbers as the one below it, then 0 and 1.
    """
    found = [0.0, 1.0]
    for i in range(7):
        ends = _line(2 ** (i if signed else i + 1) + 1)
        means = [single(single(a + b) / 2.0) for a, b in itertools.pairwise(ends)]
        scale = single(10 ** (i - 6))
        found += [single(scale * x) for x in means]
        if signed:
            found += [-single(scale * x) for x in means]
    return tuple(sorted(found))


def _nearest(values: Sequence[float]) -> Part:
    """Return where torchao's rule goes to the next number of a map: half of the way
    between two numbers, in arithmetic of float32.
    """

    def step(low: float, high: float) -> float:
        half = single(single(high - low) * 0.5)
        return _first(low, high, lambda x: single(x - low) >= half)

    return tuple([step(a, b) for a, b in itertools.pairwise(values)])


# ---------------------------------------------------------------- floats of 8 bits


def _float8(mantissa: int, bias: int, ends: bool) -> Part:
    """The numbers of a float of 8 bits, by code. `ends`: the last exponent has an
    infinity and NaNs; else the last code alone is NaN.
    """

    def value(code: int) -> float:
        exponent, digits = code >> mantissa, code & (1 << mantissa) - 1
        if ends and exponent == (1 << 7 - mantissa) - 1:
            return math.nan if digits else math.inf
        if not ends and code == 127:
            return math.nan
        if exponent == 0:
            return math.ldexp(digits, 1 - bias - mantissa)
        return math.ldexp((1 << mantissa) + digits, exponent - bias - mantissa)

    positive = [value(code) for code in range(128)]
    return (*positive, *(-x for x in positive))


def _even(values: Sequence[float], *end: float) -> Part:
    """Return where rounding to the nearest, ties to even, goes to the next code.

    `end`: the number that would follow the last one, of a type with an infinity.
    """
    finite = [x for x in values[:128] if math.isfinite(x)]
    steps = []
    for code, (a, b) in enumerate(itertools.pairwise([*finite, *end])):
        tie = (a + b) / 2
        steps.append(_number(_ordered(tie) + (code % 2 == 0)))
    return tuple(steps)


_MAPS = dynamic_map(signed=False), dynamic_map(signed=True)
_E4M3, _E5M2 = _float8(3, 7, False), _float8(2, 15, True)

#: By number. Parts of "dynamic": numbers that are not negative, and all numbers. The
#: steps of floats of 8 bits are those of their size; their values have a sign too.
TABLES = (
    Table("dynamic", _MAPS, tuple([_nearest(x) for x in _MAPS])),
    Table("e4m3fn", (_E4M3,), (_even(_E4M3),)),
    Table("e5m2", (_E5M2,), (_even(_E5M2, 65536.0),)),
)
DYNAMIC, E4M3, E5M2 = range(len(TABLES))

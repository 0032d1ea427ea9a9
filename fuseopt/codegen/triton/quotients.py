"""Quotients by a lane's number that need no division for each element.

IEEE division is eleven instructions on a GPU, and a slow path. If the divisor is a
number of the lane, its inverse is available before the elements. It has two parts,
whose sum is 1 / d to 47 bits. `x * rest + x * under` is then next to the quotient, and
`q + (x - q * d) / d`, with the inverse rounded, is the quotient rounded correctly (P.
Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor",
1990, theorem 7). That holds while nothing over- or underflows. `quotients` follows the
range of numerators through the element code, and finds the safe divisors. A lane with
another divisor takes the general path, which divides.

If a bfloat16 is divided and rounded to bfloat16 again, a product with the inverse is
close enough for nearly all divisors. A program tries all 128 mantissas with its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ...ir.graph import Instr, Variant
from .uses import Uses, all_cast, readers, widens

#: Exponents of a type's numbers: of the least one, and above the largest.
LIMITS = {"f32": (-149, 128), "bf16": (-133, 128), "f16": (-24, 16)}
#: A remainder is exact above this exponent of the numerator. A quotient has all its
#: digits from the second on and below the third, with room for how it is rounded.
LEAST, SMALL, LARGE = -100, -120, 127
#: Divisors have exponents within these at most; the larger if nothing else follows.
BELOW, LAST_BELOW, ABOVE = 24, 40, 12
#: A divisor's range must have at least this many exponents on each side of 1.
USEFUL = 10
#: In `narrow`, the omitted part of a product has all its digits, down to 2**-30 of it,
#: if the quotient's exponent is at least this. So one mantissa represents all.
NARROW = -95

HELPERS = """\
@triton.jit
def inverse(d):
    # -d; 1 / d rounded; cut off; what is missing then, never 0 and of the same sign
    one = tl.full((), 1.0, tl.float32)
    minus = d * -1
    near = tl.div_rn(one, d)
    over = (tl.fma(minus, near, one) < 0).to(tl.int32)
    under = (near.to(tl.int32, bitcast=True) - over).to(tl.float32, bitcast=True)
    rest = tl.fma(minus, under, one) * near
    least = under * 9.313225746154785e-10
    return minus, near, under, tl.where(tl.abs(rest) < tl.abs(least), least, rest)


@triton.jit
def quotient(x, minus, near, under, rest):
    # x / d, rounded correctly, by what `inverse` gave
    low = x * rest
    q = tl.fma(x, under, low)
    better = tl.fma(tl.fma(q, minus, x), near, q)
    # zeros and infinities are what they are
    return tl.where(q == low, low, better)


@triton.jit
def narrow(x, under, rest):
    # x / d, near enough to be rounded to bfloat16 for each bfloat16 x, see `serves`
    return tl.fma(x, under, x * rest)


@triton.jit
def both(a, b):
    return a & b


@triton.jit
def serves(d, under, rest):
    # for each mantissa of a bfloat16: does `narrow` give the bits of the quotient?
    x = tl.arange(0, 128).to(tl.float32) * 0.0078125 + 1
    true = tl.div_rn(x, d).to(tl.bfloat16).to(tl.float32)
    return true == narrow(x, under, rest).to(tl.bfloat16).to(tl.float32)


@triton.jit
def every(found):
    # all of these?
    return tl.reduce(found.to(tl.int32), 0, both) != 0
"""


@dataclass
class Quotient:
    """A quotient by lane number `divisor`, which must lie in 2**low to 2**high.

    `positive`: the divisor must be above 0. `narrow`: a bfloat16 becomes one.
    """

    divisor: int
    low: int
    high: int
    narrow: bool
    positive: bool = False


@dataclass
class Quotients:
    """Quotients that need no division, by instruction.

    `addends`: lane numbers that must be 0, or have an exponent from -LAST_BELOW to
    ABOVE and not be below 0.
    """

    by_instr: dict[int, Quotient] = field(default_factory=dict)
    addends: list[int] = field(default_factory=list)


class Range(NamedTuple):
    """Possible values of a number.

    It is 0, an infinity, NaN, or has an exponent from `low` to `high`. `signs`: None if
    it may be below 0; else it is not, if the divisors of these quotients are above 0.
    `through`: quotients on its way.
    """

    low: int
    high: int
    signs: frozenset[int] | None = None
    through: frozenset[int] = frozenset()


def quotients(v: Variant) -> Quotients:
    """Return the quotients of a variant's element code that need no division."""
    taken = Quotients()
    lane = set(v.lane_code)
    uses = readers(v)
    ranges: dict[int, Range | None] = dict.fromkeys(range(len(v.instrs)))
    for i in v.code:
        instr = v.instrs[i]
        if instr.op == "div" and instr.args[1] in lane and instr.dtype == "f32":
            result = _divided(v, i, ranges[instr.args[0]], uses, taken)
        else:
            result = _range(v, instr, ranges, lane, taken)
        ranges[i] = result or _any(instr.dtype)
    _widen(v, ranges, taken)
    return taken


def _any(dtype: str) -> Range | None:
    """Return the range of all numbers of a type; None for unsupported types."""
    limits = LIMITS.get(dtype)
    return None if limits is None else Range(*limits)


def _divided(
    v: Variant,
    i: int,
    x: Range | None,
    uses: Uses,
    taken: Quotients,
) -> Range | None:
    """Take a quotient, if its numerator and divisors lie in a useful range."""
    source, divisor = v.instrs[i].args
    if x is None or x.low < LEAST or v.instrs[divisor].op == "const":
        return None
    above = min(ABOVE, x.low - SMALL)
    below = min(BELOW, LARGE - x.high)
    if min(above, below) < USEFUL:
        return None
    halves = widens(v, source) and all_cast(v, i, uses, "bf16")
    narrow = halves and x.low - above >= NARROW
    taken.by_instr[i] = Quotient(divisor, -below, above, narrow)
    signs = None if x.signs is None else x.signs | {i}
    return Range(x.low - above, x.high + below, signs, x.through | {i})


def _range(
    v: Variant,
    instr: Instr,
    by_instr: dict[int, Range | None],
    lane: set[int],
    taken: Quotients,
) -> Range | None:
    """Return the range of an instruction of element code that is no taken quotient."""
    xs = [by_instr.get(a) for a in instr.args]
    if instr.op == "add" and len(lane.intersection(instr.args)) == 1:
        (addend,) = lane.intersection(instr.args)
        x = next(by_instr.get(a) for a in instr.args if a != addend)
        if x is None or x.signs is None or instr.dtype != "f32":
            return None
        if v.instrs[addend].op == "const":
            return None
        for q in x.signs:
            taken.by_instr[q].positive = True
        taken.addends.append(addend)
        low, high = min(x.low, -LAST_BELOW), max(x.high, ABOVE) + 1
        return Range(low, high, frozenset(), x.through)
    if not xs or any(x is None for x in xs):
        return None
    ranges = [x for x in xs if x is not None]
    x = ranges[0]
    if instr.op in ("sqrt", "vsqrt"):
        return Range(x.low // 2, -(-x.high // 2), frozenset(), x.through)
    if instr.op == "abs":
        return x._replace(signs=frozenset())
    if instr.op in ("max", "min"):
        signs = [r.signs for r in ranges if r.signs is not None]
        return Range(
            min(r.low for r in ranges),
            max(r.high for r in ranges),
            frozenset().union(*signs) if len(signs) == len(ranges) else None,
            frozenset().union(*(r.through for r in ranges)),
        )
    if instr.op == "cast" and instr.dtype in LIMITS:
        low, high = LIMITS[instr.dtype]
        if instr.dtype == "f32" and v.instrs[instr.args[0]].dtype != "f64":
            return x
        # a rounded result may reach the next power of two, or the least number of the
        # type
        return x._replace(low=max(x.low, low), high=min(x.high + 1, high))
    return None


def conditions(taken: Quotients, name: Callable[[int], str]) -> list[str]:
    """Return expressions over lane numbers that must all be true.

    The caller has called `inverse` on each divisor.
    """
    texts: dict[str, None] = {}
    narrow: dict[str, None] = {}
    for q in taken.by_instr.values():
        d = name(q.divisor)
        size = d if q.positive else f"tl.abs({d})"
        texts[f"({size} >= {2.0**q.low!r})"] = None
        texts[f"({size} <= {2.0**q.high!r})"] = None
        if q.narrow:
            narrow[f"serves({d}, {d}_under, {d}_rest)"] = None
    for addend in taken.addends:
        x = name(addend)
        low, high = 2.0**-LAST_BELOW, 2.0**ABOVE
        texts[f"(({x} == 0) | ({x} >= {low!r}))"] = None
        texts[f"({x} <= {high!r})"] = None
    # threads share the result once
    return [*texts, *([f"every({' & '.join(narrow)})"] if narrow else [])]


def _widen(v: Variant, ranges: dict[int, Range | None], taken: Quotients) -> None:
    """Allow small divisors, if no other quotient depends on the range."""
    inner: set[int] = set()
    for i in taken.by_instr:
        numerator_range = ranges[i]
        inner.update(
            numerator_range.through - {i} if numerator_range is not None else ()
        )
    for i, q in taken.by_instr.items():
        numerator = ranges[v.instrs[i].args[0]]
        if i not in inner and numerator is not None:
            q.low = -min(LAST_BELOW, LARGE - numerator.high)

"""The C++ of tables: values by code, and the code of a number.

A search reads one word. The leading bits of a number choose it; there are so many of
them that no two steps of a part have the same. The word has the code of the numbers
before the step, and the rest of the step's bits.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from ...ir.tables import TABLES
from ..optable import cpp_literal

#: Bits of a word for the code.
CODE = 8


def _bits(x: float) -> int:
    return int(struct.unpack("I", struct.pack("f", abs(x)))[0])


def _rows(name: str, kind: str, entries: Iterable[str]) -> list[str]:
    """A static array."""
    lines, line = [f"static const {kind} {name}[] = {{"], "   "
    for entry in entries:
        if len(line) + len(entry) > 86:
            lines.append(line)
            line = "   "
        line += f" {entry},"
    return [*lines, line, "};"]


def _shift(halves: Sequence[Sequence[int]]) -> int:
    """The most bits that a word may leave to compare."""
    for shift in range(22, -1, -1):
        if all(len({b >> shift for b in half}) == len(half) for half in halves):
            return shift
    raise ValueError("two steps of a table are equal")


def _half(
    steps: Sequence[int], base: int, sign: int, words: range, shift: int
) -> list[str]:
    """The words of numbers of one sign, by their leading bits. `steps`: the bits of the
    steps' sizes; `base`: the code of a number smaller than all of them.
    """
    at = {b >> shift: b & (1 << shift) - 1 for b in steps}
    code, found = base, []
    for word in words:
        # of numbers below 0 one that has the size of a step is above it
        step = at[word] + (sign < 0) if word in at else 1 << shift
        found.append(str(step << CODE | code))
        code += sign * (word in at)
    return found


def table(number: int) -> list[str]:
    """The functions `lookup<number>` and `search<number>` and their arrays."""
    this = TABLES[number]
    size = len(this.values[0])
    values = (cpp_literal(x, "f32") for part in this.values for x in part)
    upper = [[_bits(x) for x in part if x > 0] for part in this.steps]
    lower = [[_bits(x) for x in part if x < 0] for part in this.steps]
    halves = [x for x in (*upper, *lower) if x]
    shift = _shift(halves)
    least = min(map(min, halves)) >> shift
    first, last = least - 1, max(map(max, halves)) + 1
    words = range(first, (last >> shift) + 1)
    entries: list[str] = []
    place: list[str] = []
    below: list[str] = []
    for above, under in zip(upper, lower, strict=True):
        place.append(str(len(entries)))
        entries += _half(above, len(under), 1, words, shift)
        below.append(str(len(entries)) if under else "-1")
        entries += _half(under, len(under), -1, words, shift) if under else []
    parts = len(place)
    chosen, minus = place[-1], below[-1]
    for k in range(parts - 1):
        chosen = f"part == {k} ? {place[k]} : {chosen}"
        minus = f"part == {k} ? {below[k]} : {minus}"
    return [
        *_rows(f"values{number}", "float", values),
        f"static inline float lookup{number}(int32_t code, int32_t part) {{",
        f"  return values{number}[part * {size} + code];",
        "}",
        *_rows(f"steps{number}", "int32_t", entries),
        f"static inline int32_t search{number}(float x, int32_t part) {{",
        "  union {",
        "    float f;",
        "    int32_t i;",
        "  } u = {x};",
        f"  const int32_t above = {chosen}, below = {minus};",
        "  // masks, so that a compiler makes vectors of it",
        "  const int32_t has = below < 0 ? 0 : -1, falls = u.i >> 31 & has;",
        "  const int32_t size = u.i & 0x7fffffff & ~(u.i >> 31 & ~has);",
        f"  const int32_t least = {first << shift}, most = {last};",
        "  const int32_t kept = size < least ? least : size < most ? size : most;",
        f"  const int32_t at = (kept >> {shift}) - {first} + above;",
        f"  const int32_t word = steps{number}[at + (falls & (below - above))];",
        f"  const int32_t passed = (kept & {(1 << shift) - 1}) >= word >> {CODE};",
        f"  const int32_t before = word & {(1 << CODE) - 1};",
        "  return x == x ? before + ((passed ^ falls) - falls) : 0;",
        "}",
    ]

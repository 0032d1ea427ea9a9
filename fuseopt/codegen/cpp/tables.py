"""The C++ of tables: values by code, and the code of a number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...ir.searches import words_of
from ...ir.tables import TABLES
from ..optable import cpp_literal


def _rows(name: str, kind: str, entries: Iterable[str]) -> list[str]:
    """A static array."""
    lines, line = [f"static const {kind} {name}[] = {{"], "   "
    for entry in entries:
        if len(line) + len(entry) > 86:
            lines.append(line)
            line = "   "
        line += f" {entry},"
    return [*lines, line, "};"]


def _of_part(numbers: Sequence[int]) -> str:
    """The C++ of the number of a part."""
    if len(numbers) == 1:
        return str(numbers[0])
    return " | ".join(f"(-(part == {k}) & {x})" for k, x in enumerate(numbers))


def table(number: int) -> list[str]:
    """The functions `lookup<number>` and `search<number>` and their arrays."""
    this = TABLES[number]
    size = len(this.values[0])
    values = (cpp_literal(x, "f32") for part in this.values for x in part)
    words = words_of(number)
    shift, first, place, below = words.shift, words.first, words.above, words.below
    return [
        *_rows(f"values{number}", "float", values),
        f"static inline float lookup{number}(int32_t code, int32_t part) {{",
        f"  return values{number}[part * {size} + code];",
        "}",
        *_rows(f"steps{number}", "int32_t", map(str, words.entries)),
        f"static inline int32_t search{number}(float x, int32_t part) {{",
        "  union {",
        "    float f;",
        "    int32_t i;",
        "  } u = {x};",
        "  // masks: with a branch, even of a common number, no compiler makes vectors",
        f"  const int32_t above = {_of_part(place)};",
        f"  const int32_t below = {_of_part(below)};",
        "  const int32_t has = ~(below >> 31), falls = u.i >> 31 & has;",
        f"  const int32_t bits = (u.i & 0x7fffffff) >> {shift};",
        f"  const int32_t least = {first}, most = {words.last};",
        "  const int32_t kept = bits < least ? least : bits < most ? bits : most;",
        f"  const int32_t at = kept - {first} + above + (falls & (below - above));",
        f"  const int32_t rest = (u.i ^ falls) & {(1 << shift) - 1};",
        f"  const int32_t code = (steps{number}[at] + rest) >> {shift};",
        "  // 0 for a NaN, and for negative numbers of a part that has none",
        "  return code & -(int32_t)((x == x) & ((x >= 0.0f) | (below >= 0)));",
        "}",
    ]

"""C++ that finds the leftover elements of eager's vector loops.

Some roundings depend on it (see "tail" in `ir.ARITY`). Element code has an instance for
each set of tails that may hold at once.
"""

from __future__ import annotations

from ...ir.graph import AVX2, BY_ROWS, Variant


class Tails:
    """Tails that a variant uses.

    `kinds`: kinds of loops, as in the IR. `every`: the set in which all hold, a bit for
    each.
    """

    def __init__(self, number: int | str, variant: Variant) -> None:
        self.number = number
        self.v = variant
        self.kinds = sorted(
            {i.attr for i in variant.instrs if i.op == "tail" and i.attr}
        )
        self.every = (1 << len(self.kinds)) - 1
        self.kind = "int" if len(self.kinds) > 1 else "bool"
        self.n_elements = sum(s.domain == "element" for s in variant.slots)

    def name(self, attr: int | float | None) -> str:
        """Return the test of a tail, inside a function with the parameter TAIL."""
        if len(self.kinds) < 2 or not attr:
            return "TAIL"
        return f"(TAIL >> {self.kinds.index(attr)} & 1)"

    def call(self, function: str, call: str) -> list[str]:
        """Return lines that call the instance of a function for the tails that hold."""
        if len(self.kinds) < 2:
            return [
                f"if (tail) {function}<true>{call};",
                f"else {function}<false>{call};",
            ]
        return [
            f"if (tail == {k}) {function}<{k}>{call};" for k in range(self.every + 1)
        ]

    def ends(self, late: bool = False) -> list[str]:
        """Return lines that find the tails at an element, and where that set ends.

        late: for results, of `count`, which eager computes one after another.
        """
        kinds = [int(x) & ~BY_ROWS if late else int(x) for x in self.kinds]
        name = f"late{self.number}" if late else f"tails{self.number}"
        number = "count" if late else "lane"
        lines = [
            f"static inline int {name}(const Table& t, int64_t {number}, int64_t e,",
            "                         int64_t end, int64_t* stop) {",
        ]
        if not late:
            lines.append("  const int64_t count = t.start[lane + 1] - t.start[lane];")
        lines += [
            "  const int64_t part = eager_part(count, t.threads);",
            "  const int64_t first = e / part * part;",
            "  const int64_t size = part < count - first ? part : count - first;",
            "  int tail = 0;",
            "  *stop = end < first + size ? end : first + size;",
        ]
        if any(x & BY_ROWS for x in kinds):
            lines += [
                "  int64_t row = first, length = size;",
                "  bool vectors = true;  // along a row",
                *self.row_of_eager(),
            ]
        for k, kind in enumerate(kinds):
            by_rows = bool(kind & BY_ROWS)
            group = self.group(kind & ~BY_ROWS)
            start, size = ("row", "length") if by_rows else ("first", "size")
            lines += [
                f"  const int64_t v{k} = {size} - {size} % {group};",
                f"  const int64_t l{k} = {start} + v{k};",
                f"  if ({'!vectors || ' if by_rows else ''}e >= l{k}) {{",
                f"    tail |= {1 << k};",
            ]
            if by_rows:  # rows shorter than a vector are all alike
                lines.append(
                    f"    if (vectors && v{k} && row + length < *stop) "
                    "*stop = row + length;"
                )
            lines.append(f"  }} else if (l{k} < *stop) *stop = l{k};")
        return [*lines, "  return tail;", "}"]

    def row_of_eager(self) -> list[str]:
        """Return lines for an element's row, if a lane's tensors differ in layout."""
        if self.v.reduction == "dims":
            return ["  vectors = false;"]
        return [
            "  if (t.strided[lane] >= 0) {",
            "    const int64_t* g = t.geometry + t.strided[lane];",
            "    const int64_t dims = g[0], inner = g[dims];",
            f"    for (int64_t k = 1; k <= {self.n_elements}; ++k)",
            "      vectors = vectors && (g[dims + k * dims] & ~1) == 0;",
            "    if (dims > 1) row = e / inner * inner, length = inner;",
            "  }",
        ]

    @staticmethod
    def group(kind: int) -> str:
        """Return the number of elements that one turn of eager's loop takes.

        With NEON, eager's loops over 16-bit floats take one after another.
        """
        if kind == 1:
            return "eager_group(t, 32)"
        size = kind & ~AVX2
        group = (
            str(2 * 32 // size) if kind & AVX2 else f"2 * t.library->vector / {size}"
        )
        return f"eager_group(t, {group})" if size == 2 else f"({group})"

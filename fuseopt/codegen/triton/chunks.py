"""Triton functions of a pointwise variant, which programs run.

A program runs its lane's scalar code in registers. Then it runs some chunks of its
elements on a main path of 16-byte accesses, one after another. The general path takes
the rest. For lanes of few elements one program takes several, with a row of threads for
each.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...ir.graph import DTYPE_BYTES, Variant
from .halves import replacements
from .quotients import Quotients, conditions, quotients
from .text import indent, over_lines
from .variant import ALIGNED, FLAT, RECORD, SIZES, Function

#: The main path moves elements in groups of this many: 16 bytes of the narrowest type.
GROUP = 16
#: For a program with several lanes: the lanes, the elements of each at a time, and the
#: largest number of elements of such a lane.
ROWS, COLUMNS, SMALL = 8, 32, 128

#: The number of 16-bit tensors of a chunk's loads that counts as many; see `crowded`.
MANY = 6

#: The comment above the lane stores of a program that takes whole lanes.
WHOLE = """\
# No other program reads what is stored here: each of these lanes is whole in this
# one. Its own threads have read before the barrier.
tl.debug_barrier()
"""
#: The comment above the loads of the next chunk.
NEXT = """\
# The next chunk's loads begin before this program goes on to it.
"""


def places(w: Function, start: str, count: str) -> list[str]:
    """Return lines for `count` elements from `start` on: place and end of the main
    path.

    Its first chunk begins the main path.
    """
    lines = [
        "",
        f"start = {start}",
        f"count = {count}",
        "block = tl.arange(0, BLOCK)",
        f"# main path: whole groups of {GROUP} elements, all pointers aligned",
        f"grouped = tl.where(layout == {ALIGNED}, count // {GROUP} * {GROUP}, 0)",
    ]
    for s in w.element_slots:
        lines.append(f"a{s} = tl.multiple_of(p{s}, 16) + start + block")
    return lines


def inside(left: str) -> str:
    """Return the mask of a chunk, of which `left` elements remain."""
    return f"block < tl.multiple_of({left}, {GROUP})"


class Chunks:
    """Writes the functions of one variant without reductions.

    `ptx`: the text may have instructions of PTX.
    """

    def __init__(
        self, number: int, variant: Variant, fast: bool = False, ptx: bool = False
    ) -> None:
        self.n = number
        self.v = variant
        self.w = Function(number, variant, fast)
        # "fast" already divides fast
        self.quotients = Quotients() if fast else quotients(variant)
        self.instead = replacements(variant) if ptx and not fast else {}

    def functions(self, packs: bool) -> list[list[str]]:
        """Return all functions; `packs`: also that of programs with several lanes."""
        functions = []
        if self.w.element_stores:
            functions += [self.w.element(), *self.main_element(), self.w.general()]
            if not self.crowded:
                functions.append(self.flat())
        functions.append(self.variant())
        return [*functions, self.packed()] if packs else functions

    # ---------------------------------------------------------------- chunks

    @property
    def inverses(self) -> dict[int, list[str]]:
        """Names of the results of `inverse`, by divisor."""
        parts = ("minus", "near", "under", "rest")
        divisors = sorted({q.divisor for q in self.quotients.by_instr.values()})
        return {i: [f"{self.w.name(i)}_{part}" for part in parts] for i in divisors}

    def main_element(self) -> list[list[str]]:
        """Return element code of the main path, if it differs from the general one."""
        instead = dict(self.instead)
        for i, q in self.quotients.by_instr.items():
            x, parts = self.w.name(self.v.instrs[i].args[0]), self.inverses[q.divisor]
            helper, parts = ("narrow", parts[2:]) if q.narrow else ("quotient", parts)
            instead[i] = f"{helper}({', '.join([x, *parts])})"
        if not instead:
            return []
        return [self.w.arithmetic(f"main{self.n}", self.main_arguments, instead)]

    @property
    def main_arguments(self) -> list[str]:
        return [
            *self.w.arguments,
            *(x for parts in self.inverses.values() for x in parts),
        ]

    def variant(self) -> list[str]:
        """Return lane code, then some chunks on the main path, the rest on the general
        one.
        """
        w = self.w
        if not w.element_slots:
            return w.shell([*w.ticket(), *["return 1"] * w.returns_done], [])
        size = "span * BLOCK"
        early = [
            *places(
                w,
                f"ordinal.to(tl.int64) * ({size})",
                f"tl.minimum(numel - start, {size}).to(tl.int32)",
            ),
            *self.loads("grouped", {s: f"a{s}" for s in w.element_slots}),
        ]
        lines = []
        if w.element_stores:
            lines += ["", *self.checks(), *self.loop()]
            if self.crowded:
                size = "2 * REST"
                lines.append("if end < count:")
            else:
                size = "REST"
                flat = over_lines(f"flat{self.n}(", [*self.of_flat, "BLOCK"], ")")
                lines += [f"if layout == {FLAT}:", *indent(flat), "elif end < count:"]
            rest = [x if x != "begin" else "end" for x in w.rest]
            lines += indent(over_lines(f"general{self.n}(", [*rest, size], ")"))
        return w.shell([*lines, *w.ticket()], [], early)

    def loads(self, left: str, place: Mapping[int, str]) -> list[str]:
        """Return loads of a chunk of `left` elements.

        A full chunk needs no mask, and no registers set to zero outside of it. But
        branches take registers.
        """
        w = self.w
        if not w.loads:
            return []
        if self.crowded:
            few = [f"few = {inside(left)}"]
            return [*few, *w.element_loads(place, ", mask=few")]
        return [
            f"if {left} >= BLOCK:",
            *indent(w.element_loads(place, "")),
            "else:",
            f"    few = {inside(left)}",
            *indent(w.element_loads(place, ", mask=few")),
        ]

    @property
    def crowded(self) -> bool:
        """Would more branches take more registers than three programs of a
        multiprocessor have?

        Counted in machine code of sm_90: with elements of float64, or of 16 bits if
        they are from MANY tensors.
        """
        if any(self.v.slots[s].dtype == "f64" for s in self.w.element_slots):
            return True
        sizes = [DTYPE_BYTES[self.v.instrs[i].dtype] for i in self.w.loads]
        return sizes.count(2) >= MANY

    def checks(self) -> list[str]:
        """Return how far the main path goes: nowhere if a divisor is out of range."""
        lines = [
            f"{', '.join(parts)} = inverse({self.w.name(i)})"
            for i, parts in self.inverses.items()
        ]
        tests = conditions(self.quotients, self.w.name)
        if not tests:
            return [*lines, "end = grouped"]
        lines.append(f"safe = {tests[0]}")
        lines += [f"safe &= {x}" for x in tests[1:]]
        return [*lines, "end = tl.where(safe, grouped, 0)"]

    def loop(self) -> list[str]:
        """Return the main path: a chunk is computed and stored, then the next one
        loaded.
        """
        w = self.w
        name, args = f"element{self.n}", w.arguments
        if self.quotients.by_instr or self.instead:
            name, args = f"main{self.n}", self.main_arguments
        place = {s: f"a{s} + at" for s in w.element_slots}
        body = [
            *w.call(name, args),
            f"mask = {inside('grouped - at')}",
            *w.element_writes(place),
        ]
        if w.loads:
            further = {s: f"a{s} + (at + BLOCK)" for s in w.element_slots}
            then = self.loads("grouped - at - BLOCK", further)
            body += NEXT.splitlines()
            body += then if self.crowded else ["if at + BLOCK < end:", *indent(then)]
        return ["for at in range(0, end, BLOCK):", *indent(body)]

    @property
    def of_flat(self) -> list[str]:
        """Return arguments of the path of lanes whose tensors are not all aligned."""
        pointers = [f"p{s}" for s in self.w.element_slots]
        numbers = [self.w.name(i) for i in self.w.handed]
        return ["layout", "start", "count", *pointers, *numbers]

    def flat(self) -> list[str]:
        """Return the path of lanes whose tensors are not all at 16 bytes, with one flat
        index for all tensors.

        It loads number by number, half as many at a time as the main path, and four
        times as many as the general one. All of them would take more registers than the
        main path (AdamW 167 instead of 147); half take no more. If the chunks are
        crowded, half take more too (Adan in bfloat16 174 instead of 168). There, the
        general path takes these lanes, at twice its numbers at a time.
        """
        w = self.w
        slots = w.element_slots
        loop = [
            "mask = block < count - at",
            "# Triton does not see that they are consecutive: no thread takes two",
            "# neighbours, and a warp takes whole sectors.",
            f"rest = tl.where(layout == {FLAT}, start + at + block, 0)",
            *w.apply({s: f"p{s} + rest" for s in slots}),
        ]
        lines = [
            "HALF: tl.constexpr = BLOCK // 2",
            "block = tl.arange(0, HALF)",
            "for at in range(0, count, HALF):",
            *indent(loop),
        ]
        head = over_lines(f"def flat{self.n}(", [*self.of_flat, SIZES[0]], "):")
        return ["@triton.jit", *head, *indent(lines)]

    # ---------------------------------------------------------------- several lanes

    def packed(self) -> list[str]:
        """Return code for several small lanes: lane code for all, then row by row."""
        v, w = self.v, self.w
        rows = [f"p{s}" for s in (*w.lane_slots, *w.element_slots)]
        places = [
            f"{p} = {w.address(int(p[1:])).replace('lane +', 'own +')}" for p in rows
        ]
        lines = [
            f"each = tl.arange(0, {ROWS})",
            "there = each < count",
            "# a row without a lane repeats the first one, and stores nothing",
            f"own = lane + tl.where(there, each, 0) * {RECORD + len(v.slots)}",
            *(["scalars = rows + tl.load(own + 2)"] if v.scalars else []),
            *places,
            *w.lane_lines(),
        ]
        if w.lane_stores:
            lines += ["", *WHOLE.splitlines()]
            lines += [
                w.store(i, s, f"p{s}", f"x{i}", ", mask=there")
                for i, s in w.lane_stores
            ]
        if w.element_stores:
            varies: set[int] = set()
            for i in v.lane_code:
                instr = v.instrs[i]
                per_lane = instr.op in ("load", "scalar")
                if per_lane or any(a in varies for a in instr.args):
                    varies.add(i)
            place = {s: f"a{s}" for s in w.element_slots}
            lines += [
                "",
                *(f"x{i} = x{i}[:, None]" for i in w.handed if i in varies),
                "numel = tl.where(there, tl.load(own + 1), 0)",
                f"for at in range(0, longest, {COLUMNS}):",
                *indent(
                    [
                        f"inside = at + tl.arange(0, {COLUMNS})[None, :]",
                        "mask = inside < numel[:, None]",
                        *(f"a{s} = p{s}[:, None] + inside" for s in w.element_slots),
                        *w.apply(place, "[:, None]"),
                    ]
                ),
            ]
        head = f"def packed{self.n}(lane, count, longest, rows):"
        return ["@triton.jit", head, *indent(lines)]

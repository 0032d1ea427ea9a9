"""The C++ of a variant whose elements have numbers in common by blocks.

Element code runs block by block, in stages: each fold of a block ends one. Arrays of a
block's size hold what a later stage needs. To that stage they are tensors, so each
stage is written as its own variant. Numbers of a block are computed once between the
stages. Where blocks have several sizes, code runs by the largest ones. Arrays hold the
numbers of smaller blocks within, and a stage that needs them runs piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ...ir.blocks import FOLDS, size_of, uniform
from ...ir.graph import Instr, Slot, Variant
from ..optable import CPP_STORAGE, LIBRARY, cpp_load
from ..optable import CPP_TYPES as REGISTER
from .remainder import Tails
from .variant import Function
from .walk import gathers, rooms, scatters


class _Stages:
    """The stages of a variant.

    `level` of an instruction: the stage that computes its result, or the stage before
    which it exists, if it is `common` to a block's elements. `waiting`: the results
    that arrays keep, and the slot of each.
    """

    def __init__(self, v: Variant) -> None:
        instrs, elements = v.instrs, set(v.code)
        self.common = uniform(instrs, elements)
        self.level: dict[int, int] = {}
        used = {x for x, _ in v.stores}
        waits: dict[int, None] = {}
        for x in v.code:
            instr = instrs[x]
            args = instr.args if instr.op not in FOLDS else (_folded(v, x)[1],)
            used.update(args)
            inside = [a for a in args if a in elements]
            varying = [a for a in inside if a not in self.common]
            ends = instr.op in ("first", *FOLDS) and bool(varying)
            before = (self.level[a] for a in inside)
            self.level[x] = max(before, default=0) + ends
            if instr.op != "spread":
                late = [a for a in varying if self.level[a] < self.level[x]]
                waits.update((a, None) for a in late if ends or instrs[a].op != "tail")
        self.waiting = {x: len(v.slots) + k for k, x in enumerate(waits)}
        self.count = max(self.level.values(), default=0) + 1
        #: sizes that nothing reads but a fold, which takes them itself
        self.unread = elements - used

    def part(self, v: Variant, k: int) -> Variant | None:
        """Stage k as a variant, whose last slots are arrays; None if it is empty."""
        own = [x for x in v.code if self.level[x] == k and x not in self.common]
        loaded = {a for x in v.instrs if x.op == "spread" for a in x.args}
        own = [x for x in own if x not in loaded | self.unread]
        stores = [
            (x, s)
            for x, s in v.stores
            if v.slots[s].domain == "element" and self._stored_in(v, x) == k
        ]
        stores += [(x, s) for x, s in self.waiting.items() if self.level[x] == k]
        used = {a for x in own for a in v.instrs[x].args} | {x for x, _ in stores}
        taken = sorted(x for x in used & self.waiting.keys() if self.level[x] < k)
        if not stores:
            return None
        instrs = list(v.instrs)
        for x in taken:
            instrs[x] = Instr("load", (), instrs[x].dtype, self.waiting[x])
        written = {s for _, s in stores}
        read = {
            int(instrs[x].attr or 0) for x in (*own, *taken) if instrs[x].op == "load"
        }
        slots = [
            *v.slots,
            *(Slot(v.instrs[x].dtype, "element", False, False) for x in self.waiting),
        ]
        slots = [
            slot._replace(
                domain="element" if s in written | read else "none",
                read=s in read,
                write=s in written,
            )
            for s, slot in enumerate(slots)
        ]
        return replace(
            v,
            instrs=tuple(instrs),
            code=tuple(sorted([*own, *taken])),
            stores=tuple(stores),
            slots=tuple(slots),
        )

    def _stored_in(self, v: Variant, x: int) -> int:
        return self.level.get(x, 0)


def _folded(v: Variant, x: int) -> tuple[str, int]:
    """Return the C++ function of a fold or `first`, and the instruction with its
    operands. The largest size is that of numbers of any sign, so that no array keeps
    their sizes.
    """
    instr = v.instrs[x]
    (a,) = instr.args
    if instr.op == "block_largest" and v.instrs[a].op == "abs":
        return "block_largest_size", v.instrs[a].args[0]
    return instr.op, a


class Blocks:
    """Writes the functions of one variant with blocks."""

    def __init__(self, number: int, variant: Variant) -> None:
        self.n, self.v = number, variant
        self.w = Function(number, variant)
        self.size = size_of(variant.instrs)
        self.stages = _Stages(variant)
        #: the numbers of blocks within the largest ones, and the sizes of those
        self.smaller = {x: n for x, n in self.stages.common.items() if n < self.size}
        self.parts = [self._part(k) for k in range(self.stages.count)]
        self.slots = self.w.walked("element")

    def _part(self, k: int) -> Function | None:
        part = self.stages.part(self.v, k)
        if part is None:
            return None
        writer = Function(f"{self.n}s{k}", part)
        used = {a for x in part.code for a in part.instrs[x].args}
        tests = [part.instrs[a] for a in sorted(used) if part.instrs[a].op == "tail"]
        writer.tails = Tails(writer.number, replace(self.v, instrs=tuple(tests)))
        writer.handed, writer.n_slots = self.w.handed, self.w.n_slots
        return writer

    def given(self, k: int) -> dict[int, str]:
        """The numbers of a block that stage k needs, and their C++ types."""
        part = self.parts[k]
        assert part is not None
        used = {a for x in part.v.code for a in part.v.instrs[x].args}
        used.update(x for x, _ in part.v.stores)
        common = sorted(used & self.stages.common.keys())
        return {x: REGISTER[self.v.instrs[x].dtype] for x in common}

    # ---------------------------------------------------------------- functions

    def functions(self) -> list[str]:
        """All functions of element code."""
        lines = []
        for k, part in enumerate(self.parts):
            if part is not None:
                given = self.given(k)
                lines += [*part.row(part.walked("element"), given=given), ""]
        return [*lines, *self._span()]

    def _span(self) -> list[str]:
        v, w, n = self.v, self.w, self.n
        places = [s for s, slot in enumerate(v.slots) if slot.domain == "block"]
        common = tuple(x for x in v.code if x in self.stages.common)
        flat = self._loop(False)
        strided = self._loop(True)
        body = [
            *(w.pointer(x.slot) for x in self.slots),
            *w.prologue(places),
            *w.lane_numbers(common, "block"),
            "const int64_t count = t.start[lane + 1] - t.start[lane];",
            f"begin = block_from(begin, {self.size});",
            f"end = end < count ? block_from(end, {self.size}) : count;",
            "end = end < count ? end : count;",
            *(
                f"alignas(64) {self._kind(s)} p{s}[{self.size}];"
                for s in self.stages.waiting.values()
            ),
            *(
                f"{REGISTER[v.instrs[x].dtype]} a{x}[{self.size // size}];"
                for x, size in self.smaller.items()
            ),
            "if (t.strided[lane] < 0) {",
            *(f"  {x}" for x in flat),
            "  return;",
            "}",
            "const int64_t* g = t.geometry + t.strided[lane];",
            f"Walk<{len(self.slots)}> walk(g[0], g + 1, g + 1 + g[0]{self._whole()});",
            *rooms(self.slots),
            *strided,
        ]
        return [
            f"static void span{n}(const Table& t, int64_t lane, int64_t begin, "
            "int64_t end) {",
            *(f"  {x}" for x in body),
            "}",
        ]

    def _whole(self) -> str:
        """Elements that are counted are read where they lie."""
        counted = self.w.counted
        return "".join(f", {k}" for k, x in enumerate(self.slots) if x.slot == counted)

    def _kind(self, slot: int) -> str:
        part = next(x for x in self.parts if x is not None)
        return CPP_STORAGE[part.v.slots[slot].dtype]

    def _loop(self, strided: bool) -> list[str]:
        """All blocks of a range, stage by stage."""
        lines = [
            f"for (int64_t e = begin; e < end; e += {self.size}) {{",
            f"  const int64_t n = count - e < {self.size} ? count - e : {self.size};",
            f"  const int64_t block = e / {self.size};",
        ]
        for k, part in enumerate(self.parts):
            lines += [f"  {x}" for x in self._common(k)]
            if part is not None:
                lines += [f"  {x}" for x in self._run(k, part, strided)]
        within: list[tuple[int, list[int], str]] = []
        for x, s in self.v.stores:
            if self.v.slots[s].domain != "block":
                continue
            if x in self.smaller:
                size = self.smaller[x]
                store = self.w.store(s, f"p{s}[(e + f) / {size}]", x)
                within.append((size, [x], store))
            else:
                lines.append(f"  {self.w.store(s, f'p{s}[block]', x)}")
        for size, taken, store in within:
            lines += [f"  {x}" for x in self._pieces(size, taken, [store])]
        return [*lines, "}"]

    def _pieces(self, size: int, taken: Iterable[int], lines: list[str]) -> list[str]:
        """Return lines for each smaller block, from element f on within the largest.

        `taken`: the numbers of such blocks, or larger ones, that they use.
        """
        kinds = {x: REGISTER[self.v.instrs[x].dtype] for x in taken}
        read = [
            f"const {kind} x{x} = a{x}[f / {self.smaller[x]}];"
            for x, kind in kinds.items()
        ]
        return [
            f"for (int64_t f = 0; f < n; f += {size}) {{",
            f"  const int64_t m = n - f < {size} ? n - f : {size};",
            *(f"  {x}" for x in (*read, *lines)),
            "}",
        ]

    def _common(self, k: int) -> list[str]:
        """The numbers of blocks that are there before stage k."""
        level, common = self.stages.level, self.stages.common
        own = [x for x in self.v.code if x in common and level[x] == k]
        lines: list[str] = []
        for size in sorted({common[x] for x in own}, reverse=True):
            numbers = [x for x in own if common[x] == size]
            if size == self.size:
                lines += [y for x in numbers for y in self._number(x, "", "n")]
                continue
            inside: list[str] = []
            for x in numbers:
                inside += self._number(x, " + f", "m")
                inside.append(f"a{x}[f / {size}] = x{x};")
            args = {a for x in numbers for a in self.v.instrs[x].args}
            taken = sorted((args & self.smaller.keys()) - {*numbers})
            lines += self._pieces(size, taken, inside)
        return lines

    def _number(self, x: int, offset: str, n: str) -> list[str]:
        """One number of a block of n elements, from `offset` on in arrays."""
        v, common = self.v, self.stages.common
        instr = v.instrs[x]
        kind = REGISTER[instr.dtype]
        if instr.op == "spread":
            slot = int(v.instrs[instr.args[0]].attr or 0)
            place = f"(e + f) / {instr.attr}" if offset else "block"
            value = cpp_load(instr.dtype, f"p{slot}[{place}]")
            return [f"const {kind} x{x} = {value};"]
        if instr.op in ("first", *FOLDS):
            op, a = _folded(v, x)
            value = self.w.name(instr.args[0])
            if a in self.stages.waiting:
                array = f"p{self.stages.waiting[a]}{offset}"
                first = f"({array})[0]" if offset else f"{array}[0]"
                loaded = cpp_load(instr.dtype, first)
                value = loaded if op == "first" else f"{op}({array}, {n})"
            elif common.get(a, self.size) < common[x]:
                # of the numbers of smaller blocks
                size, place = common[a], "f" if offset else "0"
                array, count = (
                    f"a{a} + {place} / {size}",
                    f"({n} + {size - 1}) / {size}",
                )
                value = f"({array})[0]" if op == "first" else f"{op}({array}, {count})"
            return [f"const {kind} x{x} = {value};"]
        if (instr.op, instr.dtype) in LIBRARY:
            return self.w.call_once(x)
        return [self.w.compute(x)]

    def _run(self, k: int, part: Function, strided: bool) -> list[str]:
        """Stage k of a block, in pieces if it needs numbers of smaller blocks."""
        call = self._strided if strided else self._flat
        taken = [x for x in self.given(k) if x in self.smaller]
        if not taken:
            return call(k, part, "e", "", "n")
        size = min(self.smaller[x] for x in taken)
        return self._pieces(size, taken, call(k, part, "e + f", " + f", "m"))

    def _flat(
        self, k: int, part: Function, begin: str, offset: str, n: str
    ) -> list[str]:
        places = [
            f", p{x.slot} + {begin}"
            if x.slot < self.w.n_slots
            else f", p{x.slot}{offset}"
            for x in part.walked("element")
        ]
        given = "".join(f", x{x}" for x in self.given(k))
        return [f"piece{part.number}(t, lane, {begin}, {n}{''.join(places)}{given});"]

    def _strided(
        self, k: int, part: Function, begin: str, offset: str, n: str
    ) -> list[str]:
        own = part.walked("element")
        number = {x.slot: k for k, x in enumerate(self.slots)}
        places = "".join(
            f", q{x.slot}" if x.slot in number else f", p{x.slot} + (i - e)"
            for x in own
        )
        given = "".join(f", x{x}" for x in self.given(k))
        walked = [x for x in own if x.slot in number]
        m = "m" if n == "n" else "w"
        before = [
            line for x in walked for line in gathers("walk", [x], m, number[x.slot])
        ]
        after = [
            line for x in walked for line in scatters("walk", [x], m, number[x.slot])
        ]
        return [
            f"walk.seek({begin});",
            f"for (int64_t i = {begin}, {m}; i < {begin} + {n}; i += {m}) {{",
            f"  {m} = walk.take({begin} + {n} - i);",
            *(f"  {x}" for x in before),
            f"  piece{part.number}(t, lane, i, {m}{places}{given});",
            *(f"  {x}" for x in after),
            f"  walk.advance({m});",
            "}",
        ]

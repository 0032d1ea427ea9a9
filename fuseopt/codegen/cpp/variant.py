"""C++ of one variant: lane code, and element code over a range of elements.

Lane code runs once per lane (step counters, bias corrections). Element code is a loop
over neighbours; between loops over blocks it calls the vector library. If the tensors
of a lane share one dense layout, the lane is one run of neighbours. Otherwise blocks
are gathered.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...ir.graph import Variant
from .. import optable
from ..optable import CPP_STORAGE as STORAGE
from ..optable import CPP_TYPES as REGISTER
from ..optable import LIBRARY
from ..target import lane_values
from .instructions import Instructions
from .loop import divisors, loop
from .walk import WalkedSlot, gathers, rooms, scatters


def remembers(variant: Variant) -> bool:
    """Is lane code long enough that a comparison with the previous lane pays?"""
    free = ("scalar", "const", "tail", "load")
    return any(variant.instrs[i].op not in free for i in variant.lane_code)


def has_lane_phase(variant: Variant) -> bool:
    """Does lane code have results: numbers for elements, or stores?"""
    stores = any(variant.slots[s].domain == "lane" for _, s in variant.stores)
    return stores or bool(lane_values(variant))


def has_elements(variant: Variant) -> bool:
    """Does it have a slot of elements, or only of numbers?"""
    return any(slot.domain == "element" for slot in variant.slots)


class Function(Instructions):
    """Writes the functions of one variant."""

    def lane(self) -> list[str]:
        """Return lane code: it runs once per lane, before any element.

        Most lanes compute the numbers of the previous lane, from the same scalars and
        an equal step. Those are kept, and reused if the bits that were read are equal.
        """
        v, n = self.v, self.number
        slots = [s for s, slot in enumerate(v.slots) if slot.domain == "lane"]
        keeps = remembers(v)
        stores = [(i, s) for i, s in v.stores if v.slots[s].domain == "lane"]
        loads = [i for i in v.lane_code if v.instrs[i].op == "load"]
        stored = [i for i, _ in stores if v.instrs[i].op != "const"]
        kept = list(dict.fromkeys([*loads, *stored, *self.handed]))
        kinds = [REGISTER[v.instrs[i].dtype] for i in kept]
        results = [self.store(s, f"p{s}[0]", i) for i, s in stores] + [
            f"t.values[lane * {len(self.handed)} + {k}] = (double)x{i};"
            for i, k in self.handed.items()
        ]
        body = self.prologue(slots)
        body += [self.load(i, f"p{v.instrs[i].attr}[0]") for i in loads]
        if keeps:
            same = "".join(f" && same(last.x{i}, x{i})" for i in loads)
            body += [
                f"if (last.known && last.row == t.row[lane]{same}) {{",
                *(
                    f"  const {kind} x{i} = last.x{i};"
                    for i, kind in zip(kept, kinds, strict=True)
                    if i not in loads
                ),
                *(f"  {line}" for line in results),
                "  return;",
                "}",
            ]
        for i in v.lane_code:
            instr = v.instrs[i]
            if instr.op == "scalar":
                body.append(self.scalar(i))
            elif (instr.op, instr.dtype) in LIBRARY:
                body += self.call_once(i)
            elif instr.op not in ("const", "tail", "load"):
                body.append(self.compute(i))
        body += results
        last = ""
        lines = []
        if keeps:
            last = f", Lane{n}& last"
            body.append(
                f"last = {{true, t.row[lane]{''.join(f', x{i}' for i in kept)}}};"
            )
            lines = [
                f"struct Lane{n} {{  // what the lane before read and made",
                "  bool known;",
                "  int32_t row;",
                *(f"  {kind} x{i};" for i, kind in zip(kept, kinds, strict=True)),
                "};",
            ]
        return [
            *lines,
            f"static void lane{n}(const Table& t, int64_t lane{last}) {{",
            "  const bool TAIL = true;  // one element is never a vector",
            "  (void)TAIL;",
            *(f"  {line}" for line in body),
            "}",
        ]

    def lane_numbers(self, code: tuple[int, ...], domain: str) -> list[str]:
        """Return lines that read the numbers of lane code for code and stores of a
        domain.
        """
        v = self.v
        taken = {a for i in code for a in v.instrs[i].args}
        taken.update(i for i, s in v.stores if v.slots[s].domain == domain)
        if domain == "element":
            taken.update(v.instrs[i].args[0] for i in v.folds)
        lines = []
        for i in sorted(taken & set(v.lane_code)):
            instr = v.instrs[i]
            if instr.op == "scalar":
                lines.append(self.scalar(i))
            elif i in self.handed:
                place = f"t.values[lane * {len(self.handed)} + {self.handed[i]}]"
                lines.append(self.taken(i, place))
        return lines

    def walked(self, domain: str) -> list[WalkedSlot]:
        """Return the slots of a domain, in the order of their strides in the table."""
        return [
            WalkedSlot(s, STORAGE[slot.dtype], slot.read, slot.write)
            for s, slot in enumerate(self.v.slots)
            if slot.domain == domain
        ]

    def row(
        self,
        slots: list[WalkedSlot],
        arrays: str = "",
        given: Mapping[int, str] | None = None,
    ) -> list[str]:
        """Element code over neighbours, and a piece: the same, of any tails.

        `arrays`: parameters that get what is folded. `given`: the types of instructions
        whose results are parameters.
        """
        v, n = self.v, self.number
        parameters = (
            "".join(f", {x.kind}* __restrict__ p{x.slot}" for x in slots) + arrays
        )
        taken = "".join(f", x{x}" for x in given or ())
        parameters += "".join(f", {kind} x{x}" for x, kind in (given or {}).items())
        body = self.prologue([]) + self.lane_numbers(v.code, "element")
        body += [
            f"const int64_t at = p{x.slot} - "
            f"({x.kind}*)t.pool[t.position[lane * {self.n_slots} + {x.slot}]];"
            for x in slots
            if x.slot == self.counted
        ]
        lines = [
            f"template <{self.tails.kind} TAIL>",
            f"static void row{n}(const Table& t, int64_t lane, "
            f"int64_t count{parameters}) {{",
            *(f"  {x}" for x in [*body, *self.blocks()]),
            "}",
        ]
        names = [f"p{x.slot}" for x in slots]
        names += [f"y{k}" for k in range(len(v.folds))]
        head = (
            f"static void piece{n}(const Table& t, int64_t lane, int64_t e, "
            f"int64_t count{parameters}) {{"
        )
        if not self.tails.kinds:
            all_of = "".join(f", {x}" for x in names)
            call = f"  row{n}<false>(t, lane, count{all_of}{taken});"
            return [*lines, "", head, call, "}"]
        moved = "".join(f", {x} + done" for x in names) + taken
        return [
            *lines,
            "",
            *self.tails.ends(),
            "",
            head,
            "  for (int64_t done = 0, stop; done < count;) {",
            f"    int tail = {self.tails.every};",
            "    int64_t m = count - done;",
            "    if (e >= 0) {  // else its place in eager's loop is not known",
            f"      tail = tails{n}(t, lane, e + done, e + count, &stop);",
            "      m = stop - e - done;",
            "    }",
            *(f"    {x}" for x in self.tails.call(f"row{n}", f"(t, lane, m{moved})")),
            "    done += m;",
            "  }",
            "}",
        ]

    def element(self) -> list[str]:
        """Return element code for elements [begin, end) of one lane."""
        n, slots = self.number, self.walked("element")
        if not slots:
            return [
                f"static void span{n}(const Table&, int64_t, int64_t, int64_t) {{}}"
            ]
        flat = "".join(f", p{x.slot} + begin" for x in slots)
        near = "".join(f", q{x.slot}" for x in slots)
        body = [self.pointer(x.slot) for x in slots]
        # elements that are counted are read in place
        whole = "".join(f", {k}" for k, x in enumerate(slots) if x.slot == self.counted)
        body += [
            "if (t.strided[lane] < 0) {",
            f"  piece{n}(t, lane, begin, end - begin{flat});",
            "  return;",
            "}",
            "const int64_t* g = t.geometry + t.strided[lane];",
            f"Walk<{len(slots)}> walk(g[0], g + 1, g + 1 + g[0]{whole});",
            *rooms(slots),
            "walk.seek(begin);",
            "for (int64_t e = begin, n; e < end; e += n) {",
            "  n = walk.take(end - e);",
            *(f"  {x}" for x in gathers("walk", slots, "n")),
            f"  piece{n}(t, lane, e, n{near});",
            *(f"  {x}" for x in scatters("walk", slots, "n")),
            "  walk.advance(n);",
            "}",
        ]
        return [
            *self.row(slots),
            "",
            f"static void span{n}(const Table& t, int64_t lane, int64_t begin, "
            "int64_t end) {",
            *(f"  {x}" for x in body),
            "}",
        ]

    def blocks(self) -> list[str]:
        """Return a loop over `count` elements, or loops with library calls between.

        `p` of a slot points to the first of them, and `y` to the folded values.
        """
        plan = self.phases
        if plan.count == 1 and not self.divisions:
            return ["const int64_t i = 0, n = count;", *loop(self, 0)]
        lines = [
            *divisors(self),
            "for (int64_t i = 0; i < count; i += BLOCK) {",
            "  const int64_t n = count - i < BLOCK ? count - i : BLOCK;",
        ]
        for x in sorted(plan.spilled):
            kind = REGISTER[self.v.instrs[x].dtype]
            lines.append(f"  alignas(64) {kind} s{x}[BLOCK];")
        for k in range(plan.count):
            for x in plan.calls.get(k, ()):
                instr = self.v.instrs[x]
                args = [self.argument(x, a) for a in instr.args]
                kind = REGISTER[instr.dtype]
                lines += [
                    f"  const {kind} one{x}_{a} = {self.name(a)};"
                    for a in dict.fromkeys(instr.args)
                    if a not in self.elements
                ]
                call = optable.library_call(instr.op, instr.dtype, "n", args, f"s{x}")
                lines.append(f"  {call}")
            lines += [f"  {line}" for line in loop(self, k)]
        return [*lines, "}"]

    def argument(self, call: int, a: int) -> tuple[str, int]:
        """Return the address of a library call's argument, and the step to the next
        element.

        The elements are in memory, in an array, or one number for all.
        """
        if a not in self.elements:
            return f"&one{call}_{a}", 0
        slot = self.phases.direct.get((call, a))
        return (f"s{a}", 1) if slot is None else (f"p{slot} + i", 1)

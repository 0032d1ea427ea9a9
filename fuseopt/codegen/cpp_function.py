"""The C++ of one variant: lane code, and element code over a range of elements.

Lane code runs once per lane (step counters, bias corrections). Element code has a flat
loop, for lanes whose tensors share one dense layout, and a strided one; between loops
over blocks it calls the vector library.
"""

from __future__ import annotations

from ..ir import BY_ROWS, Variant
from . import forms
from .cpp_loop import loop
from .forms import CPP_STORAGE as STORAGE
from .forms import CPP_TYPES as REGISTER
from .forms import LIBRARY
from .halves import known
from .phases import phases
from .target import lane_values


def remembers(variant: Variant) -> bool:
    """Does lane code compute enough to ask whether the lane before did the same?"""
    free = ("scalar", "const", "tail", "load")
    return any(variant.instrs[i].op not in free for i in variant.lane_code)


class Function:
    """Writes the functions of one variant."""

    def __init__(self, number: int, variant: Variant) -> None:
        self.number = number
        self.v = variant
        self.handed = {x: k for k, x in enumerate(lane_values(variant))}
        self.n_slots = len(variant.slots)
        self.elements = frozenset(variant.code)
        self.n_elements = sum(s.domain == "element" for s in variant.slots)
        #: the kinds of vector loops whose rest is asked for, see `ir.ARITY`
        self.tails = sorted(
            {i.attr for i in variant.instrs if i.op == "tail" and i.attr}
        )
        self.known = known(variant)
        self.has_halves = any(i.dtype in forms.NARROW for i in variant.instrs)
        library = frozenset(op for op, _ in LIBRARY)
        #: of lanes whose elements are neighbours, and of others
        self.phases = {near: phases(variant, library, near) for near in (True, False)}

    def name(self, i: int) -> str:
        instr = self.v.instrs[i]
        if instr.op == "tail":
            if len(self.tails) < 2 or not instr.attr:
                return "TAIL"
            return f"(TAIL >> {self.tails.index(instr.attr)} & 1)"
        if instr.op == "const":
            return forms.cpp_literal(float(instr.attr or 0.0), instr.dtype)
        return f"x{i}"

    def compute(self, i: int, vector: bool = False) -> str:
        instr = self.v.instrs[i]
        if instr.op == "cast" and instr.dtype in forms.NARROW:
            text = self.rounded(instr.args[0], instr.dtype, vector)
        else:
            args = [self.name(a) for a in instr.args]
            text = forms.cpp(instr, args, [self.v.instrs[a].dtype for a in instr.args])
        return f"const {REGISTER[instr.dtype]} x{i} = {text};"

    def scalar(self, i: int) -> str:
        return self.taken(i, f"scalars[{self.v.instrs[i].attr}]")

    def taken(self, i: int, place: str) -> str:
        """Lane code's number, from a double in memory."""
        kind = REGISTER[self.v.instrs[i].dtype]
        text = f"({kind}){place}"
        if self.has_halves and kind in ("float", "double"):
            text = f"calmed({text})"
        return f"const {kind} x{i} = {text};"

    def pointer(self, s: int) -> str:
        kind = STORAGE[self.v.slots[s].dtype]
        return (
            f"{kind}* __restrict__ p{s} = ({kind}*)"
            f"t.pool[t.position[lane * {self.n_slots} + {s}]];"
        )

    def prologue(self, slots: list[int]) -> list[str]:
        lines = [self.pointer(s) for s in slots]
        if self.v.scalars:
            n = len(self.v.scalars)
            lines.append(
                f"const double* __restrict__ scalars = t.rows + t.row[lane] * {n};"
            )
        return lines

    def lane(self) -> list[str]:
        """Lane code: runs once per lane, before any element.

        Most lanes make the numbers of the lane before them, from the same scalars and
        an equal step: those are kept, and taken where the bits that were read are.
        """
        v, n = self.v, self.number
        slots = [s for s, slot in enumerate(v.slots) if slot.domain == "lane"]
        keeps = remembers(v)
        stores = [(i, s) for i, s in v.stores if v.slots[s].domain == "lane"]
        loads = [i for i in v.lane_code if v.instrs[i].op == "load"]
        made = [i for i, _ in stores if v.instrs[i].op != "const"]
        kept = list(dict.fromkeys([*loads, *made, *self.handed]))
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

    def load(self, i: int, place: str) -> str:
        dtype = self.v.instrs[i].dtype
        return f"const {REGISTER[dtype]} x{i} = {forms.cpp_load(dtype, place)};"

    def store(self, s: int, place: str, i: int) -> str:
        dtype = self.v.slots[s].dtype
        return f"{place} = {forms.cpp_store(self.rounded(i, dtype), dtype)};"

    def rounded(self, i: int, dtype: str, vector: bool = False) -> str:
        """Instruction i as a number that `dtype` has; `vector`: where many are made."""
        x = self.name(i)
        if dtype not in forms.NARROW or dtype in self.known.fits[i]:
            return x
        if dtype == "f16":
            return f"{'vector' if vector else 'round'}_f16({x})"
        calm = i in self.elements and self.known.calm[i]
        return f"{'calm' if calm else 'round'}_bf16({x})"

    def call_once(self, i: int) -> list[str]:
        """A function of a vector library, of one number."""
        instr = self.v.instrs[i]
        kind = REGISTER[instr.dtype]
        names = [f"a{i}", f"b{i}"][: len(instr.args)]
        given = [
            f"{a} = {self.name(x)}, " for a, x in zip(names, instr.args, strict=True)
        ]
        args = [(f"&{a}", 1) for a in names]
        call = forms.library_call(instr.op, instr.dtype, "1", args, f"&x{i}")
        return [f"{kind} {''.join(given)}x{i};", call]

    def lane_numbers(self, code: tuple[int, ...], domain: str) -> list[str]:
        """What code and the stores of a domain take from lane code."""
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

    def element(self) -> list[str]:
        """Element code: elements [begin, end) of one lane."""
        v, n = self.v, self.number
        slots = [s for s, slot in enumerate(v.slots) if slot.domain == "element"]
        lines = [
            f"template <{'int' if len(self.tails) > 1 else 'bool'} TAIL>",
            f"static void run{n}(const Table& t, int64_t lane, int64_t begin, "
            "int64_t end) {",
        ]
        body = self.prologue(slots)
        body += self.lane_numbers(v.code, "element")
        body.append("if (t.strided[lane] < 0) {")
        flat = self.blocks("begin", "end", {s: f"p{s}[i + j]" for s in slots}, True)
        body += [f"  {x}" for x in flat]
        body += ["  return;", "}"]
        body += self.strided(slots)
        return [*lines, *(f"  {line}" for line in body), "}", "", *self.span()]

    def span(self) -> list[str]:
        """Split a range where eager's vector loops end, if a rounding depends on it."""
        n = self.number
        lines = [
            f"static void span{n}(const Table& t, int64_t lane, int64_t begin, "
            "int64_t end) {"
        ]
        if not self.tails:
            return [*lines, f"  run{n}<false>(t, lane, begin, end);", "}"]
        return [
            *self.ends(),
            *lines,
            "  while (begin < end) {",
            "    int64_t stop;",
            f"    const int tail = tails{n}(t, lane, begin, end, &stop);",
            *(f"    {x}" for x in self.by_tail(f"run{n}", "(t, lane, begin, stop)")),
            "    begin = stop;",
            "  }",
            "}",
        ]

    def by_tail(self, function: str, call: str) -> list[str]:
        """Call the instance of a function for the tails that hold."""
        if len(self.tails) < 2:
            return [
                f"if (tail) {function}<true>{call};",
                f"else {function}<false>{call};",
            ]
        return [
            f"if (tail == {k}) {function}<{k}>{call};"
            for k in range(1 << len(self.tails))
        ]

    def ends(self) -> list[str]:
        """Which tails hold from an element on, and how far that is so."""
        kinds = [int(x) for x in self.tails]
        lines = [
            f"static inline int tails{self.number}(const Table& t, int64_t lane, "
            "int64_t e,",
            "                         int64_t end, int64_t* stop) {",
            "  const int64_t count = t.start[lane + 1] - t.start[lane];",
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
                f"  const int64_t l{k} = {start} + {size} - {size} % {group};",
                f"  if ({'!vectors || ' if by_rows else ''}e >= l{k}) {{",
                f"    tail |= {1 << k};",
            ]
            if by_rows:
                lines.append("    if (row + length < *stop) *stop = row + length;")
            lines.append(f"  }} else if (l{k} < *stop) *stop = l{k};")
        return [*lines, "  return tail;", "}"]

    def row_of_eager(self) -> list[str]:
        """The row of an element in a lane whose tensors differ in layout."""
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
        """Elements that eager's loop takes at a time."""
        return "32" if kind == 1 else f"(2 * t.library->vector / {kind})"

    def strided(self, slots: list[int]) -> list[str]:
        """The loop for lanes whose tensors differ in layout: an odometer of offsets."""
        place = {s: f"p{s}[o{s} + (i + j) * w{s}]" for s in slots}
        inner = self.blocks("0", "run", place, False)
        lines = [
            "const int64_t* g = t.geometry + t.strided[lane];",
            "const int64_t dims = *g++;",
            "const int64_t* size = g;",
            "g += dims;",
            "const int64_t inner = size[dims - 1];",
        ]
        lines += [
            f"const int64_t w{s} = g[{k} * dims + dims - 1];"
            for k, s in enumerate(slots)
        ]
        return [
            *lines,
            "for (int64_t e = begin; e < end;) {",
            "  int64_t rest = e / inner;",
            "  const int64_t column = e % inner;",
            "  const int64_t row = inner - column;",
            "  const int64_t run = row < end - e ? row : end - e;",
            *(f"  int64_t o{s} = column * w{s};" for s in slots),
            "  for (int64_t d = dims - 2; d >= 0; --d) {",
            "    const int64_t c = rest % size[d];",
            "    rest /= size[d];",
            *(f"    o{s} += c * g[{k} * dims + d];" for k, s in enumerate(slots)),
            "  }",
            *(f"  {x}" for x in inner),
            "  e += run;",
            "}",
        ]

    def blocks(
        self, begin: str, end: str, place: dict[int, str], vector: bool
    ) -> list[str]:
        """Loop over [begin, end): one loop, or blocks with library calls between."""
        plan = self.phases[vector]
        if plan.count == 1:
            return [
                f"const int64_t i = {begin}, n = {end} - i;",
                *loop(self, 0, place, vector),
            ]
        lines = [
            f"for (int64_t i = {begin}; i < {end}; i += BLOCK) {{",
            f"  const int64_t n = {end} - i < BLOCK ? {end} - i : BLOCK;",
        ]
        for x in sorted(plan.spilled):
            kind = REGISTER[self.v.instrs[x].dtype]
            lines.append(f"  alignas(64) {kind} s{x}[BLOCK];")
        for k in range(plan.count):
            for x in plan.calls.get(k, ()):
                instr = self.v.instrs[x]
                args = [self.argument(x, a, vector) for a in instr.args]
                kind = REGISTER[instr.dtype]
                lines += [
                    f"  const {kind} one{x}_{a} = {self.name(a)};"
                    for a in dict.fromkeys(instr.args)
                    if a not in self.elements
                ]
                call = forms.library_call(instr.op, instr.dtype, "n", args, f"s{x}")
                lines.append(f"  {call}")
            lines += [f"  {line}" for line in loop(self, k, place, vector)]
        return [*lines, "}"]

    def argument(self, call: int, a: int, vector: bool) -> tuple[str, int]:
        """Where a library finds the elements of an argument, and the step to the next:
        in memory, in an array, or one number for all.
        """
        if a not in self.elements:
            return f"&one{call}_{a}", 0
        slot = self.phases[vector].direct.get((call, a))
        return (f"s{a}", 1) if slot is None else (f"p{slot} + i", 1)

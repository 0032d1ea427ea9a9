"""C++ loop over the elements of one phase, see phases.

If most reads and writes of a loop are 16-bit floats, it takes two neighbours at a time,
as one word of 32 bits. The code of an element is then a function of its numbers,
written once.
"""

from __future__ import annotations

from ..optable import CPP_TYPES as REGISTER
from ..optable import NARROW, cpp_load
from .instructions import Instructions


def place(slot: int) -> str:
    """Return the address of element i + j of a slot."""
    return f"p{slot}[i + j]"


class _Loop:
    """Reads and writes of one phase, by slot, and the lines between."""

    def __init__(self, w: Instructions, k: int, multiplies: bool = False) -> None:
        self.w, self.k = w, k
        #: divisions that are made by multiplying
        self.products = w.phases.divided[k] if multiplies else ()
        v, plan = w.v, w.phases
        self.plan = plan
        #: instruction -> slot
        self.loads = dict(plan.reloaded[k])
        for x in plan.code[k]:
            if v.instrs[x].op == "load":
                self.loads[x] = int(v.instrs[x].attr or 0)
        self.code = [x for x in plan.code[k] if v.instrs[x].op not in ("load", "tail")]
        self.arrays = [x for x in plan.reads[k] if x not in plan.reloaded[k]]
        self.spilled = sorted(plan.spilled & {*self.code, *self.loads})
        self.stores = plan.stores[k]

    def dtype(self, slot: int) -> str:
        slots = self.w.v.slots
        return slots[slot].dtype if slot < len(slots) else ""

    def is_pairs(self) -> bool:
        """Does the loop take two neighbours at a time?"""
        slots = [*self.loads.values(), *(s for _, s in self.stores)]
        dtypes = [self.dtype(s) for s in slots]
        narrow = sum(d in NARROW for d in dtypes)
        others = len(dtypes) - narrow + len(self.arrays) + len(self.spilled)
        return narrow > others or "f16" in dtypes

    def body(self, paired: bool) -> list[str]:
        """Return the code of element j; in a pair, without reads and writes of 16-bit
        floats.
        """
        w, instrs = self.w, self.w.v.instrs
        lines = []
        for x in sorted([*self.arrays, *self.loads, *self.code]):
            kind = REGISTER[instrs[x].dtype]
            if x in self.arrays:
                lines.append(f"const {kind} x{x} = s{x}[j];")
            elif x in self.products:
                lines += self.product(x)
            elif x not in self.loads:
                lines.append(w.compute(x, True))
            elif not (paired and self.dtype(self.loads[x]) in NARROW):
                loaded = cpp_load(instrs[x].dtype, place(self.loads[x]))
                lines.append(f"const {kind} x{x} = {loaded};")
        lines += [f"s{x}[j] = x{x};" for x in self.spilled]
        for x, s in self.stores:
            dtype = self.dtype(s)
            if not dtype:
                lines.append(f"y{s - w.n_slots}[i + j] = {w.name(x)};")
            elif paired and dtype in NARROW:
                lines.append(f"to{s} = {w.rounded(x, dtype, True)};")
            else:
                lines.append(w.store(s, place(s), x))
        return lines

    def product(self, x: int) -> list[str]:
        """Return a division that is made by multiplying, and the test of its range."""
        over = self.w.name(self.w.v.instrs[x].args[0])
        return [
            f"const float x{x} = by{x}.divide({over});",
            f"const uint32_t u{x} = size_bits({over}), v{x} = 0u - u{x};",
            f"top{x} = u{x} > top{x} ? u{x} : top{x};",
            f"low{x} = v{x} > low{x} ? v{x} : low{x};",
        ]

    def single(self) -> list[str]:
        return [
            "#pragma GCC ivdep",
            "for (int64_t j = 0; j < n; ++j) {",
            *(f"  {x}" for x in self.body(False)),
            "}",
        ]

    def pairs(self) -> list[str]:
        reads = {x: s for x, s in self.loads.items() if self.dtype(s) in NARROW}
        writes = [s for _, s in self.stores if self.dtype(s) in NARROW]
        slots = dict.fromkeys([*reads.values(), *writes])
        takes = [f"float x{x}" for x in reads] + [f"float& to{s}" for s in writes]

        def element(j: str, read: str, end: str) -> str:
            arguments = [
                read.format(s=s, dtype=self.dtype(s), place=place(s))
                for s in reads.values()
            ]
            arguments = [j, *arguments, *(f"{end}{s}" for s in writes)]
            return f"each{self.k}({', '.join(arguments)});"

        results = ", ".join(f"a{s}, b{s}" for s in writes)
        return [
            f"const auto each{self.k} = [&](int64_t j, {', '.join(takes)})",
            "    __attribute__((always_inline)) {",
            *(f"  {x}" for x in self.body(True)),
            "};",
            "#pragma GCC ivdep",
            "for (int64_t j = 0; j < n - 1; j += 2) {",
            *(f"  Pair* w{s} = (Pair*)&{place(s)};" for s in slots),
            *([f"  float {results};"] if writes else []),
            f"  {element('j', 'first_{dtype}(*w{s})', 'a')}",
            f"  {element('j + 1', 'second_{dtype}(*w{s})', 'b')}",
            *(f"  *w{s} = pair_{self.dtype(s)}(a{s}, b{s});" for s in writes),
            "}",
            "if (n & 1) {",
            "  const int64_t j = n - 1;",
            *([f"  float {', '.join(f'a{s}' for s in writes)};"] if writes else []),
            "  " + element("j", "from_{dtype}({place})", "a"),
            *(f"  {place(s)} = to_{self.dtype(s)}(a{s});" for s in writes),
            "}",
        ]

    def lines(self) -> list[str]:
        return self.pairs() if self.is_pairs() else self.single()


def loop(w: Instructions, k: int) -> list[str]:
    """Return the loop of phase k over a block of n neighbours from i.

    If it makes divisions by multiplying, it runs again for numbers near the ends of the
    range, and divides.
    """
    divided = w.phases.divided[k]
    if not divided:
        return _Loop(w, k).lines()
    return [
        f"bool done{k} = {' && '.join(f'by{x}.fits' for x in divided)};",
        f"if (done{k}) {{",
        *(f"  uint32_t top{x} = 0, low{x} = 0;" for x in divided),
        *(f"  {x}" for x in _Loop(w, k, True).lines()),
        f"  done{k} = {' && '.join(f'by{x}.has(top{x}, low{x})' for x in divided)};",
        "}",
        f"if (!done{k}) {{",
        *(f"  {x}" for x in _Loop(w, k).lines()),
        "}",
    ]


def divisors(w: Instructions) -> list[str]:
    """Return lines before all loops: the numbers by which they divide."""
    if not w.divisions:
        return []
    lines = ["const bool plain = MULTIPLIES && rounds_to_nearest();"]
    for x in w.divisions:
        lines.append(f"const Divisor by{x}({w.name(w.v.instrs[x].args[1])}, plain);")
    return lines

"""A variant -> Triton: the functions that its chunks run.

A chunk runs its lane's scalar code in registers, then its elements on a main path of
16-byte accesses. What that path cannot take (a lane whose tensors differ in layout, one
that is not aligned, the last few elements of a lane) goes through a general path. Of
lanes of few elements one program takes several, a row of threads for each.
"""

from __future__ import annotations

from ..ir import Variant, makes_numbers
from . import forms
from .forms import TRITON_TYPES as TYPES
from .triton_text import indent, over_lines

#: Fields of a lane's record before its addresses, and what `layout` holds for lanes
#: without geometry. The runtime's tables follow these.
RECORD = 4
FLAT, ALIGNED = -1, -2
#: The main path moves elements in groups of this many: 16 bytes of the narrowest type.
GROUP = 16
CHUNK_FIELDS = 4
#: Lanes of a program that takes several, elements of each at a time, and elements that
#: a lane may have to be one of them.
ROWS, COLUMNS, SMALL = 8, 32, 128

SIZES = ("BLOCK: tl.constexpr", "REST: tl.constexpr")

#: Above the lane stores of a program that takes whole lanes.
WHOLE = """\
# No other program reads what is stored here: each of these lanes is whole in this
# one. Its own threads have read before the barrier.
tl.debug_barrier()
"""
#: After the loads of the main path.
UNDER_WAY = """\
# All loads are under way before the first is waited for. To save registers, the
# assembler would begin some when others' numbers are used up; but nothing can be
# computed without the lane's numbers, which are asked for behind this barrier.
tl.debug_barrier()
"""
#: Above a lane's stores.
TICKET = """\
# Every chunk of the lane reads what is stored here. Each takes a ticket once it has
# read, and the one that takes the last stores. All its threads' reads come before
# the barrier, the barrier before the ticket, and the ticket, which releases and
# acquires, before the last taker's stores: so each read happens before each store,
# and none sees a new number.
"""


class Function:
    """Writes the functions of one variant."""

    def __init__(self, number: int, variant: Variant, fast: bool = False) -> None:
        self.v = variant
        self.fast = fast
        self.number = number
        slots = variant.slots
        self.lane_slots = [s for s, x in enumerate(slots) if x.domain == "lane"]
        self.element_slots = [s for s, x in enumerate(slots) if x.domain == "element"]
        self.lane_stores = [x for x in variant.stores if slots[x[1]].domain == "lane"]
        self.element_stores = [
            x for x in variant.stores if slots[x[1]].domain == "element"
        ]
        self.loads = [i for i in variant.code if variant.instrs[i].op == "load"]
        used = {a for i in variant.code for a in variant.instrs[i].args}
        used.update(i for i, _ in self.element_stores)
        used.update(variant.instrs[i].args[0] for i in variant.folds)
        self.lane = frozenset(variant.lane_code)
        #: what element code takes from lane code, and the constants it names
        lane = used & set(variant.lane_code)
        self.handed = sorted(i for i in lane if not self.is_const(i))
        self.consts = sorted(i for i in used if self.is_const(i))

    def is_const(self, i: int) -> bool:
        return self.v.instrs[i].op in ("const", "tail")

    def name(self, i: int) -> str:
        return f"x{i}"

    def assign(self, i: int) -> str:
        """The line that computes instruction i, which is no load."""
        instr = self.v.instrs[i]
        if instr.op == "const":
            value = forms.triton_literal(float(instr.attr or 0.0), instr.dtype)
        elif instr.op == "tail":
            # a GPU's loops leave nothing over
            value = forms.triton_literal(0.0, "b8")
        elif instr.op == "scalar":
            value = forms.triton_cast(
                f"tl.load(scalars + {instr.attr})", "f64", instr.dtype
            )
        else:
            args = [self.name(a) for a in instr.args]
            dtypes = [self.v.instrs[a].dtype for a in instr.args]
            kept = self.unrounded(i)
            value = (
                self.name(kept)
                if kept is not None
                else forms.triton(instr, args, dtypes, self.fast)
            )
        return f"{self.name(i)} = {value}"

    def unrounded(self, i: int) -> int | None:
        """The f32 number that instruction i has back after it was rounded to a half.

        "fast" goes on with it; what is stored is rounded all the same.
        """
        instrs = self.v.instrs
        if not self.fast or instrs[i].op != "cast" or instrs[i].dtype != "f32":
            return None
        half = instrs[i].args[0]
        if instrs[half].op != "cast" or instrs[half].dtype not in forms.NARROW:
            return None
        wide = instrs[half].args[0]
        same_code = (wide in self.lane) == (i in self.lane)
        return wide if instrs[wide].dtype == "f32" and same_code else None

    def load(self, i: int, pointer: str, mask: str) -> str:
        dtype = self.v.instrs[i].dtype
        value = f"tl.load({pointer}{mask})"
        return f"x{i} = {value} != 0" if dtype == "b8" else f"x{i} = {value}"

    def store(self, i: int, s: int, pointer: str, value: str, mask: str) -> str:
        source, dtype = self.v.instrs[i].dtype, self.v.slots[s].dtype
        value = forms.triton_cast(value, source, dtype)
        value = f"{value}.to(tl.uint8)" if dtype == "b8" else value
        return f"tl.store({pointer}, {value}{mask})"

    def address(self, s: int) -> str:
        dtype = self.v.slots[s].dtype
        kind = "tl.uint8" if dtype == "b8" else TYPES[dtype]
        return f"tl.load(lane + {RECORD + s}).to(tl.pointer_type({kind}))"

    # ---------------------------------------------------------------- functions

    def element(self) -> list[str]:
        """Arithmetic of an element: what was loaded, lane code's numbers -> results."""
        args = [self.name(i) for i in (*self.loads, *self.handed)]
        code = [i for i in self.v.code if self.v.instrs[i].op != "load"]
        results = ", ".join(self.name(i) for i, _ in self.element_stores)
        body = [self.assign(i) for i in self.consts if i not in code]
        body += [self.assign(i) for i in code]
        return [
            "@triton.jit",
            *over_lines(f"def element{self.number}(", args, "):"),
            *indent([*body, f"return {results}"]),
        ]

    def apply(self, place: dict[int, str], mask: str) -> list[str]:
        """Element code between loads and stores."""
        if not self.element_stores:
            return []
        args = [self.name(i) for i in (*self.loads, *self.handed)]
        results = [f"y{s}" for _, s in self.element_stores]
        head = f"{', '.join(results)} = element{self.number}("
        stores = [
            self.store(i, s, place[s], f"y{s}", mask) for i, s in self.element_stores
        ]
        return [*over_lines(head, args, ")"), *stores]

    def element_loads(self, place: dict[int, str], mask: str) -> list[str]:
        instrs = self.v.instrs
        return [self.load(i, place[int(instrs[i].attr or 0)], mask) for i in self.loads]

    def ticket(self) -> list[str]:
        """Store lane numbers when no chunk of the lane will read them any more."""
        if not self.lane_stores:
            return []
        stores = [self.store(i, s, f"p{s}", f"x{i}", "") for i, s in self.lane_stores]
        return [
            "",
            *TICKET.splitlines(),
            "tl.debug_barrier()",
            "last = chunks == 1",
            "if chunks > 1:",
            '    taken = tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu")',
            "    last = taken == chunks - 1",
            "if last:",
            *indent(stores),
            "    tl.store(ticket, 0)  # for the next launch",
        ]

    @property
    def tells(self) -> bool:
        """Does the variant's function say whether a lane is done?"""
        return makes_numbers(self.v)

    def variant(self) -> list[str]:
        """One chunk: lane code, then elements on the main path, then on the general."""
        lines = self.ticket()
        if self.element_stores:
            place = {s: f"a{s}" for s in self.element_slots}
            lines += ["", *self.apply(place, ", mask=mask"), "begin = grouped"]
            call = over_lines(f"general{self.number}(", [*self.rest, "REST"], ")")
            lines += ["if begin < count:", *indent(call)]
        if self.tells:
            lines.append("return 1")
        return self.shell(lines, [], self.main_loads() if self.element_slots else [])

    def shell(
        self, body: list[str], results: list[int], early: list[str] | None = None
    ) -> list[str]:
        """A variant's function: addresses and lane code, then `body`.

        `results`: slots of results. `early`: what is begun before lane code.
        """
        v = self.v
        lines = [
            "layout = tl.load(lane)",
            "numel = tl.load(lane + 1)",
        ]
        if v.scalars:
            lines.append("scalars = rows + tl.load(lane + 2)")
        if self.lane_stores or v.reduction == "full":
            lines.append("chunks = tl.load(lane + 3)")
        for s in (*self.lane_slots, *self.element_slots, *results):
            lines.append(f"p{s} = {self.address(s)}")
        numbers, code = self.lane_parts()
        code = ["", *code]
        elements = early or []
        if self.lane_stores or not elements:
            lines += [*numbers, *elements, *code]  # a ticket has a barrier of its own
        else:
            lines += [*elements, *UNDER_WAY.splitlines(), *numbers, *code]
        lines += body
        head = over_lines(
            f"def variant{self.number}(",
            ["lane", "ordinal", "rows", "geometry", "ticket", "partials", *SIZES],
            "):",
        )
        return ["@triton.jit", *head, *indent(lines)]

    def packed(self) -> list[str]:
        """Several small lanes: lane code for all at once, then a row of each."""
        v = self.v
        rows = [f"p{s}" for s in (*self.lane_slots, *self.element_slots)]
        places = [
            f"{p} = {self.address(int(p[1:])).replace('lane +', 'own +')}" for p in rows
        ]
        lines = [
            f"each = tl.arange(0, {ROWS})",
            "there = each < count",
            "# a row without a lane repeats the first one, and stores nothing",
            f"own = lane + tl.where(there, each, 0) * {RECORD + len(v.slots)}",
            *(["scalars = rows + tl.load(own + 2)"] if v.scalars else []),
            *places,
            *self.lane_lines(),
        ]
        if self.lane_stores:
            lines += ["", *WHOLE.splitlines()]
            lines += [
                self.store(i, s, f"p{s}", f"x{i}", ", mask=there")
                for i, s in self.lane_stores
            ]
        if self.element_stores:
            varies: set[int] = set()
            for i in v.lane_code:
                instr = v.instrs[i]
                own = instr.op in ("load", "scalar")
                if own or any(a in varies for a in instr.args):
                    varies.add(i)
            place = {s: f"a{s}" for s in self.element_slots}
            lines += [
                "",
                *(f"x{i} = x{i}[:, None]" for i in self.handed if i in varies),
                "numel = tl.where(there, tl.load(own + 1), 0)",
                f"for at in range(0, longest, {COLUMNS}):",
                *indent(
                    [
                        f"inside = at + tl.arange(0, {COLUMNS})[None, :]",
                        "mask = inside < numel[:, None]",
                        *(f"a{s} = p{s}[:, None] + inside" for s in self.element_slots),
                        *self.element_loads(place, ", mask=mask"),
                        *self.apply(place, ", mask=mask"),
                    ]
                ),
            ]
        head = f"def packed{self.number}(lane, count, longest, rows):"
        return ["@triton.jit", head, *indent(lines)]

    def lane_lines(self) -> list[str]:
        """Loads of a lane's numbers, then lane code."""
        first, rest = self.lane_parts()
        return [*first, "", *rest]

    def lane_parts(self) -> tuple[list[str], list[str]]:
        """Lane code: what it loads, and what it computes."""
        v = self.v
        loaded = [i for i in v.lane_code if v.instrs[i].op in ("load", "scalar")]
        numbers = [
            self.load(i, f"p{v.instrs[i].attr}", "")
            if v.instrs[i].op == "load"
            else self.assign(i)
            for i in loaded
        ]
        lane = [i for i in v.lane_code if i not in set(loaded)]
        # a constant that element code alone uses is named there
        needed = {a for i in (*lane, *v.output_code) for a in v.instrs[i].args}
        needed.update(i for i, s in v.stores if v.slots[s].domain != "element")
        lane = [i for i in lane if i in needed or not self.is_const(i)]
        return numbers, [self.assign(i) for i in lane]

    def main_loads(self) -> list[str]:
        """Loads of the main path, begun before lane code, which hides their wait."""
        place = {s: f"a{s}" for s in self.element_slots}
        return [*self.chunk_places(), *self.element_loads(place, ", mask=mask")]

    def chunk_places(self) -> list[str]:
        """The elements of a chunk that the main path takes, and where they lie."""
        lines = [
            "",
            "start = ordinal.to(tl.int64) * BLOCK",
            "count = tl.minimum(numel - start, BLOCK).to(tl.int32)",
            "block = tl.arange(0, BLOCK)",
            f"# main path: whole groups of {GROUP} elements, all pointers aligned",
            f"grouped = tl.where(layout == {ALIGNED}, count // {GROUP} * {GROUP}, 0)",
            f"mask = block < tl.multiple_of(grouped, {GROUP})",
        ]
        for s in self.element_slots:
            lines.append(f"a{s} = tl.multiple_of(p{s}, 16) + start + block")
        return lines

    def general(self) -> list[str]:
        """The general path: any strides, any alignment, and what groups leave over."""
        slots = self.element_slots
        place = {s: f"p{s} + o{s}" for s in slots}
        walk = ["size = tl.load(shape + dims - d)", "index = rest % size"]
        walk.append("rest = rest // size")
        for k, s in enumerate(slots):
            walk.append(f"o{s} += index * tl.load(shape + {k + 2} * dims - d)")
        loop = [
            "inside = at + tl.arange(0, REST)",
            "mask = inside < count",
            "rest = start + inside",
            *(f"o{s} = tl.where(strided, 0, rest)" for s in slots),
            "for d in range(dims):",
            *indent(walk),
            *self.element_loads(place, ", mask=mask"),
            *self.apply(place, ", mask=mask"),
        ]
        body = [
            "# few elements at a time, so that it needs few registers",
            "strided = layout >= 0",
            "shape = geometry + tl.where(strided, layout, 0)",
            "dims = tl.load(shape, mask=strided, other=0).to(tl.int32)",
            "for at in range(begin, count, REST):",
            *indent(loop),
        ]
        head = over_lines(f"def general{self.number}(", [*self.rest, SIZES[1]], "):")
        return ["@triton.jit", *head, *indent(body)]

    @property
    def rest(self) -> list[str]:
        """What the general path takes."""
        pointers = [f"p{s}" for s in self.element_slots]
        numbers = [self.name(i) for i in self.handed]
        return ["layout", "geometry", "start", "begin", "count", *pointers, *numbers]

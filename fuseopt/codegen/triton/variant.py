"""Common parts of a variant's Triton functions.

Element code is a separate function, `element<n>`. The general path takes lanes whose
tensors differ in layout or are not aligned, and the last few elements of a lane. The
program with the lane's last ticket writes the stores of lane code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...errors import EagerOnly
from ...ir.blocks import size_of
from ...ir.graph import DTYPE_BYTES, Variant, makes_numbers
from .. import optable
from ..optable import TRITON_TYPES as TYPES
from .power import side_by_side
from .text import give_back, indent, over_lines, take

#: Fields of a lane's record before its addresses, and the value of `layout` for lanes
#: without geometry. The runtime's tables follow these.
RECORD = 4
FLAT, ALIGNED = -1, -2
CHUNK_FIELDS = 4

#: Elements up to which indices are divided in 32 bits; a chunk's go some beyond it.
FEW = 2**31 - 2**12

SIZES = ("BLOCK: tl.constexpr", "REST: tl.constexpr")

#: The code above the loop of a general path, for `Function.walk`.
GEOMETRY = """\
strided = layout >= 0
shape = geometry + tl.where(strided, layout, 0)
dims = tl.load(shape, mask=strided, other=0).to(tl.int32)
"""
#: The code after the loads of the main path.
UNDER_WAY = """\
# All loads are under way before the first is waited for. To save registers, the
# assembler would begin some when others' numbers are used up; but nothing can be
# computed without the lane's numbers, which are asked for behind this barrier.
tl.debug_barrier()
"""
#: The comment and the ticket above a lane's stores.
TICKET = """\
# Every program of the lane reads what is stored here. Each takes a ticket when it is
# done, and the one that takes the last stores. All its threads' reads come before
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
        self.indices = [i for i in variant.code if variant.instrs[i].op == "index"]
        if self.indices and variant.reduction:
            raise EagerOnly("an index of elements that are reduced")
        tables = any(i.op in ("lookup", "search") for i in variant.instrs)
        if tables and variant.reduction:
            raise EagerOnly("a table of elements that are reduced")
        used = {a for i in variant.code for a in variant.instrs[i].args}
        used.update(i for i, _ in self.element_stores)
        used.update(variant.instrs[i].args[0] for i in variant.folds)
        self.lane = frozenset(variant.lane_code)
        #: the numbers that element code takes from lane code, and the constants it
        #: names
        lane = used & set(variant.lane_code)
        self.handed = sorted(i for i in lane if not self.is_const(i))
        self.consts = sorted(i for i in used if self.is_const(i))

    def is_const(self, i: int) -> bool:
        return self.v.instrs[i].op in ("const", "tail")

    def name(self, i: int) -> str:
        return f"x{i}"

    def assign(self, i: int) -> str:
        """Return the line that computes instruction i, which is no load."""
        instr = self.v.instrs[i]
        if instr.op == "const":
            value = optable.triton_literal(float(instr.attr or 0.0), instr.dtype)
        elif instr.op == "tail":
            # a GPU's loops have no leftover elements
            value = optable.triton_literal(0.0, "b8")
        elif instr.op == "scalar":
            value = optable.triton_cast(
                f"tl.load(scalars + {instr.attr})", "f64", instr.dtype
            )
        else:
            args = [self.name(a) for a in instr.args]
            dtypes = [self.v.instrs[a].dtype for a in instr.args]
            kept = self.unrounded(i)
            value = (
                self.name(kept)
                if kept is not None
                else optable.triton(instr, args, dtypes, self.fast)
            )
        return f"{self.name(i)} = {value}"

    def unrounded(self, i: int) -> int | None:
        """Return the f32 number that instruction i reads back after rounding to a half.

        "fast" numerics use it directly; stores are rounded nevertheless.
        """
        instrs = self.v.instrs
        if not self.fast or instrs[i].op != "cast" or instrs[i].dtype != "f32":
            return None
        half = instrs[i].args[0]
        if instrs[half].op != "cast" or instrs[half].dtype not in optable.NARROW:
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
        value = optable.triton_cast(value, source, dtype)
        value = f"{value}.to(tl.uint8)" if dtype == "b8" else value
        return f"tl.store({pointer}, {value}{mask})"

    def address(self, s: int) -> str:
        dtype = self.v.slots[s].dtype
        kind = "tl.uint8" if dtype == "b8" else TYPES[dtype]
        return f"tl.load(lane + {RECORD + s}).to(tl.pointer_type({kind}))"

    # ---------------------------------------------------------------- functions

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of element code: loaded values, indices, lane data."""
        return [self.name(i) for i in (*self.loads, *self.indices, *self.handed)]

    def element(self) -> list[str]:
        """Return a function of an element: results to store, then values to fold."""
        return self.arithmetic(f"element{self.number}", self.arguments, {})

    def arithmetic(
        self, name: str, args: list[str], instead: Mapping[int, str]
    ) -> list[str]:
        """Return a function of element code; `instead`: replaced instructions."""
        given = {*self.loads, *self.indices}
        code = [i for i in self.v.code if i not in given]
        body = [self.assign(i) for i in self.consts if i not in code]
        for i in code:
            replacement = instead.get(i)
            body.append(
                self.assign(i)
                if replacement is None
                else f"{self.name(i)} = {replacement}"
            )
        returned = [self.name(i) for i, _ in self.element_stores]
        returned += [self.name(self.v.instrs[i].args[0]) for i in self.v.folds]
        return [
            "@triton.jit",
            *over_lines(f"def {name}(", args, "):"),
            *indent([*body, f"return {', '.join(returned)}"]),
        ]

    def call(self, name: str, args: list[str]) -> list[str]:
        """Return a call of element code: results are y<slot>, the operand of fold i is
        f<i>.
        """
        results = [f"y{s}" for _, s in self.element_stores]
        results += [f"f{i}" for i in self.v.folds]
        return (
            over_lines(f"{', '.join(results)} = {name}(", args, ")") if results else []
        )

    def element_loads(
        self, place: Mapping[int, str], mask: str = ", mask=mask", rows: str = ""
    ) -> list[str]:
        """Return the loads; `rows`: makes the addresses of several lanes a column."""
        instrs = self.v.instrs
        lines = [
            self.load(i, place[int(instrs[i].attr or 0)], mask) for i in self.loads
        ]
        for i in self.indices:
            load = instrs[instrs[i].args[0]]
            s = int(load.attr or 0)
            if load.op != "load":
                raise EagerOnly("an index of elements that are computed")
            size = DTYPE_BYTES[self.v.slots[s].dtype]
            at = f"({place[s]}).to(tl.int64) - p{s}{rows}.to(tl.int64)"
            lines.append(f"x{i} = (({at}) // {size}).to(tl.int32)")
        return lines

    def element_writes(self, place: Mapping[int, str]) -> list[str]:
        return [
            self.store(i, s, place[s], f"y{s}", ", mask=mask")
            for i, s in self.element_stores
        ]

    def apply(self, place: Mapping[int, str], rows: str = "") -> list[str]:
        """Return loads, element code, stores; `rows` as in `element_loads`."""
        return [
            *self.element_loads(place, rows=rows),
            *self.call(f"element{self.number}", self.arguments),
            *self.element_writes(place),
        ]

    def ticket(self) -> list[str]:
        """Return stores of lane numbers, once no program of the lane reads them any
        more.
        """
        if not self.lane_stores:
            return []
        stores = [self.store(i, s, f"p{s}", f"x{i}", "") for i, s in self.lane_stores]
        return [
            "",
            *TICKET.splitlines(),
            "tl.debug_barrier()",
            "last = programs == 1",
            "if programs > 1:",
            *indent(take("ticket", "programs")),
            "if last:",
            *indent([*stores, give_back("ticket")]),
        ]

    @property
    def returns_done(self) -> bool:
        """Does the variant's function return whether a lane is done?"""
        return makes_numbers(self.v)

    def shell(
        self, body: list[str], results: list[int], early: Sequence[str] = ()
    ) -> list[str]:
        """Return a variant's function: addresses and lane code, then `body`.

        `results`: slots of results. `early`: lines that begin before lane code.
        """
        v = self.v
        lines = [
            "layout = tl.load(lane)",
            "numel = tl.load(lane + 1)",
        ]
        if v.scalars:
            lines.append("scalars = rows + tl.load(lane + 2)")
        if self.lane_stores or v.reduction == "full":
            lines.append("programs = tl.load(lane + 3)")
        for s in (*self.lane_slots, *self.element_slots, *results):
            lines.append(f"p{s} = {self.address(s)}")
        numbers, code = self.lane_parts(alone=True)
        if early:
            lines += [*early, *UNDER_WAY.splitlines()]
        lines += [*numbers, "", *code, *body]
        args = ["lane", "ordinal", "span", "rows", "geometry", "ticket", "partials"]
        head = over_lines(f"def variant{self.number}(", [*args, *SIZES], "):")
        return ["@triton.jit", *head, *indent(lines)]

    def lane_lines(self) -> list[str]:
        """Return loads of a lane's numbers, then lane code."""
        first, rest = self.lane_parts()
        return [*first, "", *rest]

    def lane_parts(self, alone: bool = False) -> tuple[list[str], list[str]]:
        """Return lane code: its loads, and its arithmetic.

        `alone`: for one lane, whose powers may be computed side by side.
        """
        v = self.v
        loaded = [i for i in v.lane_code if v.instrs[i].op in ("load", "scalar")]
        numbers = [
            self.load(i, f"p{v.instrs[i].attr}", "")
            if v.instrs[i].op == "load"
            else self.assign(i)
            for i in loaded
        ]
        lane = [i for i in v.lane_code if i not in set(loaded)]
        # a constant that only element code uses is named there
        needed = {a for i in (*lane, *v.output_code) for a in v.instrs[i].args}
        needed.update(i for i, s in v.stores if v.slots[s].domain != "element")
        lane = [i for i in lane if i in needed or not self.is_const(i)]
        if not alone:
            return numbers, [self.assign(i) for i in lane]
        return numbers, self.in_rounds(lane)

    def in_rounds(self, lane: Sequence[int]) -> list[str]:
        """Return lane code in the order of rounds.

        Independent powers of a round are computed side by side, see
        `power.side_by_side`.
        """
        instrs = self.v.instrs
        rounds: dict[int, int] = {}
        for i in lane:
            before = max((rounds.get(a, 0) for a in instrs[i].args), default=0)
            rounds[i] = before + self.is_power(i)
        lines = []
        for n in range(max(rounds.values(), default=0) + 1):
            of_round = [i for i in lane if rounds[i] == n]
            calls = [
                (
                    self.name(i),
                    self.name(instrs[i].args[0]),
                    self.name(instrs[i].args[1]),
                )
                for i in of_round
                if self.is_power(i)
            ]
            if len(calls) > 1:
                lines += side_by_side(calls)
                of_round = [i for i in of_round if not self.is_power(i)]
            lines += [self.assign(i) for i in of_round]
        return lines

    def is_power(self, i: int) -> bool:
        """Is an instruction a power of float32, whose text is `power`?"""
        return self.v.instrs[i].op == "pow" and self.v.instrs[i].dtype == "f32"

    def walk(self, slots: Sequence[int]) -> list[str]:
        """Return the offsets of elements `rest` of a lane with geometry.

        Folds and blocks often have such lanes, which seldom have 2**31 elements. Then
        indices are divided in 32 bits: a GPU divides 64 in many more instructions.
        Other steps have few such lanes, and no registers to spare.
        """
        wide = ["turn = left % size", "left = left // size"]
        narrow = [
            f"if start + count < {FEW}:",
            "    small = left.to(tl.int32)",
            "    turn = (small % size.to(tl.int32)).to(tl.int64)",
            "    left = (small // size.to(tl.int32)).to(tl.int64)",
            "else:",
            *indent(wide),
        ]
        odometer = [
            "size = tl.load(shape + dims - d)",
            *(narrow if self.v.reduction or size_of(self.v.instrs) else wide),
            *(
                f"o{s} += turn * tl.load(shape + {k + 2} * dims - d)"
                for k, s in enumerate(slots)
            ),
        ]
        return [
            *(f"o{s} = tl.where(strided, 0, rest)" for s in slots),
            "left = rest",
            "for d in range(dims):",
            *indent(odometer),
        ]

    def general(
        self,
        before: Sequence[str] = (),
        each: Sequence[str] = (),
        after: Sequence[str] = (),
    ) -> list[str]:
        """Return the general path: any strides, any alignment, and leftover elements.

        `before`, `each`, `after`: lines around the loop, and after each turn.
        """
        slots = self.element_slots
        loop = [
            "inside = at + tl.arange(0, REST)",
            "mask = inside < count",
            "rest = start + inside",
            *self.walk(slots),
            *self.apply({s: f"p{s} + o{s}" for s in slots}),
            *each,
        ]
        body = [
            "# few elements at a time, so that it needs few registers",
            *GEOMETRY.splitlines(),
            *before,
            "for at in range(begin, count, REST):",
            *indent(loop),
            *after,
        ]
        head = over_lines(f"def general{self.number}(", [*self.rest, SIZES[1]], "):")
        return ["@triton.jit", *head, *indent(body)]

    @property
    def rest(self) -> list[str]:
        """Return the arguments of the general path."""
        pointers = [f"p{s}" for s in self.element_slots]
        numbers = [self.name(i) for i in self.handed]
        return ["layout", "geometry", "start", "begin", "count", *pointers, *numbers]

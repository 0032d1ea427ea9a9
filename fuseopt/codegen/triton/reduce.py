"""Triton of a variant with reductions: elements are folded as they are computed.

"full" variants fold a lane to one number. Each chunk folds its own elements, writes the
result to a table and takes a ticket. The chunk with the last ticket folds the results
of all chunks, in their order, and runs output code. "dims" variants fold rows or
columns: a program takes some results and folds all their elements, see `outs`.

The order of additions never depends on which program comes first.
"""

from __future__ import annotations

from ...ir.graph import REDUCTIONS, Variant
from ..optable import TRITON_TYPES as TYPES
from .chunks import inside, places
from .text import give_back, indent, over_lines, take
from .variant import RECORD, Function

#: The chunks' results that the last chunk folds at a time.
PARTS = 64
#: Elements of a result up to which a program computes no more of each than these: the
#: rows of a convolution's kernel have 3.
SHORT = 8
#: Results of a program that folds rows, which has the more elements of each at a time.
ROWS = 16
#: Results of a program that folds columns: neighbours, 128 bytes of float32. Of columns
#: with more than LONG elements it takes 32 bytes, so that more programs share the work.
COLUMNS, TALL, LONG = 32, 8, 1024


def outs(elements: int, columns: bool, block: int) -> int:
    """The results that a program takes, of so many elements each."""
    if elements <= SHORT:
        return block // SHORT
    if not columns:
        return ROWS
    return TALL if elements > LONG else COLUMNS


HELPERS = """\
@triton.jit
def plus(a, b):
    return a + b


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
"""
COMBINE = {"largest": "larger", "least": "smaller"}
INTEGER_LIMITS = {"i64": 63, "i32": 31, "i16": 15, "i8": 7}


class ReduceWriter:
    """Writes the functions of one variant with reductions."""

    def __init__(self, number: int, variant: Variant, fast: bool = False) -> None:
        self.n = number
        self.v = variant
        self.w = Function(number, variant, fast)
        self.folds = variant.folds
        self.slots = self.w.element_slots
        self.results = [s for s, x in enumerate(variant.slots) if x.domain == "output"]
        self.stores = [
            x for x in variant.stores if variant.slots[x[1]].domain == "output"
        ]
        #: the word of a lane's record with the address of its parts
        self.parts_word = len(variant.slots)

    # ------------------------------------------------------------ folds

    def combine(self, i: int) -> str:
        return COMBINE.get(self.v.instrs[i].op, "plus")

    def kind(self, i: int) -> str:
        return TYPES[self.v.instrs[i].dtype]

    def identity(self, i: int) -> str:
        op, dtype = self.v.instrs[i].op, self.v.instrs[i].dtype
        if op not in COMBINE:
            return "0"
        if dtype in INTEGER_LIMITS:
            limit = 1 << INTEGER_LIMITS[dtype]
            return str(-limit if op == "largest" else limit - 1)
        if dtype == "u8":
            return "0" if op == "largest" else "255"
        return 'float("-inf")' if op == "largest" else 'float("inf")'

    def folded(self, i: int) -> str:
        """Return the operand of fold i for an element, from the variable f<i>."""
        operand = f"f{i}"
        squared = self.v.instrs[i].op == "sumsq"
        return f"{operand} * {operand}" if squared else operand

    def start(self, shape: str, prefix: str = "v") -> list[str]:
        return [
            f"{prefix}{i} = tl.full({shape}, {self.identity(i)}, {self.kind(i)})"
            for i in self.folds
        ]

    def gather(self) -> list[str]:
        """Return lines that fold a block into the accumulators, element by element."""
        return [
            f"v{i} = {self.combine(i)}(v{i}, tl.where(mask, {self.folded(i)}, "
            f"{self.identity(i)}))"
            for i in self.folds
        ]

    def reduce(self, operand: str, blocks: str = "v", axis: str = "0") -> list[str]:
        return [
            f"{operand}{i} = tl.reduce({blocks}{i}, {axis}, {self.combine(i)})"
            for i in self.folds
        ]

    def names(self, prefix: str = "v") -> str:
        return ", ".join(f"{prefix}{i}" for i in self.folds)

    # ------------------------------------------------------------ pieces of text

    def output(self, place: dict[int, str], mask: str, results: str) -> list[str]:
        """Return output code for results, named <results><i>."""
        lines = []
        for i in self.v.output_code:
            instr = self.v.instrs[i]
            if instr.op in REDUCTIONS:
                lines.append(f"x{i} = {results}{i}")
            elif instr.op == "load":
                lines.append(self.w.load(i, place[int(instr.attr or 0)], mask))
            else:
                lines.append(self.w.assign(i))
        lines += [self.w.store(i, s, place[s], f"x{i}", mask) for i, s in self.stores]
        return lines

    def functions(self) -> list[list[str]]:
        body = self.full() if self.v.reduction == "full" else self.dims()
        return [self.w.element(), *body]

    # ------------------------------------------------------------ one number a lane

    def full(self) -> list[list[str]]:
        general = self.w.general(
            self.start("(REST,)"),
            self.gather(),
            [*self.reduce("z"), f"return {self.names('z')}"],
        )
        main = {s: f"a{s}" for s in self.slots}
        body = [
            *places(
                self.w,
                "ordinal.to(tl.int64) * BLOCK",
                "tl.minimum(numel - start, BLOCK).to(tl.int32)",
            ),
            f"mask = {inside('grouped')}",
            *self.w.apply(main),
            *self.start("(BLOCK,)"),
            *self.gather(),
            *self.reduce("z"),
            "begin = grouped",
            "if begin < count:",
            *indent(
                [
                    *over_lines(
                        f"{self.names('w')} = general{self.n}(",
                        [*self.w.rest, "REST"],
                        ")",
                    ),
                    *(f"z{i} = {self.combine(i)}(z{i}, w{i})" for i in self.folds),
                ]
            ),
            *self.write_parts(),
            *self.last_chunk(),
        ]
        return [general, self.w.shell(body, self.results)]

    def write_parts(self) -> list[str]:
        count = len(self.folds)
        lines = [
            f"parts = partials + tl.load(lane + {RECORD + self.parts_word})",
            f"own = parts + ordinal * {count}",
        ]
        for k, i in enumerate(self.folds):
            lines.append(f"tl.store(own + {k}, {self.packed(i)})")
        return lines

    def packed(self, i: int) -> str:
        dtype = self.v.instrs[i].dtype
        if dtype in ("f64", "f32"):
            return f"z{i}.to(tl.float64).to(tl.int64, bitcast=True)"
        return f"z{i}.to(tl.int64)"

    def unpacked(self, i: int, k: int) -> str:
        place = f"parts + each * {len(self.folds)} + {k}"
        load = f"tl.load({place}, mask=taken_part, other=0)"
        dtype = self.v.instrs[i].dtype
        if dtype in ("f64", "f32"):
            load += ".to(tl.float64, bitcast=True)"
        return f"{load}.to({self.kind(i)})"

    def last_chunk(self) -> list[str]:
        loop = [
            f"each = at + tl.arange(0, {PARTS})",
            "taken_part = each < programs",
            *(f"u{i} = {self.unpacked(i, k)}" for k, i in enumerate(self.folds)),
            *(
                f"t{i} = {self.combine(i)}(t{i}, tl.where(taken_part, u{i}, "
                f"{self.identity(i)}))"
                for i in self.folds
            ),
        ]
        stores = [
            self.w.store(i, s, f"p{s}", f"x{i}", "") for i, s in self.w.lane_stores
        ]
        return [
            "# The chunk that takes the last ticket finishes the lane: what the others",
            "# wrote before they took theirs, it sees.",
            "tl.debug_barrier()",
            *take("ticket", "programs"),
            "if last:",
            *indent(
                [
                    *self.start(f"({PARTS},)", "t"),
                    f"for at in range(0, programs, {PARTS}):",
                    *indent(loop),
                    *self.reduce("total", "t"),
                    *self.output({s: f"p{s}" for s in self.results}, "", "total"),
                    *stores,
                    give_back("ticket"),
                ]
            ),
            "return last.to(tl.int32)",
        ]

    # ------------------------------------------------------------ rows and columns

    def dims(self) -> list[list[str]]:
        """Return the functions of a variant that folds rows or columns.

        The geometry of a lane has these numbers: 1 for columns, results, elements of
        one result, dims of results, and folded dims. Their sizes follow. Then come the
        strides of each element slot over both, and those of each output slot over the
        first.
        """
        slots, results = self.slots, self.results
        pointers = [f"p{s}" for s in (*slots, *results)]
        numbers = [self.w.name(i) for i in self._lane_numbers()]
        both = "(outer + folded)"
        steps = "shape + 5 + outer + folded"
        # the innermost dimension is that of neighbours, which lanes of a warp take
        place = {s: f"tl.max_contiguous(p{s} + (b{s} + r{s}), [1, 2])" for s in slots}
        by_result = [
            "size = tl.load(shape + 4 + outer - d).to(tl.int32)",
            "index = rest % size",
            "rest = rest // size",
            *(
                f"b{s} += index * tl.load({steps} + {k} * {both} + outer - 1 - d)"
                for k, s in enumerate(slots)
            ),
        ]
        by_folded = [
            f"size = tl.load(shape + 4 + {both} - d).to(tl.int32)",
            "turn = left % size",
            "left = left // size",
            *(
                f"r{s} += turn * tl.load({steps} + {k + 1} * {both} - 1 - d)"
                for k, s in enumerate(slots)
            ),
        ]
        loop = [
            "r = at + tl.arange(0, REDS)",
            "left = r[:, None] if COLUMNS else r[None, :]",
            "mask = (left < count) & (wide < numel)",
            *(f"r{s} = left.to(tl.int64) * 0" for s in slots),
            "for d in range(folded):",
            *indent(by_folded),
            *self.w.apply(place),
            *self.gather(),
        ]
        to = f"shape + 5 + (1 + {len(slots)}) * (outer + folded)"
        of_results = [
            f"to = {to}",
            "rest = o",
            *(f"o{s} = o.to(tl.int64) * 0" for s in results),
            "for d in range(outer):",
            *indent(
                [
                    "size = tl.load(shape + 4 + outer - d).to(tl.int32)",
                    "index = rest % size",
                    "rest = rest // size",
                    *(
                        f"o{s} += index * tl.load(to + {k} * outer + outer - 1 - d)"
                        for k, s in enumerate(results)
                    ),
                ]
            ),
            "mask = o < numel",
            *self.output({s: f"p{s} + o{s}" for s in results}, ", mask=mask", "z"),
        ]
        args = ["shape", "ordinal", "numel", *pointers, *numbers]
        sizes = [f"{x}: tl.constexpr" for x in ("OUTS", "REDS", "COLUMNS")]
        fold = [
            "@triton.jit",
            *over_lines(f"def fold{self.n}(", [*args, *sizes], "):"),
            *indent(
                [
                    *(self.w.assign(i) for i in self._constants()),
                    "o = ordinal * OUTS + tl.arange(0, OUTS)",
                    "count = tl.load(shape + 2).to(tl.int32)",
                    "outer = tl.load(shape + 3).to(tl.int32)",
                    "folded = tl.load(shape + 4).to(tl.int32)",
                    "wide = o[None, :] if COLUMNS else o[:, None]",
                    "rest = wide",
                    *(f"b{s} = rest.to(tl.int64) * 0" for s in slots),
                    "for d in range(outer):",
                    *indent(by_result),
                    "SHAPE: tl.constexpr = (REDS, OUTS) if COLUMNS else (OUTS, REDS)",
                    *self.start("SHAPE"),
                    "for at in range(0, count, REDS):",
                    *indent(loop),
                    *self.reduce("z", "v", "0 if COLUMNS else 1"),
                    *of_results,
                ]
            ),
        ]

        def call(results: str, elements: str, columns: bool) -> list[str]:
            given = [*args, results, elements, str(columns)]
            return indent(over_lines(f"fold{self.n}(", given, ")"))

        body = [
            "shape = geometry + layout",
            "count = tl.load(shape + 2)",
            f"if count <= {SHORT}:",
            *call(f"BLOCK // {SHORT}", str(SHORT), False),
            "elif tl.load(shape) == 0:",
            *call(str(ROWS), f"BLOCK // {ROWS}", False),
            f"elif count > {LONG}:",
            *call(str(TALL), f"BLOCK // {TALL}", True),
            "else:",
            *call(str(COLUMNS), f"BLOCK // {COLUMNS}", True),
            *self.w.ticket(),
        ]
        return [fold, self.w.shell(body, results)]

    def _used_by_output(self) -> set[int]:
        return {a for i in self.v.output_code for a in self.v.instrs[i].args}

    def _lane_numbers(self) -> list[int]:
        """The numbers of lane code that element code or output code takes."""
        v, w = self.v, self.w
        used = self._used_by_output() & set(v.lane_code)
        return sorted({*w.handed, *(i for i in used if not w.is_const(i))})

    def _constants(self) -> list[int]:
        """The constants of lane code that output code takes."""
        used = self._used_by_output() & set(self.v.lane_code)
        return sorted(i for i in used if self.w.is_const(i))

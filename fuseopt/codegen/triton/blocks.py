"""A variant whose elements have numbers in common by blocks -> Triton.

A chunk is some whole blocks. A program computes all of a chunk before the next one.
Where it folds a number of a block, the chunk is a matrix with a row for each block. A
row of the largest blocks has whole smaller ones in its parts.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence

from ...ir.blocks import FOLDS, read_by_block, size_of, sizes_of
from ...ir.graph import DTYPE_BYTES, Kernel, Variant
from ...ir.searches import words_of
from ...ir.tables import TABLES
from .text import indent
from .variant import ALIGNED, GEOMETRY, Function

#: Numbers of a part of a table, in memory.
PART = 256
#: Elements of a chunk with searches: a thread has eight of each tensor, since the
#: parts of a search take many registers.
CHUNK = 1024
#: Registers of a thread with such a chunk: three programs of a multiprocessor. Triton
#: 3.6 takes some more for AdamW in fp8, and no stack with these.
REGISTERS = 168
#: Elements of a part of a block: a warp has NEIGHBOURS of them in each thread. A thread
#: has the same ones of all parts, so that a warp folds a block.
ROW = 128
#: Neighbours that a thread moves at a time: 16 bytes of float32.
NEIGHBOURS = 4

HELPERS = """\
@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def block_largest(x, mask):
    x = tl.where(mask, x, float("-inf"))
    return tl.reduce(tl.reduce(x, 0, _larger), 1, _larger)[None, :, None]


@triton.jit
def block_least(x, mask):
    x = tl.where(mask, x, float("inf"))
    return tl.reduce(tl.reduce(x, 0, _smaller), 1, _smaller)[None, :, None]
"""
#: Folds of smaller blocks: `inner` parts make one.
WITHIN = """\
@triton.jit
def _by_inner(x, inner: tl.constexpr):
    return tl.reshape(x, [x.shape[0] // inner, inner, x.shape[1], x.shape[2]])


@triton.jit
def _of_parts(x, inner: tl.constexpr):
    x = tl.broadcast_to(x[:, None, :, None], [x.shape[0], inner, x.shape[1], 1])
    return tl.reshape(x, [x.shape[0] * inner, x.shape[2], 1])


@triton.jit
def block_largest_within(x, mask, inner: tl.constexpr):
    x = _by_inner(tl.where(mask, x, float("-inf")), inner)
    return _of_parts(tl.reduce(tl.reduce(x, 3, _larger), 1, _larger), inner)


@triton.jit
def block_least_within(x, mask, inner: tl.constexpr):
    x = _by_inner(tl.where(mask, x, float("inf")), inner)
    return _of_parts(tl.reduce(tl.reduce(x, 3, _smaller), 1, _smaller), inner)
"""
LOOKUP = """\
@triton.jit
def lookup(values, code, part):
    return tl.load((values + part * 256) + code)
"""


def _by_part(values: Sequence[object]) -> str:
    """The expression of the value of a part."""
    text = str(values[-1])
    for k, value in enumerate(values[:-1]):
        text = f"tl.where(part == {k}, {value}, {text})"
    return text


def search(number: int) -> str:
    """The function `search<number>` of a table: one word for each number."""
    shift, first, last, _, above, below = words_of(number)
    signed = max(below) >= 0
    positive = _by_part([x - first for x in above])
    negative = _by_part([max(x, 0) - first for x in below])
    least = _by_part(['float("-inf")' if x >= 0 else "0.0" for x in below])
    lines = [
        "bits = x.to(tl.int32, bitcast=True)",
        f"at = tl.maximum((bits & 0x7FFFFFFF) >> {shift}, {first})",
        f"at = tl.minimum(at, {last})",
    ]
    if signed:
        lines += [
            f"word = tl.load(steps + tl.where(bits < 0, {negative}, {positive}) + at)",
            f"rest = (bits ^ (bits >> 31)) & {(1 << shift) - 1}",
        ]
    else:
        lines += [
            f"word = tl.load(steps + {positive} + at)",
            f"rest = bits & {(1 << shift) - 1}",
        ]
    lines += [
        "# 0 for a NaN, and for negative numbers of a part that has none",
        f"return tl.where(x >= {least}, (word + rest) >> {shift}, 0)",
    ]
    head = f"def search{number}(steps, x, part):"
    return "\n".join(["@triton.jit", head, *indent(lines), ""])


#: Above the stores of blocks' numbers.
READ = """\
# Threads of other warps have read a block's number before it is stored.
tl.debug_barrier()
"""


def tables_of(variants: Iterable[Variant]) -> list[int]:
    """The tables that variants use, in order."""
    ops = ("lookup", "search")
    used = {int(i.attr or 0) for v in variants for i in v.instrs if i.op in ops}
    return sorted(used)


def table_helpers(tables: Iterable[int]) -> str:
    """The functions of a kernel with these tables."""
    return "\n\n".join([LOOKUP, *map(search, tables)])


def _words(number: int) -> list[int]:
    """A table in words of 32 bits: the values of each part, and the words of a search,
    in an even number.
    """
    words: list[int] = []
    for part in TABLES[number].values:
        words += struct.unpack(f"{len(part)}i", struct.pack(f"{len(part)}f", *part))
    words += words_of(number).entries
    return [*words, 0] if len(words) % 2 else words


def table_words(kernel: Kernel) -> list[int]:
    """The tables of a kernel as int64, which stand before the geometry of lanes."""
    words = [word for k in tables_of(kernel.every) for word in _words(k)]
    return list(
        struct.unpack(f"{len(words) // 2}q", struct.pack(f"{len(words)}i", *words))
    )


def table_names(kernel: Kernel) -> dict[int, tuple[str, str]]:
    """The text of the addresses of each table's values and of its search's words."""
    names, at = {}, 0
    for k in tables_of(kernel.every):
        steps = at + PART * len(TABLES[k].values)
        names[k] = (
            f"(geometry.to(tl.pointer_type(tl.float32)) + {at})",
            f"(geometry.to(tl.pointer_type(tl.int32)) + {steps})",
        )
        at += len(_words(k))
    return names


def writes(v: Variant) -> bool:
    """Is a variant one that `Blocks` writes?"""
    return not v.reduction and bool(size_of(v.instrs) or tables_of([v]))


class Blocks:
    """Writes the function of one variant with blocks, or with tables; `tables`: as of
    `table_names`.
    """

    def __init__(
        self,
        number: int,
        variant: Variant,
        tables: Mapping[int, tuple[str, str]],
        fast: bool = False,
    ) -> None:
        self.n, self.v = number, variant
        self.tables = tables
        self.w = Function(number, variant, fast)
        self.size = size_of(variant.instrs)
        sizes = sizes_of(variant.instrs)
        #: elements of a part, and the sizes of blocks within the largest ones
        self.part = min(ROW, *sizes, ROW)
        self.smaller = sorted(sizes - {self.size})
        by_block = read_by_block(variant.instrs)
        # `spread` loads what has a number for each block
        w = self.w
        w.loads = [i for i in w.loads if variant.instrs[i].attr not in by_block]

    def functions(self) -> list[list[str]]:
        """All functions."""
        w = self.w
        size = "span * BLOCK"
        # few elements at a time, so that it needs few registers; at least a block
        rest = "REST" if self.size <= 64 else str(self.size)
        of_blocks = [s for s, x in enumerate(self.v.slots) if x.domain == "block"]
        body = [
            f"start = ordinal.to(tl.int64) * ({size})",
            f"count = tl.minimum(numel - start, {size}).to(tl.int32)",
            *(w.assign(i) for i in w.consts),
            *self._shape("BLOCK"),
            "# whole chunks, all pointers aligned",
            f"even = tl.where(layout == {ALIGNED}, count // BLOCK * BLOCK, 0)",
            "for at in range(0, even, BLOCK):",
            *indent(self._main()),
            *self._shape(rest),
            *GEOMETRY.splitlines(),
            f"for at in range(even, count, {rest}):",
            *indent(self._general()),
            *w.ticket(),
        ]
        shell = w.shell(body, of_blocks)
        at = shell.index("    layout = tl.load(lane)")
        shell[at:at] = indent([f"{k} = {x}" for k, x in self._tables()])
        return [shell]

    def _shape(self, count: str) -> list[str]:
        """The place of each of so many elements: [parts of a block, blocks, elements of
        a part].
        """
        if not self.size:
            return [f"within = tl.arange(0, {count})"]
        part = self.part
        return [
            f"row = tl.arange(0, {count} // {self.size})[None, :, None]",
            f"part = tl.arange(0, {self.size // part})[:, None, None]",
            f"column = tl.arange(0, {part})[None, None, :]",
            f"within = row * {self.size} + part * {part} + column",
        ]

    def _main(self) -> list[str]:
        """A whole chunk, without masks."""
        places = {}
        for s in self.w.element_slots:
            # of each tensor as many elements at a time, so that all have one layout
            size = min(16, NEIGHBOURS * DTYPE_BYTES[self.v.slots[s].dtype])
            places[s] = f"tl.multiple_of(p{s}, {size}) + (start + at) + within"
        return self._chunk(places, "")

    def _general(self) -> list[str]:
        """A chunk with any strides and alignment, or a part of one."""
        slots = self.w.element_slots
        walk = [
            "mask = within < count - at",
            *([f"begins = row * {self.size} < count - at"] if self.size else []),
            *(
                f"begins{n} = row * {self.size} + {self._inner(n)} * {n} < count - at"
                for n in self.smaller
            ),
            "rest = start + at + within",
            *self.w.walk(slots),
        ]
        return [*walk, *self._chunk({s: f"p{s} + o{s}" for s in slots}, "mask")]

    def _inner(self, size: int) -> str:
        """The index of each part's smaller block within the largest one."""
        return f"part // {size // self.part}"

    def _place(self, size: int, mask: str) -> tuple[str, str]:
        """The index of blocks of a size, and the argument with their mask."""
        name = str(size) if size in self.smaller else ""
        return f"block{name}", f", mask=begins{name}" if mask else ""

    def _fold(self, i: int, mask: str) -> str:
        """A fold of the elements of each block."""
        instr = self.v.instrs[i]
        x, size = self.w.name(instr.args[0]), int(instr.attr or 0)
        if size not in self.smaller:
            return f"{instr.op}({x}, {mask or 'True'})"
        return f"{instr.op}_within({x}, {mask or 'True'}, {size // self.part})"

    def _chunk(self, places: Mapping[int, str], mask: str) -> list[str]:
        """Loads, arithmetic, stores; `mask`: of the elements, "" for all.

        What all elements of a block share has one number for a row.
        """
        v, w = self.v, self.w
        of_elements = f", mask={mask}" if mask else ""
        # an undefined code would read memory outside of the table
        zeros = ", other=0" if mask else ""
        lines = w.element_loads(places, of_elements + zeros)
        if self.size:
            lines.append(f"block = (start + at) // {self.size} + row")
        lines += [
            f"block{n} = block * {self.size // n} + {self._inner(n)}"
            for n in self.smaller
        ]
        for i in v.code:
            instr = v.instrs[i]
            if instr.op in ("load", "index"):
                continue
            if instr.op == "spread":
                slot = int(v.instrs[instr.args[0]].attr or 0)
                block, of_blocks = self._place(int(instr.attr or 0), mask)
                lines.append(w.load(i, f"p{slot} + {block}", of_blocks + zeros))
            elif instr.op in FOLDS:
                lines.append(f"{w.name(i)} = {self._fold(i, mask)}")
            elif instr.op == "first":
                lines.append(f"{w.name(i)} = {w.name(instr.args[0])}")
            elif not w.is_const(i):
                lines.append(w.assign(i))
        for i, s in w.element_stores:
            lines.append(w.store(i, s, places[s], w.name(i), of_elements))
        stores = [(i, s) for i, s in v.stores if v.slots[s].domain == "block"]
        lines += READ.splitlines() if stores else []
        for i, s in stores:
            block, of_blocks = self._place(int(v.instrs[i].attr or 0), mask)
            lines.append(w.store(i, s, f"p{s} + {block}", w.name(i), of_blocks))
        return lines

    def _tables(self) -> list[tuple[str, str]]:
        """The names of a table's memory, and its addresses."""
        names = []
        for k in tables_of([self.v]):
            values, steps = self.tables[k]
            names += [(f"values{k}", values), (f"steps{k}", steps)]
        return names

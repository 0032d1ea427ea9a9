"""A variant whose elements have numbers in common by blocks -> Triton.

A chunk is some whole blocks. A program computes all of a chunk before the next one.
Where it folds a number of a block, the chunk is a matrix with a row for each block.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

from ...ir.blocks import FOLDS, read_by_block, size_of
from ...ir.graph import Kernel, Variant
from ...ir.tables import TABLES
from .text import indent
from .variant import Function

#: Numbers of a part of a table, in memory.
PART = 256

HELPERS = """\
@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def block_largest(x, mask, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.reshape(tl.where(mask, x, float("-inf")), (BLOCK // SIZE, SIZE))
    folded = tl.reduce(rows, 1, _larger)[:, None]
    return tl.reshape(tl.broadcast_to(folded, (BLOCK // SIZE, SIZE)), (BLOCK,))


@triton.jit
def block_least(x, mask, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.reshape(tl.where(mask, x, float("inf")), (BLOCK // SIZE, SIZE))
    folded = tl.reduce(rows, 1, _smaller)[:, None]
    return tl.reshape(tl.broadcast_to(folded, (BLOCK // SIZE, SIZE)), (BLOCK,))
"""
TABLES_HELPERS = """\
@triton.jit
def lookup(values, code, part):
    return tl.load(values + (part * 256 + code))


@triton.jit
def search(steps, x, part):
    first = part * 256 - 1
    code = (x != x).to(tl.int32) * 0
    for k in tl.static_range(8):
        then = code + (128 >> k)
        code = tl.where(x >= tl.load(steps + (first + then)), then, code)
    return code
"""
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


def _places(kernel: Kernel) -> dict[int, tuple[int, int]]:
    """Return the place of each table's values and of its steps, in float32 before the
    geometry of lanes.
    """
    places, at = {}, 0
    for k in tables_of(kernel.every):
        size = len(TABLES[k].values) * PART
        places[k] = at, at + size
        at += 2 * size
    return places


def table_words(kernel: Kernel) -> list[int]:
    """The tables of a kernel as int64, two float32 in each. Behind the steps of a part
    stand NaNs, which no number reaches.
    """
    numbers: list[float] = []
    for k in tables_of(kernel.every):
        for parts in (TABLES[k].values, TABLES[k].steps):
            for part in parts:
                numbers += [*part, *[float("nan")] * (PART - len(part))]
    memory = struct.pack(f"{len(numbers)}f", *numbers)
    return list(struct.unpack(f"{len(numbers) // 2}q", memory))


def table_names(kernel: Kernel) -> dict[int, tuple[str, str]]:
    """The text of the addresses of each table's values and steps."""
    base = "geometry.to(tl.pointer_type(tl.float32))"
    return {
        k: (f"({base} + {values})", f"({base} + {steps})")
        for k, (values, steps) in _places(kernel).items()
    }


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
        by_block = read_by_block(variant.instrs)
        # `spread` loads what has a number for each block
        w = self.w
        w.loads = [i for i in w.loads if variant.instrs[i].attr not in by_block]

    def functions(self) -> list[list[str]]:
        """All functions."""
        w = self.w
        size = "span * BLOCK"
        places = {s: f"p{s} + o{s}" for s in w.element_slots}
        early = [
            f"start = ordinal.to(tl.int64) * ({size})",
            f"count = tl.minimum(numel - start, {size}).to(tl.int32)",
            "strided = layout >= 0",
            "shape = geometry + tl.where(strided, layout, 0)",
            "dims = tl.load(shape, mask=strided, other=0).to(tl.int32)",
        ]
        loop = [
            "inside = at + tl.arange(0, BLOCK)",
            "mask = inside < count",
            "rest = start + inside",
            *self._blocks(),
            *(f"o{s} = tl.where(strided, 0, rest)" for s in w.element_slots),
            "for d in range(dims):",
            *indent(w.walk(w.element_slots)),
            *self._code(places),
        ]
        of_blocks = [s for s, x in enumerate(self.v.slots) if x.domain == "block"]
        body = [
            *early,
            *(w.assign(i) for i in w.consts),
            "for at in range(0, count, BLOCK):",
            *indent(loop),
            *w.ticket(),
        ]
        shell = w.shell(body, of_blocks)
        at = shell.index("    layout = tl.load(lane)")
        shell[at:at] = indent([f"{k} = {x}" for k, x in self._tables()])
        return [shell]

    def _tables(self) -> list[tuple[str, str]]:
        """The names of a table's memory, and its addresses."""
        names = []
        for k in tables_of([self.v]):
            values, steps = self.tables[k]
            names += [(f"values{k}", values), (f"steps{k}", steps)]
        return names

    def _code(self, places: dict[int, str]) -> list[str]:
        v, w = self.v, self.w
        lines = w.element_loads(places)
        for i in v.code:
            instr = v.instrs[i]
            if instr.op in ("load", "index"):
                continue
            if instr.op == "spread":
                slot = int(v.instrs[instr.args[0]].attr or 0)
                lines.append(w.load(i, f"p{slot} + block", ", mask=mask"))
            elif instr.op in FOLDS:
                x = w.name(instr.args[0])
                call = f"{instr.op}({x}, mask, {self.size}, BLOCK)"
                lines.append(f"{w.name(i)} = {call}")
            elif instr.op == "first":
                lines.append(f"{w.name(i)} = {w.name(instr.args[0])}")
            elif not w.is_const(i):
                lines.append(w.assign(i))
        for i, s in w.element_stores:
            lines.append(w.store(i, s, places[s], w.name(i), ", mask=mask"))
        stores = [(i, s) for i, s in v.stores if v.slots[s].domain == "block"]
        lines += READ.splitlines() if stores else []
        for i, s in stores:
            lines.append(w.store(i, s, f"p{s} + block", w.name(i), ", mask=begins"))
        return lines

    def _blocks(self) -> list[str]:
        """The block of each element, and whether it is the first one there."""
        if not self.size:
            return []
        return [
            f"block = rest // {self.size}",
            f"begins = mask & (rest % {self.size} == 0)",
        ]

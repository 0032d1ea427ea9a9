"""Table of a C++ kernel: addresses, numbers and geometry of every lane.

A `KernelTable` is made from a Kernel and the layouts of the tensors of a call. All
kernels of a step share the pool of addresses. A table only holds positions in it. So a
moved tensor changes one entry of the pool and no table.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ...codegen.cpp.headers import header
from ...codegen.cpp.structs import fields
from ...codegen.target import lane_values
from ...ir.blocks import size_of
from ...ir.geometry import contiguous_strides, is_block
from ...ir.graph import DTYPE_BYTES, Kernel, ScalarRef, Symbol, Variant
from ..tables.host_numbers import Cells
from ..tables.reduction_layout import Folding, longest_run, result_strides, rows
from ..tables.rows import Rows
from ..tables.symbols import RowSymbols
from ..tables.updates import TableFields
from ..tables.upload import Arena


class TensorLayout(NamedTuple):
    """Shape and strides (in elements) of one tensor of the call.

    `on_host` is its dtype, if it lies in the CPU's memory.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    on_host: str = ""


class KernelTable(Protocol):
    """Interface of one kernel bound to the tensors of a call, for a target's runtime.

    All kernels of a step share the pool of addresses, which each launch reads.
    `symbolic` is true if each call computes some scalar. `place` is the device whose
    memory has the table, None for the host's own.
    """

    symbolic: bool

    @property
    def place(self) -> torch.device | None:
        """See above."""

    def fill_rows(self, numbers: Sequence[float]) -> None:
        """Write the scalars; `numbers` are the values of the step's symbols."""

    def keep(
        self,
        taking: bytes | None,
        owners: Mapping[int, int],
        helper: ctypes.PyDLL | None,
    ) -> None:
        """See CppTable."""

    def launch(self, threads: int) -> None:
        """Run the kernel once."""


class HostTable(KernelTable, Protocol):
    """Interface of a table in the CPU's memory."""

    def launches(self, threads: int) -> list[Callable[[], object]]:
        """Return C calls that run the kernel once."""


class DeviceTable(KernelTable, Protocol):
    """Interface of a table on a device; its changing words lie in an arena."""

    arena: Arena | None
    cells: Cells

    @property
    def constants(self) -> tuple[torch.Tensor, ...]:
        """Tensors whose contents no launch changes."""

    @property
    def words(self) -> tuple[int, int]:
        """Numbers of words of an arena that the table needs: for lanes, for rows."""

    def settle(self, arena: Arena, lanes: int, rows: int) -> None:
        """Take the table's words of an arena, from `lanes` and from `rows` on."""

    def use_helper(self, helper: ctypes.PyDLL | None) -> None:
        """Use the compiled helper for `refresh` and `fetch`, where there is one."""

    def refresh(self) -> None:
        """Write the addresses that changed since the last refresh to the arena."""

    def fetch(self) -> None:
        """Write the present numbers of the CPU that the table reads to the arena."""

    def part(self) -> TableFields | None:
        """Return the table's TableFields, or None; see the module `updates`."""

    def relocate(self, words: torch.Tensor, device: torch.Tensor) -> None:
        """Adapt a copy of the arena's words to the memory that the kernel will read."""

    def starter(self, lanes: torch.Tensor, rows: torch.Tensor) -> Callable[[], None]:
        """Return a function that starts the kernel once, with these words."""

    def run(self, start: Callable[[], None] | None = None) -> None:
        """Start the kernel with the tables on the device."""


#: (kernel, pool, pool position of a buffer, layouts of buffers) -> table
TableFactory = Callable[
    [Kernel, "array[int]", Mapping[int, int], Mapping[int, TensorLayout]], KernelTable
]


class TableStruct(ctypes.Structure):
    """Arguments of a kernel's launch, for one variant."""

    _fields_ = fields(header("prelude"), "Table")


def _expanded(layout: TensorLayout, space: tuple[int, ...]) -> tuple[int, ...]:
    """Return a tensor's strides in a larger index space: 0 where it repeats."""
    missing = len(space) - len(layout.shape)
    strides = [0] * missing
    for size, wanted, stride in zip(
        layout.shape, space[missing:], layout.stride, strict=True
    ):
        strides.append(stride if size == wanted and wanted != 1 else 0)
    return tuple(strides)


def geometry(
    space: tuple[int, ...], layouts: Sequence[TensorLayout]
) -> tuple[int, ...] | None:
    """Return None if one flat index serves all tensors of a lane, else sizes and
    strides.

    The dimensions are ordered by the first tensor's strides and joined where every
    tensor allows it, so that the inner loop is long.
    """
    if not layouts or 0 in space:
        return None
    first = layouts[0]
    if first.shape == space and is_block(first.shape, first.stride):
        proper_strides = tuple(
            s for n, s in zip(space, first.stride, strict=True) if n != 1
        )
        for other in layouts[1:]:
            if other.shape != space:
                break
            if other.stride != first.stride and proper_strides != tuple(
                s for n, s in zip(space, other.stride, strict=True) if n != 1
            ):
                break
        else:
            return None
    strides = [_expanded(x, space) for x in layouts]
    dims = [d for d in range(len(space)) if space[d] != 1]
    dims.sort(key=lambda d: tuple(-s[d] for s in strides))
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for d in dims:
        if sizes and all(
            step[-1] == s[d] * space[d] for step, s in zip(steps, strides, strict=True)
        ):
            sizes[-1] *= space[d]
            for step, s in zip(steps, strides, strict=True):
                step[-1] = s[d]
            continue
        sizes.append(space[d])
        for step, s in zip(steps, strides, strict=True):
            step.append(s[d])
    if not sizes:
        sizes = [1]
        steps = [[0] for _ in strides]
    return (len(sizes), *sizes, *(x for step in steps for x in step))


class VariantTable:
    """Arrays of one variant, kept alive while a struct points to them."""

    def __init__(
        self,
        variant: Variant,
        position: Mapping[int, int],
        layouts: Mapping[int, TensorLayout],
        encode: Callable[[Folding], list[int]] = rows,
    ) -> None:
        columns, lanes = variant.columns, variant.lanes
        self.encode = encode
        self.position = array(
            "i", [position[b] for lane in zip(*columns, strict=True) for b in lane]
        )
        refs: dict[tuple[ScalarRef, ...], int] = {}
        rows = zip(*variant.scalars, strict=True) if variant.scalars else ((),) * lanes
        self.row = array("i", [refs.setdefault(r, len(refs)) for r in rows])
        self.rows = array("d", [0.0] * max(1, len(refs) * len(variant.scalars)))
        places: list[tuple[int, int]] = []
        for k, ref in enumerate(ref for row in refs for ref in row):
            if isinstance(ref, Symbol):
                places.append((k, ref.expr))
            else:
                self.rows[k] = ref.value
        self.symbols = RowSymbols(places, self.rows)
        elements = [
            s for s, slot in enumerate(variant.slots) if slot.domain == "element"
        ]
        # the written tensors lead, so that the loop follows their order of memory
        leading = sorted(elements, key=lambda s: not variant.slots[s].write)
        self.start = array("q", [0])
        self.strided = array("q")
        self.geometry = array("q")
        total, size = 0, size_of(variant.instrs)
        for lane, space in enumerate(variant.shapes):
            count = 1
            for n in space:
                count *= n
            total += count if elements or variant.reduction else 0
            self.start.append(total)
            lane_layouts = [layouts[columns[s][lane]] for s in leading]
            leads = bool(variant.reduction or size)
            if variant.reduction:
                # eager reduces in the order of memory of the operand
                lane_layouts.insert(0, layouts[variant.operands[lane]])
            elif size:
                # the elements of a block are neighbours of a contiguous tensor
                plain = TensorLayout(space, contiguous_strides(space))
                lane_layouts.insert(0, plain)
            shape_and_steps = geometry(space, lane_layouts) if elements else None
            if variant.reduction == "dims":
                self.strided.append(len(self.geometry))
                folded = self._rows(variant, lane, layouts, elements)
                self.geometry.extend(folded)
                continue
            if shape_and_steps is None:
                self.strided.append(-1)
                continue
            self.strided.append(len(self.geometry))
            dims = shape_and_steps[0]
            head, strides = shape_and_steps[: 1 + dims], shape_and_steps[1 + dims :]
            strides = strides[dims:] if leads else strides
            by_slot = {
                s: strides[k * dims : (k + 1) * dims] for k, s in enumerate(leading)
            }
            self.geometry.extend(head)
            for s in elements:
                self.geometry.extend(by_slot[s])
            if variant.reduction:
                self.geometry.extend(longest_run(layouts[variant.operands[lane]][:2]))
        self.values = array("d", [0.0] * max(1, lanes * len(lane_values(variant))))
        self.elements = total
        self.lanes = lanes

    def _rows(
        self,
        variant: Variant,
        lane: int,
        layouts: Mapping[int, TensorLayout],
        elements: list[int],
    ) -> list[int]:
        space, dims = variant.shapes[lane], variant.reduced[lane]
        fold = variant.instrs[variant.folds[0]]
        results = []
        for s, slot in enumerate(variant.slots):
            if slot.domain == "output":
                shape, stride = layouts[variant.columns[s][lane]][:2]
                results.append(result_strides(shape, stride, space, dims))
        folding = Folding(
            space,
            dims,
            _expanded(layouts[variant.operands[lane]], space),
            [_expanded(layouts[variant.columns[s][lane]], space) for s in elements],
            results,
            DTYPE_BYTES[fold.dtype],
            int(fold.attr or 0),
            is_block(*layouts[variant.operands[lane]][:2]),
        )
        return self.encode(folding)

    def fill_rows(self, numbers: Sequence[float]) -> None:
        """Write the scalar rows that change: the values of the step's symbols."""
        self.symbols.write(numbers)

    @property
    def symbolic(self) -> bool:
        return bool(self.symbols.places)


def owners_of_lanes(variant: Variant, owners: Mapping[int, int]) -> list[int]:
    """Return the one owner of each lane's buffers; -1 for a lane without an owner."""
    return [
        max(owners.get(b, -1) for b in lane)
        for lane in zip(*variant.columns, strict=True)
    ]


def _address(a: array[int] | array[float]) -> int:
    return a.buffer_info()[0] if len(a) else 0


class CppTable:
    """All variants' tables of one C++ kernel, as the structs that a launch passes.

    `entry(structs, threads)` is the compiled function. `library` is the address of the
    struct of vector functions.
    """

    place: torch.device | None = None

    def __init__(
        self,
        entry: Callable[[Any, int], None],
        library: int,
        kernel: Kernel,
        pool: array[int],
        position: Mapping[int, int],
        layouts: Mapping[int, TensorLayout],
    ) -> None:
        self.entry = entry
        self.threads = 0
        self.variants = kernel.every
        #: of each variant, once lanes are left out
        self._rows: list[Rows] = []
        self.tables = [VariantTable(v, position, layouts) for v in kernel.every]
        self.symbolic = any(t.symbolic for t in self.tables)
        #: reductions of each variant, whose parts wait in memory
        self.folds = [len(v.folds) for v in kernel.every]
        self.partials: list[array[int]] = []
        self.structs = (TableStruct * len(self.tables))()
        for struct, t in zip(self.structs, self.tables, strict=True):
            struct.pool = _address(pool)
            struct.position = _address(t.position)
            struct.rows = _address(t.rows)
            struct.row = _address(t.row)
            struct.start = _address(t.start)
            struct.geometry = _address(t.geometry)
            struct.strided = _address(t.strided)
            struct.values = _address(t.values)
            struct.lanes = len(t.row)
            struct.library = library

    def fill_rows(self, numbers: Sequence[float]) -> None:
        for t in self.tables:
            t.fill_rows(numbers)

    def prepare(self, threads: int) -> None:
        """Allocate what a launch with this number of threads needs."""
        if threads == self.threads:
            return
        self.threads = threads
        self.partials = []
        for struct, folds, t in zip(self.structs, self.folds, self.tables, strict=True):
            struct.threads = threads
            if folds:
                memory = array("Q", bytes(8 * t.lanes * threads * folds))
                self.partials.append(memory)
                struct.partials = _address(memory)

    def keep(
        self,
        taking: bytes | None,
        owners: Mapping[int, int],
        helper: ctypes.PyDLL | None,
    ) -> None:
        """Let only the lanes take part in launches whose owners have a 1 in `taking`.
        None lets all lanes take part. `owners` is by buffer; lanes without an owner
        have the last byte of `taking`. `helper` is the library of the guards.
        """
        if not self._rows:
            if taking is None:
                return
            none = len(taking) - 1
            rows: list[Rows] = []
            for struct, t, v in zip(
                self.structs, self.tables, self.variants, strict=True
            ):
                lanes = ctypes.addressof(struct) + TableStruct.lanes.offset
                places = [none if k < 0 else k for k in owners_of_lanes(v, owners)]
                arrays = t.position, t.row, t.start, t.strided
                rows.append(Rows(places, *arrays, lanes, helper))
            self._rows = rows  # of all variants, or of none
        for of_variant in self._rows:
            of_variant.keep(taking)

    def launch(self, threads: int) -> None:
        self.prepare(threads)
        self.entry(self.structs, threads)

    def launches(self, threads: int) -> list[Callable[[], object]]:
        """Return C calls that run the kernel once, with this number of threads."""
        self.prepare(threads)
        return [functools.partial(self.entry, self.structs, threads)]

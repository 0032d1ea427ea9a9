"""Tables that a Triton kernel reads, and its launch.

A `TritonTable` binds a module to the tensors of a call and launches it. On CPU tensors
the kernel runs in the interpreter, through the same tables that a GPU reads.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Mapping, Sequence

import torch

from ...codegen.target import Source
from ...codegen.triton.blocks import table_words
from ...codegen.triton.chunks import ROWS, SMALL
from ...codegen.triton.kernel import functions, packs
from ...codegen.triton.reduce import outs
from ...codegen.triton.variant import CHUNK_FIELDS, FEW, RECORD
from ...errors import EagerOnly, LaunchError
from ...handlers import of_handler
from ...ir.graph import Kernel, Variant, makes_numbers
from ..cpp.table import TableFactory, TensorLayout, VariantTable, owners_of_lanes
from ..devices import is_remote
from ..tables.host_numbers import WORD, Cells
from ..tables.reduction_layout import tiles
from ..tables.symbols import RowSymbols
from ..tables.updates import TableFields
from ..tables.upload import Arena, settle_together
from .build import TritonBuilder, TritonModule
from .records import Block, Records
from .registry import Program, type_of

#: Most chunks of a program, and the number of programs up to which each takes one
#: chunk. The latter is several times what a GPU runs at once (132 multiprocessors of an
#: H100 or H200 take 396 to 528). So the last programs do not leave most of the GPU
#: idle. Chosen by counting, not yet measured on a GPU.
SPAN, PROGRAMS = 16, 2048


def span_of(chunks: int) -> int:
    """Return the chunks that a program takes, in a launch of `chunks` chunks."""
    return min(SPAN, max(1, chunks // PROGRAMS))


def _chunks(variant: Variant, table: VariantTable, block: int) -> torch.Tensor:
    """Return each lane's number of chunks, of elements or of results."""
    if variant.reduction == "dims":
        lanes = (table.geometry[k : k + 3] for k in table.strided)
        programs = [
            -(-n // outs(each, bool(columns), block)) for columns, n, each in lanes
        ]
        return torch.tensor(programs, dtype=torch.int64)
    start = torch.tensor(table.start, dtype=torch.int64)
    return (start[1:] - start[:-1] + block - 1) // block


def _check_folds(variant: Variant, table: VariantTable) -> None:
    """Raise EagerOnly for rows or columns whose indices need more than 31 bits."""
    if variant.reduction != "dims":
        return
    for k in table.strided:
        most = max(table.geometry[k + 1 : k + 3])
        if most >= FEW:
            raise EagerOnly(
                f"a tensor has {most:,} rows or columns, or so many elements in one; a "
                f"kernel of a GPU folds fewer than {FEW:,}"
            )


def _chunk_table(counts: torch.Tensor, records: torch.Tensor) -> torch.Tensor:
    """Return record and ordinal of each chunk, for lanes with these chunk counts."""
    total = int(counts.sum())
    lane = torch.repeat_interleave(torch.arange(len(counts)), counts)
    first = torch.cumsum(counts, 0) - counts
    ordinal = torch.arange(total) - first[lane]
    return torch.stack((records[lane], ordinal, lane), 1)


def _packed_table(
    number: int, records: torch.Tensor, numel: torch.Tensor
) -> torch.Tensor:
    """Return chunks of ROWS lanes each, for records of small ones, in order of size."""
    firsts = records[::ROWS]
    chunks = torch.zeros((len(firsts), CHUNK_FIELDS), dtype=torch.int64)
    chunks[:, 0] = -1 - number
    chunks[:, 1] = firsts
    chunks[:, 2] = (len(records) - torch.arange(len(firsts)) * ROWS).clamp(max=ROWS)
    ends = torch.arange(len(firsts)) * ROWS + chunks[:, 2] - 1
    chunks[:, 3] = numel[ends]
    return chunks


class TritonTable:
    """All variants' tables of one Triton kernel, as the tensors that a launch passes.

    Addresses and scalars lie in an arena, which the tables of a step share. `refresh`
    writes moved addresses there. `run` only starts the kernel, so that a graph may hold
    it. `launch` does both, and copies the arena to the device in between.
    """

    def __init__(
        self,
        module: TritonModule,
        program: Program,
        device: torch.device,
        kernel: Kernel,
        pool: array[int],
        position: Mapping[int, int],
        layouts: Mapping[int, TensorLayout],
    ) -> None:
        self.module = module
        self.program = program
        self.place = device
        self.name = kernel.name
        self.pool = pool
        self.tables = [VariantTable(v, position, layouts, tiles) for v in kernel.every]
        for variant, table in zip(kernel.every, self.tables, strict=True):
            _check_folds(variant, table)
        self.symbolic = any(t.symbolic for t in self.tables)
        block = module.sizes["BLOCK"]
        self.position = position
        host = {b: x.on_host for b, x in layouts.items() if x.on_host}
        self.cells = Cells(kernel, host if is_remote(device) else {})
        # the word after a lane's addresses is the address of its chunks' partial
        # results
        widths = [RECORD + len(v.slots) + (v.reduction == "full") for v in kernel.every]
        words = sum(w * v.lanes for w, v in zip(widths, kernel.every, strict=True))
        lanes = torch.zeros(max(1, words), dtype=torch.int64)
        geometry = [*table_words(kernel), 0]
        rows = [0]
        chunks: list[torch.Tensor] = []
        blocks: list[Block] = []
        #: by variant, its lanes in the order of their records, and their elements
        self.order: list[tuple[torch.Tensor, torch.Tensor]] = []
        #: by variant, the owner of each of those, once lanes are left out
        self._owners: list[torch.Tensor] = []
        every = [
            _chunks(v, t, block) for v, t in zip(kernel.every, self.tables, strict=True)
        ]
        total = sum(
            int(c.sum())
            for c, v in zip(every, kernel.every, strict=True)
            if not v.reduction
        )
        self.span = span_of(total)
        base = partials = waited = 0
        tickets = 1  # the first is that of lanes that are done
        for number, width, variant, table, counts in zip(
            functions(kernel), widths, kernel.every, self.tables, every, strict=True
        ):
            n, slots = variant.lanes, variant.slots
            records = lanes[base : base + n * width].view(n, width)
            start = torch.tensor(table.start, dtype=torch.int64)
            numel = start[1:] - start[:-1]
            writes = any(s.domain == "lane" and s.write for s in slots)
            if variant.reduction == "dims":
                numel = torch.tensor([table.geometry[k + 1] for k in table.strided])
            if not variant.reduction:
                counts = (counts + self.span - 1) // self.span
            # a lane without elements still has numbers to store
            counts = counts.clamp(min=1) if writes else counts
            row = torch.tensor(table.row, dtype=torch.int64)
            strided = torch.tensor(table.strided, dtype=torch.int64)
            place_in_pool = torch.tensor(table.position, dtype=torch.int64)
            place_in_pool = place_in_pool.view(n, len(slots))
            cells = self.cells.column(variant.columns, n)
            small = torch.zeros(n, dtype=torch.bool)
            order = torch.arange(n)
            if packs(kernel, variant):
                small = (strided < 0) & (numel <= min(SMALL, block)) & (counts > 0)
            if int(small.sum()) < 2:
                small[:] = False
            else:
                # those come first, by size, so that neighbours share a program
                order = torch.where(small, numel, 2**62).argsort(stable=True)
                numel, counts, row, strided, place_in_pool, cells, small = (
                    x[order]
                    for x in (numel, counts, row, strided, place_in_pool, cells, small)
                )
            if len(chunks) < len(kernel.variants) and makes_numbers(variant):
                waited += int((counts > 0).sum())
            if variant.reduction == "full":
                folds = len(variant.folds)
                ends = partials + torch.cumsum(counts * folds, 0)
                records[:, -1] = ends - counts * folds
                partials = int(ends[-1])
            records[:, 1] = numel
            self.order.append((order, numel))
            records[:, 2] = row * len(variant.scalars) + rows[-1]
            records[:, 3] = counts
            blocks.append(
                Block(
                    base,
                    n,
                    width,
                    place_in_pool,
                    torch.tensor([s.domain == "element" for s in slots]),
                    torch.where(strided >= 0, strided + len(geometry) - 1, -1),
                    cells,
                    torch.tensor([s.domain == "lane" and s.write for s in slots]),
                )
            )
            several = int(small.sum())
            places = base + torch.arange(n) * width
            chunk_rows = _chunk_table(counts[several:], places[several:])
            chunk_rows[:, 2] += tickets + several
            first = torch.full((len(chunk_rows), 1), number)
            alone = torch.cat((first, chunk_rows), 1)
            together = _packed_table(number, places[:several], numel)
            chunks.append(torch.cat((together, alone)))
            geometry[-1:] = [*table.geometry, 0]
            rows.append(rows[-1] + len(table.rows))
            base += n * width
            tickets += n
        self.records = Records(blocks)
        self.row_starts = rows
        table_of_chunks = torch.cat(chunks)
        #: programs of the grid; those after them wait until all lanes are done
        self.programs = sum(map(len, chunks[: len(kernel.variants)]))
        head = [self.programs, len(table_of_chunks) - self.programs, waited, self.span]
        table_of_chunks = torch.cat((torch.tensor([head]), table_of_chunks))
        assert table_of_chunks.shape[1] == CHUNK_FIELDS
        assert int(table_of_chunks.max()) < 2**31  # 64 bits are only in addresses
        #: records of lanes; once settled, those of the arena
        self.lanes = lanes
        self.kernel = kernel
        stores = sum(int(b.stored.sum()) * b.lanes for b in blocks)
        #: words of an arena that the table needs: for lanes, for rows and cells, and
        #: for what left-out lanes store
        self.words = (len(lanes), max(1, rows[-1] + len(self.cells) + stores))
        self.arena: Arena | None = None
        #: unchanged by launches, or restored by them
        self.constants = tuple(
            x.to(device)
            for x in (
                table_of_chunks.to(torch.int32),
                torch.tensor(geometry, dtype=torch.int64),
                torch.zeros(tickets, dtype=torch.int32),
                torch.zeros(max(1, partials), dtype=torch.int64),
            )
        )
        self.known: array[int] | None = None
        #: true if cells may differ from the arena's
        self.fetching = False

    # ---------------------------------------------------------------- its arena

    def settle(self, arena: Arena, lanes: int, rows: int) -> None:
        """Take words of an arena, from `lanes` and from `rows` on."""
        self.arena = arena
        self.lanes_at, self.rows_at = lanes, rows
        records = arena.host[lanes : lanes + len(self.lanes)]
        self.lanes = records.copy_(self.lanes)
        self.rows = arena.host[rows : rows + self.words[1]].view(torch.float64)
        self.cells_at = rows + self.row_starts[-1]
        cells = arena.host[self.cells_at : self.cells_at + len(self.cells)]
        self.cells.settle(cells, self.pool, self.position)
        self._numbers = (ctypes.c_double * len(self.rows)).from_address(
            self.rows.data_ptr()
        )
        places: list[tuple[int, int]] = []
        for first, table in zip(self.row_starts[:-1], self.tables, strict=True):
            self._numbers[first : first + len(table.rows)] = list(table.rows)
            places += [(first + k, expr) for k, expr in table.symbols.places]
        self.symbols = RowSymbols(places, self._numbers)
        self._start = self.starter(arena.device, arena.device)

    def starter(self, lanes: torch.Tensor, rows: torch.Tensor) -> Callable[[], None]:
        """Return a function that starts the kernel once, with these words."""
        chunks, *others = self.constants
        lanes = lanes[self.lanes_at : self.lanes_at + self.words[0]]
        rows = rows[self.rows_at : self.rows_at + self.words[1]].view(torch.float64)
        if not self.programs:
            return lambda: None
        return self.program.bind(self.programs, (chunks, lanes, rows, *others))

    def fill_rows(self, numbers: Sequence[float]) -> None:
        """Write the scalars; `numbers` are the values of the step's symbols."""
        arena = self._settled()
        self.symbols.write(numbers)
        places = self.symbols.places
        if places:
            arena.changed(self.rows_at + places[0][0], self.rows_at + places[-1][0] + 1)

    def use_helper(self, helper: ctypes.PyDLL | None) -> None:
        """Let the compiled helper refresh and fetch, where there is one."""
        self.records.use_helper(helper)
        self.cells.use_helper(helper)

    def _settled(self) -> Arena:
        if self.arena is None:
            settle_together([self])
        assert self.arena is not None
        return self.arena

    # ---------------------------------------------------------------- launches

    def part(self) -> TableFields | None:
        """Return the table's part of the C call that writes all tables of its arena."""
        arena = self._settled()
        addresses, numbers = self.records.helper_call, self.cells.helper_call
        if addresses is None or (len(self.cells) and numbers is None):
            return None
        return TableFields(
            addresses=addresses.at,
            numbers=0 if numbers is None else numbers.at,
            lanes=self.lanes.data_ptr(),
            first_cell=arena.device.data_ptr() + WORD * self.cells_at,
            lanes_at=self.lanes_at,
            cells_at=self.cells_at,
        )

    def fetch(self) -> None:
        """Write the present numbers of the CPU that changed."""
        arena = self._settled()
        again, self.fetching = self.fetching, True
        if len(self.cells) and (self.cells.fetch() or again):
            arena.changed(self.cells_at, self.cells_at + len(self.cells))
        self.fetching = False

    def refresh(self) -> None:
        """Write the addresses that changed since the last refresh."""
        arena = self._settled()
        if self.known == self.pool:
            return
        first_cell = arena.device.data_ptr() + WORD * self.cells_at
        low, high = self.records.refresh(self.lanes, self.pool, first_cell)
        arena.changed(self.lanes_at + low, self.lanes_at + high)
        self.known = self.pool[:]

    def keep(
        self,
        taking: bytes | None,
        owners: Mapping[int, int],
        helper: ctypes.PyDLL | None,
    ) -> None:
        """Let only the lanes of some owners take part in launches, see CppTable. The
        other lanes have no elements, and each number of theirs is stored to a word that
        no other program uses.

        Not for lanes that are reduced.
        """
        arena = self._settled()
        if not self._owners:
            self._owners = [
                torch.tensor(owners_of_lanes(v, owners), dtype=torch.int64)[order]
                for v, (order, _) in zip(self.kernel.every, self.order, strict=True)
            ]
        flags: torch.Tensor | None = None
        if taking is not None:
            flags = torch.frombuffer(bytearray(taking), dtype=torch.uint8)
        absent: list[torch.Tensor] = []
        for b, (_, numel), of in zip(
            self.records.blocks, self.order, self._owners, strict=True
        ):
            gone = torch.zeros(b.lanes, dtype=torch.bool)
            if flags is not None:
                gone = flags[of] == 0
            records = self.lanes[b.base : b.base + b.lanes * b.width]
            records.view(b.lanes, b.width)[:, 1] = torch.where(gone, 0, numel)
            absent.append(gone)
        self.records.leave_out(absent, len(self.cells))
        self.known = None
        for mark_stale in arena.when_stale:
            mark_stale()
        arena.changed(self.lanes_at, self.lanes_at + len(self.lanes))

    def relocate(self, words: torch.Tensor, device: torch.Tensor) -> None:
        """Adapt a copy of the arena's words, in host memory, to `device`, the memory
        from which a kernel will read it. Cells lie there too.
        """
        arena = self._settled()
        records = words[self.lanes_at : self.lanes_at + self.words[0]]
        self.records.relocate(records, device.data_ptr() - arena.device.data_ptr())

    def run(self, start: Callable[[], None] | None = None) -> None:
        """Start the kernel with the tables on the device.

        `start` is the result of `starter` for other words. Raises LaunchError.
        """
        try:
            (start or self._start)()
        except Exception as error:
            interrupt = of_handler(error)
            if interrupt is not None:
                raise interrupt from None
            raise LaunchError(
                f"{self.name} failed on {self.place} ({self.module.path}): {error}"
            ) from error

    def launches(self, threads: int = 0) -> list[Callable[[], object]]:
        """Return C calls that run the kernel in Triton's interpreter, on the CPU."""
        return [functools.partial(self.launch, threads)]

    def launch(self, threads: int = 0) -> None:
        """Run the kernel once; `threads` has no meaning here."""
        self.fetch()
        self.refresh()
        self._settled().push()
        self.run()


def triton_factory(
    source: Source,
    cache_dir: str | None,
    device: torch.device | str = "cpu",
    builder: TritonBuilder | None = None,
    interpret: bool | None = None,
) -> TableFactory:
    """Return a function that makes the tables of a kernel whose tensors are on
    `device`.

    The kernel is compiled here. Raises BuildError. Raises ConfigError where nothing
    starts kernels on the device.
    """
    place = torch.device(device)
    kind = type_of(place)
    wanted = kind.interpreted if interpret is None else interpret
    module = (builder or TritonBuilder()).load(source, cache_dir, wanted)
    program = kind.program(module, place)
    return functools.partial(TritonTable, module, program, place)

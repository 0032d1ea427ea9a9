"""The tables that a Triton kernel reads, and its launch.

A `TritonTable` binds a module to the tensors of a call and launches it. On CPU tensors
the kernel runs in the interpreter, through the same tables that a GPU reads.
"""

from __future__ import annotations

import contextlib
import functools
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..codegen.target import Source
from ..codegen.triton import (
    ALIGNED,
    CHUNK_FIELDS,
    FLAT,
    RECORD,
    ROWS,
    SMALL,
    functions,
    packs,
)
from ..codegen.triton_reduce import OUTS
from ..errors import ConfigError, LaunchError
from ..ir import Kernel, makes_numbers
from .rows import tiles
from .table import TableFactory, TensorLayout, VariantTable
from .triton_build import TritonBuilder, TritonModule
from .triton_interpreter import interpreting


class _Mirror:
    """A table in host memory and its copy on the device; on a CPU they are one.

    A copy is asynchronous and reads pinned memory, which is written again only when the
    copy is done: two pinned stages take turns.
    """

    def __init__(self, host: torch.Tensor, device: torch.device) -> None:
        self.host = host
        self.remote = device.type != "cpu"
        self.device = torch.empty_like(host, device=device) if self.remote else host
        self.stages: list[tuple[torch.Tensor, torch.Event]] = []
        if self.remote:
            self.stages = [
                (torch.empty_like(host, pin_memory=True), torch.Event(device))
                for _ in range(2)
            ]

    def push(self) -> None:
        """Bring what the host wrote to the device."""
        if not self.remote:
            return
        self.stages.reverse()
        stage, done = self.stages[0]
        done.synchronize()
        stage.copy_(self.host)
        self.device.copy_(stage, non_blocking=True)
        done.record()


def _chunk_table(counts: torch.Tensor, records: torch.Tensor) -> torch.Tensor:
    """Record and ordinal of each chunk, for lanes of so many chunks."""
    total = int(counts.sum())
    lane = torch.repeat_interleave(torch.arange(len(counts)), counts)
    first = torch.cumsum(counts, 0) - counts
    ordinal = torch.arange(total) - first[lane]
    return torch.stack((records[lane], ordinal, lane), 1)


def _packed_table(
    number: int, records: torch.Tensor, numel: torch.Tensor
) -> torch.Tensor:
    """Chunks of ROWS lanes each, for the records of small ones, in order of size."""
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

    `refresh` brings moved addresses and new scalars to the device; `run` starts the
    kernel and does nothing else, so that a CUDA graph may hold it; `launch` is both.
    """

    def __init__(
        self,
        module: TritonModule,
        device: torch.device | str,
        kernel: Kernel,
        pool: array[int],
        position: Mapping[int, int],
        layouts: Mapping[int, TensorLayout],
    ) -> None:
        self.module = module
        self.target = torch.device(device)
        self.name = kernel.name
        self.pool = pool
        self._check()
        self.tables = [VariantTable(v, position, layouts, tiles) for v in kernel.every]
        self.symbolic = any(t.symbolic for t in self.tables)
        block = module.sizes["BLOCK"]
        # what a lane's chunks fold to lies where the word after its addresses says
        widths = [RECORD + len(v.slots) + (v.reduction == "full") for v in kernel.every]
        words = sum(w * v.lanes for w, v in zip(widths, kernel.every, strict=True))
        lanes = torch.zeros(max(1, words), dtype=torch.int64)
        geometry = [0]
        rows = [0]
        chunks: list[torch.Tensor] = []
        #: by variant: its records, positions in the pool, element slots, geometry
        self.views: list[tuple[torch.Tensor, ...]] = []
        base = partials = waited = 0
        tickets = 1  # the first is that of lanes that are done
        for number, width, variant, table in zip(
            functions(kernel), widths, kernel.every, self.tables, strict=True
        ):
            n, slots = variant.lanes, variant.slots
            records = lanes[base : base + n * width].view(n, width)
            start = torch.tensor(table.start, dtype=torch.int64)
            numel = start[1:] - start[:-1]
            writes = any(s.domain == "lane" and s.write for s in slots)
            if variant.reduction == "dims":
                numel = torch.tensor([table.geometry[k + 1] for k in table.strided])
                counts = (numel + OUTS - 1) // OUTS
            else:
                counts = (numel + block - 1) // block
            # a lane without elements still has numbers to store
            counts = counts.clamp(min=1) if writes else counts
            row = torch.tensor(table.row, dtype=torch.int64)
            strided = torch.tensor(table.strided, dtype=torch.int64)
            place_in_pool = torch.tensor(table.position, dtype=torch.int64)
            place_in_pool = place_in_pool.view(n, len(slots))
            small = torch.zeros(n, dtype=torch.bool)
            if packs(kernel, variant):
                small = (strided < 0) & (numel <= min(SMALL, block)) & (counts > 0)
            if int(small.sum()) < 2:
                small[:] = False
            else:
                # those come first, by size, so that neighbours share a program
                order = torch.where(small, numel, 2**62).argsort(stable=True)
                numel, counts, row, strided, place_in_pool, small = (
                    x[order]
                    for x in (numel, counts, row, strided, place_in_pool, small)
                )
            if len(chunks) < len(kernel.variants) and makes_numbers(variant):
                waited += int((counts > 0).sum())
            if variant.reduction == "full":
                folds = len(variant.folds)
                ends = partials + torch.cumsum(counts * folds, 0)
                records[:, -1] = ends - counts * folds
                partials = int(ends[-1])
            records[:, 1] = numel
            records[:, 2] = row * len(variant.scalars) + rows[-1]
            records[:, 3] = counts
            self.views.append(
                (
                    records,
                    place_in_pool,
                    torch.tensor([s.domain == "element" for s in slots]),
                    torch.where(strided >= 0, strided + len(geometry) - 1, -1),
                )
            )
            several = int(small.sum())
            places = base + torch.arange(n) * width
            found = _chunk_table(counts[several:], places[several:])
            found[:, 2] += tickets + several
            first = torch.full((len(found), 1), number)
            alone = torch.cat((first, found), 1)
            together = _packed_table(number, places[:several], numel)
            chunks.append(torch.cat((together, alone)))
            geometry[-1:] = [*table.geometry, 0]
            rows.append(rows[-1] + len(table.rows))
            base += n * width
            tickets += n
        self.row_starts = rows
        place = self.target
        self.lanes = _Mirror(lanes, place)
        self.rows = _Mirror(torch.zeros(rows[-1], dtype=torch.float64), place)
        table_of_chunks = torch.cat(chunks)
        #: chunks of the grid; those after them wait until all lanes are done
        self.programs = sum(map(len, chunks[: len(kernel.variants)]))
        head = [self.programs, len(table_of_chunks) - self.programs, waited, 0]
        table_of_chunks = torch.cat((torch.tensor([head]), table_of_chunks))
        assert table_of_chunks.shape[1] == CHUNK_FIELDS
        assert int(table_of_chunks.max()) < 2**31  # 64 bits are only in addresses
        self.arguments = (
            table_of_chunks.to(torch.int32).to(place),
            self.lanes.device,
            self.rows.device,
            torch.tensor(geometry, dtype=torch.int64).to(place),
            torch.zeros(tickets, dtype=torch.int32).to(place),
            torch.zeros(max(1, partials), dtype=torch.int64).to(place),
        )
        self.known: array[int] | None = None
        self.new_rows = True
        self.options = _known_options(module) if self.programs else {}

    def _check(self) -> None:
        on_cpu = self.target.type == "cpu"
        if on_cpu and not self.module.interpreted:
            raise ConfigError(
                f"{self.name}: on CPU tensors the triton target runs in Triton's "
                "interpreter only. Set TRITON_INTERPRET=1 before Python starts, or use "
                'options={"target": "cpp"}.'
            )
        if not on_cpu and self.module.interpreted:
            raise ConfigError(
                f"{self.name}: TRITON_INTERPRET is set, but the tensors are on "
                f"{self.target}. Unset it to run the kernel there."
            )

    def fill_rows(self, numbers: Sequence[float]) -> None:
        """Write the scalars; `numbers` are the values of the step's symbols."""
        for k, table in enumerate(self.tables):
            table.fill_rows(numbers)
            low, high = self.row_starts[k : k + 2]
            self.rows.host[low:high] = torch.frombuffer(table.rows, dtype=torch.float64)
        self.new_rows = True

    def refresh(self) -> None:
        """Bring to the device what changed since the last launch."""
        if self.known != self.pool:
            # addresses lie below 2**63
            pool = torch.frombuffer(self.pool, dtype=torch.int64)
            for records, position, elements, strided in self.views:
                addresses = pool[position]
                records[:, RECORD : RECORD + addresses.shape[1]] = addresses
                aligned = ((addresses & 15 == 0) | ~elements).all(1)
                flat = torch.where(aligned, ALIGNED, FLAT)
                records[:, 0] = torch.where(strided >= 0, strided, flat)
            self.known = self.pool[:]
            self.lanes.push()
        if self.new_rows:
            self.rows.push()
            self.new_rows = False

    def run(self) -> None:
        """Start the kernel with the tables as they are."""
        if not self.programs:
            return
        module = self.module
        scope = interpreting() if module.interpreted else _on(self.target)
        try:
            with scope:
                module.entry[(self.programs,)](
                    *self.arguments, **module.sizes, **self.options
                )
        except Exception as error:
            raise LaunchError(
                f"{self.name} failed on {self.target} ({module.path}): {error}"
            ) from error

    def launch(self, threads: int = 0) -> None:
        """Run the kernel once; `threads` has no meaning here."""
        self.refresh()
        self.run()


def triton_factory(
    source: Source,
    cache_dir: str | None,
    device: torch.device | str = "cpu",
    builder: TritonBuilder | None = None,
    interpret: bool | None = None,
) -> TableFactory:
    """What makes the tables of a kernel whose tensors are on `device`."""
    module = (builder or TritonBuilder()).load(source, cache_dir, interpret)
    return functools.partial(TritonTable, module, device)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a device current, if it is not."""
    if device.index in (None, torch.accelerator.current_device_index()):
        return contextlib.nullcontext()
    manager: contextlib.AbstractContextManager[Any] = torch.get_device_module(
        device.type
    ).device(device)
    return manager


def _known_options(module: TritonModule) -> dict[str, Any]:
    """The launch options that this machine's Triton backend has."""
    if module.interpreted:
        return dict(module.options)
    import triton
    from triton.compiler import make_backend

    backend = make_backend(triton.runtime.driver.active.get_current_target())
    known = backend.parse_options({}).__dict__
    return {k: v for k, v in module.options.items() if k in known}

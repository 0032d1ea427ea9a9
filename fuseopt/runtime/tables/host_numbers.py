"""Copy numbers from the CPU's memory to the kernels of a device.

Eager accepts a zero-dimensional tensor of the CPU (a step counter, a learning rate)
beside tensors of any device. A kernel cannot read that memory. So each such number has
a *cell*, a word behind the kernel's rows. One asynchronous copy sends the cells with
the addresses and scalars that changed. The step writes a number that it computes on the
CPU only for a device directly to its cell.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import CaptureError
from ...ir.graph import DTYPE_BYTES, Buffer, Kernel
from .words import HelperCall, Numbers

WORD = 8
CPU = "cpu"
#: Types to move numbers as, by their bytes.
SIZES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def place_of(buffers: Sequence[Buffer], kernel: Kernel) -> str:
    """Return the device that a kernel runs on, which may read numbers of the CPU.

    Raises CaptureError if its tensors are on several.
    """
    named: dict[str, str] = {}
    numbers: dict[str, str] = {}
    for v in kernel.every:
        for slot, column in zip(v.slots, v.columns, strict=True):
            number = slot.domain == "lane" and not slot.write
            for b in column:
                x = buffers[b]
                names = numbers if number and x.device == CPU else named
                names.setdefault(x.device, x.name)
    if len(named) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in named.items())
        raise CaptureError(f"one update uses tensors of several devices: {places}")
    return next(iter(named or numbers))


class Cells:
    """Cells of one kernel: `of[b]` is that of buffer b, counted from 0.

    `on_host` has the dtypes of buffers in the CPU's memory.
    """

    def __init__(self, kernel: Kernel, on_host: Mapping[int, str]) -> None:
        self.on_host = on_host
        self.of: dict[int, int] = {}
        for v in kernel.every:
            for column in v.columns:
                for b in column:
                    if b in on_host:
                        self.of.setdefault(b, len(self.of))
        #: (position in the pool, cell, bytes) of numbers to copy to their cells
        self.fetched: list[tuple[int, int, int]] = []
        self.helper: ctypes.PyDLL | None = None
        self.words = self.seen = torch.empty(0, dtype=torch.int64)
        self._settle([])

    def __len__(self) -> int:
        return len(self.of)

    def column(self, columns: Sequence[Sequence[int]], lanes: int) -> torch.Tensor:
        """Return the cell of each lane's slots, -1 for none: [lanes, slots]."""
        flat = [[self.of.get(b, -1) for b in column] for column in columns]
        return torch.tensor(flat, dtype=torch.int64).view(len(columns), lanes).t()

    def settle(
        self,
        words: torch.Tensor,
        pool: array[int],
        position: Mapping[int, int],
    ) -> None:
        """Take words of host memory, one for each cell."""
        self.words, self.pool = words, pool
        self.seen = words.clone()
        self._settle(
            [
                (position[b], cell, DTYPE_BYTES[self.on_host[b]])
                for b, cell in self.of.items()
            ]
        )

    def use_helper(self, helper: ctypes.PyDLL | None) -> None:
        """Let the compiled helper fetch, where there is one."""
        self.helper = helper
        self._settle(self.fetched)

    def _settle(self, fetched: list[tuple[int, int, int]]) -> None:
        self.fetched = fetched
        #: the call of the helper, once there are words
        self.helper_call: HelperCall | None = None
        if self.helper is not None and self.of:
            each = zip(*fetched, strict=True) if fetched else ((), (), ())
            names = ("position", "cell", "bytes")
            self.helper_call = HelperCall(
                Numbers(
                    n=len(fetched),
                    cells=len(self.of),
                    words=self.words.data_ptr(),
                    seen=self.seen.data_ptr(),
                ),
                self.helper.fuseopt_numbers,
                {k: array("q", v) for k, v in zip(names, each, strict=True)},
                (ctypes.c_void_p,),
                ctypes.c_int64,
            )
        self._positions = torch.tensor([x[0] for x in fetched], dtype=torch.int64)
        #: addresses of the numbers in the last `fetch`
        self._found: torch.Tensor | None = None
        #: by size: the numbers as tensors, memory to gather them, their destination
        self._groups: list[tuple[list[torch.Tensor], torch.Tensor, Any]] = []

    def give_homes(self, buffers: Sequence[int]) -> dict[int, torch.Tensor]:
        """Return the memory of cells, uint8[8] by buffer, for `buffers` that are
        written there directly. `fetch` leaves these out from now on.
        """
        homes = {
            b: self.words[self.of[b] : self.of[b] + 1].view(torch.uint8)
            for b in buffers
            if b in self.of
        }
        homed = {self.of[b] for b in homes}
        self._settle([x for x in self.fetched if x[1] not in homed])
        return homes

    def fetch(self) -> bool:
        """Copy the numbers to their cells; return whether one changed."""
        if self.helper_call is not None:
            return bool(self.helper_call(self.pool.buffer_info()[0]))
        if self.fetched:
            # addresses lie below 2**63
            addresses = torch.frombuffer(self.pool, dtype=torch.int64)[self._positions]
            if self._found is None or not torch.equal(addresses, self._found):
                self._find(addresses)
            for numbers, together, (words, places) in self._groups:
                torch.cat(numbers, out=together)
                words[places] = together
        if torch.equal(self.words, self.seen):
            return False
        self.seen.copy_(self.words)
        return True

    def _find(self, addresses: torch.Tensor) -> None:
        """Make tensors of the numbers at these addresses, grouped by their size."""
        self._found = addresses
        self._groups = []
        for size, dtype in SIZES.items():
            numbers_of_size = [
                (address, cell)
                for address, (_, cell, bytes_of) in zip(
                    addresses.tolist(), self.fetched, strict=True
                )
                if bytes_of == size
            ]
            if numbers_of_size:
                # these are the tensors of a call, so they live until the fetch is done
                memory = [
                    (ctypes.c_char * size).from_address(at) for at, _ in numbers_of_size
                ]
                numbers = [torch.frombuffer(x, dtype=dtype) for x in memory]
                places = torch.tensor(
                    [cell * (WORD // size) for _, cell in numbers_of_size]
                )
                together = torch.empty(len(numbers_of_size), dtype=dtype)
                self._groups.append(
                    (numbers, together, (self.words.view(dtype), places))
                )

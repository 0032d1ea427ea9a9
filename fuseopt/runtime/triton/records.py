"""Update the parts of lanes' records that depend on addresses, for all variants at
once.

A record holds an address for each slot of its lane, and a flag that lets the main path
take it. Both depend on the pool. One call of the compiled helper updates them for any
number of lanes and variants. Without the helper, operations on tensors do.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...codegen.triton.variant import ALIGNED, FLAT, RECORD
from ..tables.host_numbers import WORD
from ..tables.words import Addresses, HelperCall


class Block(NamedTuple):
    """Records of a variant: index of the first one, number of records, words of each.

    By lane and slot: `position` in the pool, `cell` (or -1). `elements` marks slots
    that are read element by element, `stored` those that are written once a lane.
    `strided` is by lane its geometry, or -1.
    """

    base: int
    lanes: int
    width: int
    position: torch.Tensor
    elements: torch.Tensor
    strided: torch.Tensor
    cell: torch.Tensor
    stored: torch.Tensor


class Records:
    """Words of all lanes that `refresh` writes."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = blocks
        lanes = 0
        words: list[torch.Tensor] = []
        layouts: list[torch.Tensor] = []
        owners: list[torch.Tensor] = []
        for b in blocks:
            slots = b.position.shape[1]
            first = b.base + torch.arange(b.lanes) * b.width
            words.append((first[:, None] + RECORD + torch.arange(slots)).flatten())
            layouts.append(first)
            owner = torch.arange(lanes, lanes + b.lanes)[:, None].expand(-1, slots)
            # a lane's number may lie anywhere
            owners.append(torch.where(b.elements, owner, -1).flatten())
            lanes += b.lanes
        #: by address: the word it goes to, its position in the pool, its cell, the lane
        #: whose first element it points to
        self.words = torch.cat(words)
        self.position = torch.cat([b.position.flatten() for b in blocks])
        self.cell = torch.cat([b.cell.flatten() for b in blocks])
        owner = torch.cat(owners)
        self.elements = (owner >= 0).nonzero().flatten()
        self.owner = owner[self.elements]
        #: by lane: the word of its layout, and its geometry
        self.layouts = torch.cat(layouts)
        self.strided = torch.cat([b.strided for b in blocks])
        self.in_cells = bool((self.cell >= 0).any())
        self._cell = self.cell  # for launches of all lanes
        self.helper_call: HelperCall | None = None
        self._all_owners = owner

    def use_helper(self, helper: ctypes.PyDLL | None) -> None:
        """Let the compiled helper do the work, where there is one."""
        if helper is None:
            return
        arrays = {
            "words": self.words,
            "position": self.position,
            "cell": self.cell,
            "owner": self._all_owners,
            "layouts": self.layouts,
            "strided": self.strided,
            "odd": torch.zeros_like(self.layouts),
        }
        self.helper_call = HelperCall(
            Addresses(
                n=len(self.words),
                lanes=len(self.layouts),
                flat=FLAT,
                aligned=ALIGNED,
            ),
            helper.fuseopt_addresses,
            {name: array("q", t.tolist()) for name, t in arrays.items()},
            (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64),
        )

    def leave_out(self, absent: Sequence[torch.Tensor], cell: int) -> None:
        """Let some lanes of each block store their numbers in cells from now on.

        Each number of each lane has a cell, from `cell` on.
        """
        lanes = [torch.ones(b.lanes, dtype=torch.bool) for b in self.blocks]
        cells = cell + self._stores(lanes).cumsum(0) - 1
        self.cell = torch.where(self._stores(absent), cells, self._cell)
        self.in_cells = bool((self.cell >= 0).any())
        if self.helper_call is not None and len(self.cell):
            given = torch.frombuffer(self.helper_call.arrays["cell"], dtype=torch.int64)
            given.copy_(self.cell)

    def _stores(self, lanes: Sequence[torch.Tensor]) -> torch.Tensor:
        """Mark the addresses to which some lanes of each block store a number."""
        marks = [
            (x[:, None] & b.stored).flatten()
            for x, b in zip(lanes, self.blocks, strict=True)
        ]
        return torch.cat(marks)

    def refresh(
        self, lanes: torch.Tensor, pool: array[int], cells: int
    ) -> tuple[int, int]:
        """Write the addresses of the pool into the words of `lanes`. Return the range
        of changed words, (0, 0) for none. `cells` is the address of the first cell.
        """
        if self.helper_call is not None:
            self.helper_call(lanes.data_ptr(), pool.buffer_info()[0], cells)
            return self.helper_call.struct.low, self.helper_call.struct.high
        # addresses lie below 2**63
        addresses = torch.frombuffer(pool, dtype=torch.int64)[self.position]
        if self.in_cells:
            there = self.cell >= 0
            addresses = torch.where(there, cells + WORD * self.cell, addresses)
        odd = addresses[self.elements] & 15 != 0
        flat = torch.zeros(len(self.layouts), dtype=torch.int64)
        flat.index_add_(0, self.owner, odd.long())
        layout = torch.where(flat > 0, FLAT, ALIGNED)
        new = lanes.clone()
        new[self.words] = addresses
        new[self.layouts] = torch.where(self.strided >= 0, self.strided, layout)
        moved = (new != lanes).nonzero()
        if not len(moved):
            return 0, 0
        lanes.copy_(new)
        return int(moved[0]), int(moved[-1]) + 1

    def relocate(self, lanes: torch.Tensor, distance: int) -> None:
        """Add a distance in bytes to the cells' addresses, in a copy of the words."""
        if self.in_cells:
            lanes[self.words] += distance * (self.cell >= 0)

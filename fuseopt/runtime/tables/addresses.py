"""Pool of addresses: one word for each buffer of a step, which kernels read.

Kernels and the compiled guard have the address of the pool, so that only one word
changes when a tensor moves.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ...ir.graph import DTYPE_BYTES, Buffer


class Positions(NamedTuple):
    """Position of each buffer's address in a pool of `size` words.

    First the tensors of a call, `n_tensors` by source, then all other buffers. `of` is
    the position by buffer. `views` of tensors are (position of the view, position of
    the tensor, bytes between both).
    """

    n_tensors: int
    size: int
    of: dict[int, int]
    views: list[tuple[int, int, int]]


def positions(buffers: Sequence[Buffer], n_tensors: int) -> Positions:
    """Return the Positions of a graph's buffers."""
    of: dict[int, int] = {}
    views: list[tuple[int, int, int]] = []
    # an empty tensor has no address, whatever its storage is
    base = {
        x.storage: b
        for b, x in enumerate(buffers)
        if x.kind in ("static", "arg") and 0 not in x.shape
    }
    size = n_tensors
    for b, x in enumerate(buffers):
        if x.kind in ("static", "arg"):
            of[b] = x.source
        else:
            of[b] = size
            size += 1
    for b, x in enumerate(buffers):
        if x.kind == "view" and x.storage in base:
            base_buffer = buffers[base[x.storage]]
            first = x.offset * DTYPE_BYTES[x.dtype]
            distance = first - base_buffer.offset * DTYPE_BYTES[base_buffer.dtype]
            views.append((of[b], of[base[x.storage]], distance))
    return Positions(n_tensors, size, of, views)


class AddressPool:
    """Addresses of one binding of a plan, in `words`, which never move.

    These write to it:

    - `move`, after a check of the tensors of a call: their addresses, and their views';
    - the compiled guard, the same for tensors that may move without a check;
    - `place(position, address)`: a temp that was allocated, or that an ATen call made;
    - `place_all`: temps of an arena, of a captured graph, or with a fixed home.
    """

    def __init__(self, places: Positions) -> None:
        self.places = places
        self.words = array("Q", bytes(8 * places.size))
        self.place: Callable[[int, int], None] = self.words.__setitem__

    def tensors(self) -> array[int]:
        """Return the addresses of the call's tensors."""
        return self.words[: self.places.n_tensors]

    def move(self, addresses: array[int]) -> None:
        """Write new addresses of a call's tensors, and of their views."""
        self.words[: self.places.n_tensors] = addresses
        for position, base, distance in self.places.views:
            self.words[position] = self.words[base] + distance

    def place_all(self, positions: torch.Tensor, addresses: torch.Tensor) -> None:
        """Write addresses at positions, both int64[n]."""
        words = torch.frombuffer(self.words, dtype=torch.int64)
        words.index_copy_(0, positions, addresses)

    def at(self, positions: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return positions and their addresses, int64[n] each, for `place_all`."""
        places = torch.tensor(positions, dtype=torch.int64)
        return places, torch.frombuffer(self.words, dtype=torch.int64)[places]

    def copy(self) -> AddressPool:
        """Return a second pool with the same addresses, which no kernel reads."""
        pool = AddressPool(self.places)
        pool.words[:] = self.words
        return pool

"""Write the values of a step's symbols to the rows of a kernel."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from operator import itemgetter

import torch

#: Largest number of symbols for which a loop is faster than the calls of torch.
FEW = 8


class RowSymbols:
    """Destinations of symbols: (place in the rows, index of the symbol), in `places`.

    `rows` is the memory of n doubles, which never moves.
    """

    def __init__(
        self,
        places: Sequence[tuple[int, int]],
        rows: array[float] | ctypes.Array[ctypes.c_double],
    ) -> None:
        self.places = places
        self._rows = rows
        self._tensor: torch.Tensor | None = None
        at, symbols = zip(*places, strict=True) if places else ((), ())
        self._at = torch.tensor(at, dtype=torch.int64)
        self._values = itemgetter(*symbols) if len(symbols) > 1 else None

    def write(self, numbers: Sequence[float]) -> None:
        """Write the values of the symbols; `numbers` has them by their index."""
        if self._values is None or len(self.places) <= FEW:
            for place, symbol in self.places:
                self._rows[place] = numbers[symbol]
            return
        if self._tensor is None:
            self._tensor = torch.frombuffer(self._rows, dtype=torch.float64)
        values = array("d", self._values(numbers))
        given = torch.frombuffer(values, dtype=torch.float64)
        self._tensor.index_copy_(0, self._at, given)

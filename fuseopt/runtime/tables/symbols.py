"""Write the values of a step's symbols to the rows of a kernel."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from operator import itemgetter

import torch

Values = Callable[[Sequence[float]], tuple[float, ...]]
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
        self._many: tuple[Values, torch.Tensor, torch.Tensor] | None = None
        if len(places) > FEW:
            at, symbols = zip(*places, strict=True)
            memory = torch.frombuffer(rows, dtype=torch.float64)
            self._many = itemgetter(*symbols), memory, torch.tensor(at)

    def write(self, numbers: Sequence[float]) -> None:
        """Write the values of the symbols, which are `numbers` by their own number."""
        if self._many is None:
            for place, symbol in self.places:
                self._rows[place] = numbers[symbol]
            return
        values_of, memory, at = self._many
        values = array("d", values_of(numbers))
        memory.index_copy_(0, at, torch.frombuffer(values, dtype=torch.float64))

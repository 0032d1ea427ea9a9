"""The numbers of each parameter, as the launches of a led tail write them.

They lie in one tensor, the same at each call, so that kernels find them; the caller
gets a copy of it.
"""

from __future__ import annotations

import torch

from .stats import COLUMNS

Tensors = list[torch.Tensor]
#: What is known of gradients before the step, and of parameters after it.
OF_GRADIENTS, OF_PARAMETERS = (0, 3), (1, 2)


class Table:
    """Room for the numbers of some parameters; `columns`: each of its elements."""

    def __init__(self, n: int, device: torch.device) -> None:
        self.numbers = torch.zeros((n, len(COLUMNS)), device=device)
        rows = [[*row.unbind()] for row in self.numbers.unbind()]
        self.columns: list[Tensors] = [*map(list, zip(*rows, strict=True))]
        self._held: list[bool] = []

    def fits(self, params: Tensors) -> bool:
        """Has it a row for each of some parameters, on their device?"""
        numbers = self.numbers
        return len(numbers) == len(params) and numbers.device == params[0].device

    def of_gradients(self, held: list[bool]) -> list[Tensors]:
        """Where what is known of gradients is written, for each parameter that has one;
        `held`: which these are. Of the others it is zero.
        """
        if held != self._held:
            self.numbers.zero_()
            self._held = held
        return [
            [t for t, has in zip(self.columns[c], held, strict=True) if has]
            for c in OF_GRADIENTS
        ]

    def of_parameters(self) -> list[Tensors]:
        """Where what is known of all parameters is written."""
        return [self.columns[c] for c in OF_PARAMETERS]

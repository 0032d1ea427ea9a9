"""Table of statistics that the launches of a led tail write.

It is one tensor, the same in each call, so that its address does not change; the caller
gets a copy.
"""

from __future__ import annotations

import torch

from .stats import COLUMNS

Tensors = list[torch.Tensor]
#: Columns that are measured before the step, and those measured after it.
OF_GRADIENTS, OF_PARAMETERS = (0, 3), (1, 2)


class Table:
    """Table for `n` parameters. `numbers` is (n, len(COLUMNS)); `columns` has its
    elements, as tensors without dimensions.
    """

    def __init__(self, n: int, device: torch.device) -> None:
        self.numbers = torch.zeros(
            (n, len(COLUMNS)), dtype=torch.float32, device=device
        )
        rows = [[*row.unbind()] for row in self.numbers.unbind()]
        self.columns: list[Tensors] = [*map(list, zip(*rows, strict=True))]
        self._have_grads: list[bool] = []

    def fits(self, params: Tensors) -> bool:
        """Has the table a row for each parameter, on their device?"""
        numbers = self.numbers
        return len(numbers) == len(params) and numbers.device == params[0].device

    def of_gradients(self, have_grads: list[bool]) -> list[Tensors]:
        """Return the elements for gradients. `have_grads` is true for parameters with
        one; other elements are set to zero.
        """
        if have_grads != self._have_grads:
            self.numbers.zero_()
            self._have_grads = have_grads
        return [
            [
                t
                for t, has_grad in zip(self.columns[c], have_grads, strict=True)
                if has_grad
            ]
            for c in OF_GRADIENTS
        ]

    def of_parameters(self) -> list[Tensors]:
        """Return the elements for all parameters."""
        return [self.columns[c] for c in OF_PARAMETERS]

"""Gradients for parameters, assigned only where Python code reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import FuseoptError


class PartMismatch(FuseoptError):
    """A gradient has a size or dtype that its parameter does not accept."""


class PendingGradients:
    """Gradients for some parameters: `grads[k]` is that of `params[k]`, or None.

    `grads` is None if there are none to assign, or if `put` has assigned them. Compiled
    code reads the list. Call `put` before other code reads `param.grad`.
    """

    def __init__(self, params: Sequence[Any] = ()) -> None:
        self.params = params
        #: the index of each parameter, by its id
        self.places = {id(p): k for k, p in enumerate(params)}
        self.grads: list[Any] | None = None
        #: True if parameters may have gradients that `put` assigned
        self._were_put = True

    def put(self) -> None:
        """Assign the gradients to the parameters. Raises PartMismatch."""
        if self.grads is None:
            return
        self._were_put = True
        for p, grad in zip(self.params, self.grads, strict=True):
            try:
                p.grad = grad
            except (RuntimeError, TypeError) as error:
                raise PartMismatch(
                    "a part of a gradient has another size or dtype"
                ) from error
        self.grads = None

    def drop(self) -> None:
        """Release all gradients, including the assigned ones."""
        self.grads = None
        if self._were_put:
            for p in self.params:
                p.grad = None
            self._were_put = False

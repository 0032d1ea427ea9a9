"""Gradients that parameters are to have, and get only where Python looks at them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import FuseoptError


class Misfit(FuseoptError):
    """A gradient that its parameter cannot have."""


class Given:
    """Gradients for some parameters: `grads[k]` is that of `params[k]`, None: it has
    none. `grads` is None where nothing is to be given: `put` has done it.

    A step that compiled code alone looks at reads the list. All else first calls
    `put`, so that it finds gradients where it looks for them.
    """

    def __init__(self, params: Sequence[Any] = ()) -> None:
        self.params = params
        #: by id of a parameter
        self.places = {id(p): k for k, p in enumerate(params)}
        self.grads: list[Any] | None = None
        self._were_put = True  # as far as is known

    def put(self) -> None:
        """Let the parameters have their gradients. Raises Misfit."""
        if self.grads is None:
            return
        self._were_put = True
        for p, grad in zip(self.params, self.grads, strict=True):
            try:
                p.grad = grad
            except (RuntimeError, TypeError) as error:
                raise Misfit(
                    "a part of a gradient has another size or dtype"
                ) from error
        self.grads = None

    def drop(self) -> None:
        """Keep no gradient alive."""
        self.grads = None
        if self._were_put:
            for p in self.params:
                p.grad = None
            self._were_put = False

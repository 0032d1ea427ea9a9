"""Gradients for parameters, assigned only where Python code reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..compat.facts import ENTRY, Fact, attributes
from ..errors import FuseoptError


class PartMismatch(FuseoptError):
    """A gradient has a size or dtype that its parameter does not accept."""


class GradientsInC(NamedTuple):
    """A call of C that gives gradients to `grads`, and returns 0 if it can.

    `facts`: what it relies on. `counted`: a call of C for the end of a step; it
    increases versions, and returns a negative number if it cannot. `count_in_python`:
    the same.
    """

    facts: list[Fact]
    read: Callable[[], int]
    grads: list[Any]
    counted: Callable[[], int]
    count_in_python: Callable[[], object]


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
        #: reads the gradients in a call of C, if that may be
        self.in_c: GradientsInC | None = None
        #: True if parameters may have gradients that `put` assigned
        self._were_put = True

    def facts(self) -> list[Fact]:
        """Return the facts that nothing waits for `put` or `drop`."""
        return [
            *attributes(self, "params", "places", "in_c"),
            Fact(ENTRY, vars(self), "grads", None),
            Fact(ENTRY, vars(self), "_were_put", False),
        ]

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

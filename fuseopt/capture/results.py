"""Result of a captured step: a tree of lists and tuples without torch's objects.

A leaf is one of the classes here, a `Sym` (a number of the host) or a `NumberRef` (a
number that the step computes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..ir.graph import Buffer
from .scalars.device import NumberRef
from .scalars.host import Sym


@dataclass(frozen=True)
class Returned:
    """Tensor of a buffer; if the buffer is a real view, the complex tensor.

    `again`: another returned tensor has the same buffer, and this one is a view of it.
    """

    buffer: int
    complex: bool = False
    again: bool = False


@dataclass(frozen=True)
class Alias:
    """New tensor that aliases a tensor of the call (`p.detach()`), by its buffer.

    If the step assigns other memory to that tensor, the alias keeps the old memory.
    """

    buffer: int


@dataclass(frozen=True)
class ReassignedTensor:
    """Tensor of the call, by its index, to which the step assigns other memory."""

    place: int


@dataclass(frozen=True)
class ConstantResult:
    """Any other value, equal in each call."""

    value: Any


Leaf = Returned | Alias | ReassignedTensor | ConstantResult | Sym | NumberRef


def rebuild(result: Any, value: Callable[[Leaf], Any]) -> Any:
    """Return the tree with each leaf replaced by its value."""
    if isinstance(result, Leaf):
        return value(result)
    return type(result)([rebuild(x, value) for x in result])


def leaves(result: Any) -> Iterator[Leaf]:
    """Yield all leaves, in order."""
    if isinstance(result, Leaf):
        yield result
    else:
        for x in result:
            yield from leaves(x)


def is_of_the_call(result: Any, buffers: Sequence[Buffer]) -> bool:
    """Does the result consist of values that exist before the step runs?

    These are numbers of the host and tensors of the call. A known tensor does not
    count: it may be replaced by the tensors of lanes.
    """
    inputs = ("static", "arg")
    return all(
        buffers[x.buffer].kind in inputs
        if isinstance(x, Returned)
        else not isinstance(getattr(x, "value", x), (NumberRef, torch.Tensor))
        for x in leaves(result)
    )


def result_buffers(result: Any) -> list[int]:
    """Return the buffers whose tensors or numbers the caller gets, sorted."""
    kinds = (Returned, Alias, NumberRef)
    return sorted({x.buffer for x in leaves(result) if isinstance(x, kinds)})

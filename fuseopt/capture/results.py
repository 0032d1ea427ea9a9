"""The result of a captured step: a tree of lists and tuples without torch's objects.

A leaf is one of the classes here, a `Sym` (a number of the host) or a `NumberRef` (one
that the step computed).
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
    """The tensor of a buffer; where that is its real view, the complex tensor.

    `again`: another tensor of that buffer is returned too; this one is a view of it.
    """

    buffer: int
    complex: bool = False
    again: bool = False


@dataclass(frozen=True)
class Alias:
    """A new tensor in the memory of a tensor of the call (`p.detach()`), by its buffer.

    If the step assigns other memory to that tensor, the alias keeps the memory it had.
    """

    buffer: int


@dataclass(frozen=True)
class Itself:
    """A tensor of the call, by its index, to which the step assigns other memory."""

    place: int


@dataclass(frozen=True)
class Known:
    """Any other value, which is the same in each call."""

    value: Any


Leaf = Returned | Alias | Itself | Known | Sym | NumberRef


def rebuild(result: Any, value: Callable[[Leaf], Any]) -> Any:
    """The tree with the value of each leaf in its place."""
    if isinstance(result, Leaf):
        return value(result)
    return type(result)([rebuild(x, value) for x in result])


def leaves(result: Any) -> Iterator[Leaf]:
    """All leaves, in order."""
    if isinstance(result, Leaf):
        yield result
    else:
        for x in result:
            yield from leaves(x)


def is_of_the_call(result: Any, buffers: Sequence[Buffer]) -> bool:
    """Is all that is returned known before the step has run: numbers of the host, and
    tensors that it was given? A tensor may stand for those of lanes, which are not.
    """
    inputs = ("static", "arg")
    return all(
        buffers[x.buffer].kind in inputs
        if isinstance(x, Returned)
        else not isinstance(getattr(x, "value", x), (NumberRef, torch.Tensor))
        for x in leaves(result)
    )


def result_buffers(result: Any) -> list[int]:
    """The buffers that the caller gets tensors or numbers of, each once, sorted."""
    kinds = (Returned, Alias, NumberRef)
    return sorted({x.buffer for x in leaves(result) if isinstance(x, kinds)})

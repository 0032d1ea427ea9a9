"""What a step returns: a tree of lists and tuples whose leaves are none of torch's.

A leaf is one of the classes here, a `Sym` (a number of the host) or a `NumberRef` (one
that the step computed).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .scalars.device import NumberRef
from .scalars.host import Sym


@dataclass(frozen=True)
class Returned:
    """The tensor of a buffer; where that is its real view, the complex tensor."""

    buffer: int
    complex: bool = False


@dataclass(frozen=True)
class Alias:
    """Another tensor of the memory of one of the call (`p.detach()`), by its buffer.

    Where that one is given other memory, an alias is what it was before.
    """

    buffer: int


@dataclass(frozen=True)
class Itself:
    """A tensor of the call, by its place, which the step gives other memory."""

    place: int


@dataclass(frozen=True)
class Known:
    """Anything else: known since the step was captured."""

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


def result_buffers(result: Any) -> list[int]:
    """The buffers of which a caller is given something, each once."""
    kinds = (Returned, Alias, NumberRef)
    return sorted({x.buffer for x in leaves(result) if isinstance(x, kinds)})

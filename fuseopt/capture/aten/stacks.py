"""Keep stacks of tensors pointwise, and their maximum and minimum over the pieces.

`pieces_of(name, arguments)` returns the tensors of a `stack`, or of a `cat` along a
dimension of size 1 in each of them. Each tensor is recorded as one copy. `Stacks`
records the pieces of each stack. An amax or amin over them then becomes a chain of
pointwise calls in place of a reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

#: Reductions, each with a pointwise op whose chain has the same bits in any order.
CHAINS = {"amax": "maximum", "amin": "minimum"}


class Stack(NamedTuple):
    """A stack of tensors: `pieces[i]` lies at index i of dimension `dim`."""

    dim: int
    pieces: tuple[Tensor, ...]


def pieces_of(name: str, arguments: Mapping[str, Any]) -> Stack | None:
    """Return the Stack of a stack or cat of tensors of one dtype and shape, or None."""
    tensors = arguments.get("tensors")
    if name not in ("stack", "cat") or not tensors:
        return None
    first = tensors[0]
    dim = int(arguments.get("dim", 0))
    dims = first.dim() + (name == "stack")
    dim += dims if dim < 0 else 0
    if any(t.dtype != first.dtype or t.shape != first.shape for t in tensors):
        return None
    if name == "stack":
        return Stack(dim, tuple(tensors))
    if not dims or first.shape[dim] != 1:
        return None
    return Stack(dim, tuple(t.select(dim, 0) for t in tensors))


def _place(t: Tensor) -> tuple[object, ...]:
    """Return the layout of a tensor in its storage."""
    return t.shape, t.stride(), t.storage_offset()


class Stacks:
    """Stacks made so far. `version(t)` changes when memory of t is written."""

    def __init__(self, version: Callable[[Tensor], int]) -> None:
        self.version = version
        self._made: dict[int, tuple[Stack, Tensor, list[int]]] = {}

    @property
    def count(self) -> int:
        return len(self._made)

    def holds(self, storage: int) -> bool:
        """Does a storage belong to a stack?"""
        return storage in self._made

    def add(self, stack: Stack, out: Tensor) -> None:
        """Record the pieces of `out`, after they were written to it."""
        versions = [self.version(t) for t in (out, *stack.pieces)]
        self._made[out.untyped_storage()._cdata] = (stack, out, versions)

    def reduced(self, name: str, arguments: Mapping[str, Any]) -> list[Tensor] | None:
        """Return the pieces whose chain of CHAINS[name] equals a reduction, or None."""
        if name not in CHAINS or arguments.get("keepdim"):
            return None
        t = arguments["self"]
        entry = self._made.get(t.untyped_storage()._cdata)
        if entry is None:
            return None
        stack, out, versions = entry
        dims = arguments.get("dim", ())
        dims = [dims] if isinstance(dims, int) else list(dims)
        whole = _place(t) == _place(out) and t.dtype == out.dtype
        if not whole or [d % t.dim() for d in dims] != [stack.dim]:
            return None
        if versions != [self.version(x) for x in (out, *stack.pieces)]:
            return None
        return list(stack.pieces)

"""Unwrap wrapper subclasses into their inner tensors, and wrap such tensors again.

A traceable wrapper class returns its inner tensors (`__tensor_flatten__`) and makes a
wrapper of others (`__tensor_unflatten__`). Its behaviour depends only on the rest that
`__tensor_flatten__` returns. Inner tensors may be wrappers themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...compat import arrived, is_wrapper
from ...errors import EagerOnly


@dataclass(frozen=True)
class Layout:
    """Structure of a wrapper, without the contents of its inner tensors.

    `names`: of its parts. `inner`: the layout of each inner tensor by name; None for a
    plain tensor. `context`: the context of `__tensor_flatten__`, and the parts that are
    no tensors.
    """

    kind: type
    names: list[str]
    inner: dict[str, Layout | None]
    context: tuple[Any, dict[str, Any]]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def take(self, t: Any, leaves: list[torch.Tensor]) -> bool:
        """Add the inner tensors to a list; return False if the wrapper has another
        layout.
        """
        kind: type = type(t)
        if kind is not self.kind or tuple(t.shape) != self.shape:
            return False
        names, said, held = _held(t)
        if names != self.names or tuple(t.stride()) != self.stride:
            return False
        rest = {x: y for x, y in held.items() if x not in self.inner}
        if (said, rest) != self.context:
            return False
        return all(take(held[x], inner, leaves) for x, inner in self.inner.items())

    def make(self, leaves: Callable[[], torch.Tensor]) -> Any:
        """Make a wrapper of the next tensors."""
        said, rest = self.context
        made = {
            name: leaves() if inner is None else inner.make(leaves)
            for name, inner in self.inner.items()
        }
        parts = {
            name: made[name] if name in made else rest[name] for name in self.names
        }
        unflatten = self.kind.__tensor_unflatten__  # type: ignore[attr-defined]
        return unflatten(parts, said, self.shape, self.stride)


def _held(t: Any) -> tuple[list[str], Any, dict[str, Any]]:
    """Return the names of a wrapper's parts, its context, and its parts."""
    names, said = t.__tensor_flatten__()
    return names, said, {name: getattr(t, name) for name in names}


def take(t: Any, layout: Layout | None, leaves: list[torch.Tensor]) -> bool:
    """Add the plain tensors of any tensor to a list; return False if it is not of
    `layout`.
    """
    t = arrived(t)
    if layout is not None:
        return layout.take(t, leaves)
    if is_wrapper(type(t)):
        return False
    leaves.append(t)
    return True


def layout_of(t: Any) -> Layout | None:
    """Return the layout of a wrapper; None for a plain tensor.

    Raises EagerOnly for a wrapper whose context cannot be compared.
    """
    t = arrived(t)
    kind = type(t)
    if not is_wrapper(kind):
        return None
    names, said, held = _held(t)
    inner = {x: layout_of(y) for x, y in held.items() if isinstance(y, torch.Tensor)}
    context = said, {x: y for x, y in held.items() if x not in inner}
    try:
        same = bool(context == context)
    except Exception:
        same = False
    if not same:
        raise EagerOnly(
            f"what a {kind.__name__} returns from __tensor_flatten__ cannot be compared"
        )
    return Layout(kind, names, inner, context, tuple(t.shape), tuple(t.stride()))

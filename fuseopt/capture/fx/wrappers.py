"""Tensors that stand for others -> those, and back.

A class that torch.compile can look into says what a tensor of it holds
(`__tensor_flatten__`) and makes one anew of others (`__tensor_unflatten__`); what it
does to them is the same as long as what it says besides them is. Tensors within may be
wrappers themselves.
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
    """What a wrapper is, but for the contents of the tensors within.

    `names`: of what it holds. `inner`: by name, None for a tensor that is no wrapper.
    `context`: what the class says besides, and what it holds that is no tensor.
    """

    kind: type
    names: list[str]
    inner: dict[str, Layout | None]
    context: tuple[Any, dict[str, Any]]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def take(self, t: Any, leaves: list[torch.Tensor]) -> bool:
        """Add the tensors within to a list; False if the wrapper is another one."""
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
        """A wrapper of the next tensors."""
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
    """The names of what a wrapper holds, what else it says, and what it holds."""
    names, said = t.__tensor_flatten__()
    return names, said, {name: getattr(t, name) for name in names}


def take(t: Any, layout: Layout | None, leaves: list[torch.Tensor]) -> bool:
    """The same of any tensor, of which `layout` is known."""
    t = arrived(t)
    if layout is not None:
        return layout.take(t, leaves)
    if is_wrapper(type(t)):
        return False
    leaves.append(t)
    return True


def layout_of(t: Any) -> Layout | None:
    """What a tensor is; None for one that is no wrapper. Raises EagerOnly for one that
    does not say what it holds.
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

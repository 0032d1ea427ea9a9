"""Keys of lanes: equal for lanes that are alike. Errors give the reason for no key."""

from __future__ import annotations

from typing import Any

import torch

from ..compiler.diagnostics import odd_gradient
from ..errors import FuseoptError

#: The types of entries in a lane's state besides tensors; 1 and 1.0 are not equal.
NUMBERS = (int, float, bool, str, type(None))
PARAM, GRAD = "param", "grad"
#: (PARAM, GRAD or "state", key of the state)
Role = tuple[str, str]
KINDS = (torch.Tensor, torch.nn.Parameter)


class LanesDiffer(FuseoptError):
    """The models of lanes cannot lead a step; the message gives the reason."""


class OddValue(LanesDiffer):
    """An optimizer holds a value of an unsupported type, so its step is not traced.

    `within`: the dict or list that holds the value, or None.
    """

    def __init__(self, why: str, value: object, within: object = None) -> None:
        super().__init__(why)
        self.value = value
        self.within = within


def only_tensors(params: Any) -> None:
    """Raise OddValue if a parameter of a group is not a tensor."""
    for p in params:
        if not isinstance(p, torch.Tensor):
            raise OddValue(f"a {type(p).__name__} is among the parameters", p, params)


def exactly(x: Any) -> tuple[type, str]:
    """Return a key that also differs for numbers that Python finds equal."""
    return type(x), repr(x)


def shape_beside(t: torch.Tensor, p: torch.Tensor | None) -> tuple[object, ...]:
    """Return a tensor's shape and strides; "like" if they are those of parameter p."""
    if p is not None and t.shape == p.shape and t.stride() == p.stride():
        return "like", t.dim()
    return t.shape, t.stride()


def free_shape(p: torch.Tensor) -> torch.Tensor | None:
    """Return a parameter if elementwise steps treat all its sizes alike, else None."""
    return p if p.dim() and p.numel() > 1 and p.is_contiguous() else None


def layout_of(t: torch.Tensor, p: torch.Tensor | None) -> tuple[object, ...]:
    """Return all that a step may read of a tensor except its contents.

    `p`: as in shape_beside. Raises LanesDiffer for an unsupported tensor.
    """
    if type(t) not in KINDS:
        raise LanesDiffer(f"a tensor of the step is a {type(t).__name__}")
    if t.layout != torch.strided or t.is_complex() or t.is_quantized:
        raise LanesDiffer(f"a tensor of the step is {t.layout}, {t.dtype}")
    if t.is_conj() or t.is_neg():
        raise LanesDiffer("a tensor of the step is a conjugated or negated view")
    shape = shape_beside(t, p)
    return type(t), *shape, t.dtype, t.device, t.requires_grad, t.is_leaf


def lane_key(
    group: int,
    p: torch.Tensor,
    state: dict[str, Any] | None,
    ignore_sizes: bool = False,
    counters: bool = False,
    has_grad: bool = True,
) -> Any:
    """Return a key that is equal for lanes that a step cannot distinguish.

    `ignore_sizes`: lanes may differ in the size of the parameter, and of tensors of
    that size. `counters`: they may differ in the integers of their state.
    `has_grad=False`: ignore the parameter's gradient. Raises LanesDiffer.
    """
    grad = p.grad if has_grad else None
    if odd_gradient(p):
        raise LanesDiffer("a gradient has another dtype than its parameter")
    near = free_shape(p) if ignore_sizes else None
    entries = []
    for name, value in (state or {}).items():
        if not isinstance(name, str):
            raise OddValue(
                f"the state has a {type(name).__name__} as key", value, state
            )
        if isinstance(value, torch.Tensor):
            entries.append((name, *layout_of(value, near)))
        elif counters and type(value) is int:
            entries.append((name, int))
        elif type(value) in NUMBERS:
            entries.append((name, *exactly(value)))
        else:
            raise OddValue(f"the state {name!r} is a {type(value).__name__}", value)
    return (
        group,
        layout_of(p, near),
        grad is not None and layout_of(grad, near),
        state is None,
        tuple(entries),
    )

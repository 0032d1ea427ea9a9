"""What lanes are alike in: a key for each lane, and why a lane has none."""

from __future__ import annotations

from typing import Any

import torch

from ..compiler.diagnostics import odd_gradient
from ..errors import FuseoptError

#: The types of entries in a lane's state besides tensors; 1 and 1.0 are not equal.
NUMBERS = (int, float, bool, str, type(None))
PARAM, GRAD = "param", "grad"
#: (what it is, key of the state)
Role = tuple[str, str]
KINDS = (torch.Tensor, torch.nn.Parameter)


class LanesDiffer(FuseoptError):
    """The step of an optimizer cannot be led by models of its lanes; says why."""


class OddValue(LanesDiffer):
    """A step is not traced while its optimizer holds a value of such a type; `within`:
    the dict or list that holds it, if that is known.
    """

    def __init__(self, why: str, value: object, within: object = None) -> None:
        super().__init__(why)
        self.value = value
        self.within = within


def only_tensors(params: Any) -> None:
    """Raise OddValue if anything else is among the parameters of a group."""
    for p in params:
        if not isinstance(p, torch.Tensor):
            raise OddValue(f"a {type(p).__name__} is among the parameters", p, params)


def exactly(x: Any) -> tuple[type, str]:
    """A key of a number that differs for numbers that Python takes for equal."""
    return type(x), repr(x)


def shape_beside(t: torch.Tensor, p: torch.Tensor | None) -> tuple[object, ...]:
    """A tensor's shape and strides; beside a parameter that has the same, "like" it."""
    if p is not None and t.shape == p.shape and t.stride() == p.stride():
        return "like", t.dim()
    return t.shape, t.stride()


def free_shape(p: torch.Tensor) -> torch.Tensor | None:
    """A parameter, if elementwise steps treat it like those of other sizes; or None."""
    return p if p.dim() and p.numel() > 1 and p.is_contiguous() else None


def layout_of(t: torch.Tensor, p: torch.Tensor | None) -> tuple[object, ...]:
    """What a step may ask of a tensor but its contents; see shape_beside."""
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
    """A key that is equal for lanes that a step cannot tell apart. Raises LanesDiffer.

    `ignore_sizes`: lanes may differ in the size of the parameter, and of tensors of the
    same size; `counters`: in the integers of their state. `has_grad=False`: as if the
    parameter had no gradient.
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

"""What is known of an ATen op before it is called: its schema, and tables of names."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...lowering.pointwise import RULES

#: ATen names whose arithmetic is another op's: name -> (op, arguments that matter).
RENAMED = {
    "clone": ("copy", ("self",)),
    "_to_copy": ("copy", ("self",)),
    "lift_fresh_copy": ("copy", ("self",)),
    "copy": ("copy", ("src",)),
    "fill": ("fill", ("value",)),
    "full_like": ("fill", ("fill_value",)),
    "new_full": ("fill", ("fill_value",)),
    "full": ("fill", ("fill_value",)),
    "scalar_tensor": ("fill", ("s",)),
}
CONSTANTS = {
    "zero": 0.0,
    "zeros": 0.0,
    "zeros_like": 0.0,
    "new_zeros": 0.0,
    "ones": 1.0,
    "ones_like": 1.0,
    "new_ones": 1.0,
}
#: Strings that choose a rule: (ATen name, argument, string) -> op.
MODES = {
    ("div", "rounding_mode", "floor"): "div_floor",
    ("div", "rounding_mode", "trunc"): "div_trunc",
}
EMPTY = frozenset("empty empty_like new_empty empty_strided new_empty_strided".split())
#: Calls whose result has a shape that they are told.
SHAPED = frozenset("full new_full scalar_tensor zeros new_zeros ones new_ones".split())
#: Arguments that say how a result is laid out; the meta result already shows it.
LAYOUT = frozenset(
    "memory_format dtype layout device pin_memory non_blocking generator size".split()
)
#: In-place ops whose meta kernel would only check shapes: the recorder skips it.
META_FREE = frozenset(
    "add sub mul div neg abs sqrt addcmul addcdiv lerp copy fill zero".split()
)
FOREACH_REDUCTIONS = frozenset({"norm", "max"})


class Op(NamedTuple):
    """What is known of an OpOverload before it is called."""

    name: str  # without namespace and trailing underscore
    inplace: bool
    foreach: bool
    arguments: tuple[str, ...]
    types: tuple[str, ...]
    defaults: tuple[Any, ...]


def describe(func: Any) -> Op:
    """Read the schema of an OpOverload."""
    schema = func._schema
    namespace, _, full = schema.name.partition("::")
    inplace = full.endswith("_") and not full.endswith("__")
    base = full[:-1] if inplace else full
    foreach = base.startswith("_foreach_")
    name = (
        base.removeprefix("_foreach_")
        if namespace in ("aten", "prims")
        else schema.name
    )
    return Op(
        name,
        inplace,
        foreach,
        tuple(a.name for a in schema.arguments),
        tuple(str(a.type) for a in schema.arguments),
        tuple(a.default_value for a in schema.arguments),
    )


def arithmetic(kind: str) -> bool:
    """Is an argument of this type an operand?"""
    return "Tensor" in kind or "number" in kind or "Scalar" in kind or "float" in kind


def ordered(func: Any) -> bool:
    """Does a call depend on more than its arguments: the state of a generator?"""
    return torch.Tag.nondeterministic_seeded in func.tags


def rule_of(op: Op, bound: Any) -> str | None:
    """The rule for a call; None if no rule understands all of its arguments."""
    for (name, argument, value), rule in MODES.items():
        if op.name == name and bound.get(argument) == value:
            return rule
    return op.name if op.name in RULES and not _extra(op, bound) else None


def filled(op: Op, bound: Any) -> tuple[tuple[str, Any], ...] | None:
    """The operands of the masked_fill that a call is: `x[mask] = number`; or None."""
    indices, value = bound.get("indices"), bound.get("values")
    if op.name != "index_put" or bound.get("accumulate") or len(indices) != 1:
        return None
    target, (mask,) = bound["self"], indices
    alike = mask is not None and mask.dtype is torch.bool and mask.shape == target.shape
    if not alike or value.dim() or value.dtype != target.dtype:
        return None
    return ("self", target), ("mask", mask), ("value", value)


def _extra(op: Op, bound: Any) -> bool:
    """Is an argument given that no rule understands (a number of decimals)?"""
    for name, kind, default in zip(op.arguments, op.types, op.defaults, strict=True):
        if not arithmetic(kind) and name not in LAYOUT:
            if bound.get(name, default) != default:
                return True
    return False


def column(name: str, value: Any, n: int) -> list[Any]:
    """One operand of a foreach call, as a list with an entry per position."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, torch.Tensor) and value.dim() == 1 and name == "scalars":
        return list(value.unbind())
    return [value] * n


def position(name: str, value: Any, i: int) -> Any:
    """An argument of a foreach call for position i alone."""
    if isinstance(value, (list, tuple)):
        return [value[i]]
    if isinstance(value, torch.Tensor) and value.dim() == 1 and name == "scalars":
        return value[i : i + 1]
    return value

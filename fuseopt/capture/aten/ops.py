"""Classify ATen ops by their schemas, and find the arithmetic rule of a call.

`op_info(func)` describes an op, from its schema and the tables of names here.
`lowering` returns the rule and the operands of a call. For type promotion see `dtypes`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ...compat import Schema, rule_of_form, schema_of
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
#: ATen names whose result is one number everywhere.
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
#: fuseopt's own op: the number of each element.
INDEX = "fuseopt::index_like"
EMPTY = frozenset("empty empty_like new_empty empty_strided new_empty_strided".split())
#: Calls that take the shape of their result as an argument.
SHAPED = frozenset("full new_full scalar_tensor zeros new_zeros ones new_ones".split())
#: Arguments that choose the layout of a result; the meta result has it already.
LAYOUT = frozenset(
    "memory_format dtype layout device pin_memory non_blocking generator size".split()
)
#: In-place ops whose meta kernel would only check shapes: the recorder skips it.
META_FREE = frozenset(
    "add sub mul div neg abs sqrt addcmul addcdiv lerp copy fill zero".split()
)
#: Foreach calls that reduce each of their tensors.
FOREACH_REDUCTIONS = frozenset({"norm", "max"})

#: Calls that return or change a tensor of the size of their argument, and treat all of
#: its elements alike.
LIKE = frozenset(
    "zeros_like ones_like full_like empty_like clone copy _to_copy fill zero detach "
    "alias lift_fresh_copy".split()
)
#: The operands of a rule: arguments by name.
Operands = tuple[tuple[str, Any], ...]


class OpInfo(NamedTuple):
    """Properties of an op.

    `name`: without namespace, `_foreach_` and trailing underscore.
    `inplace`: it changes its first argument and returns it.
    `foreach`: it takes lists of tensors.
    `operands`: the arguments that a rule may take, with their defaults.
    `others`: arguments that must have their defaults for any rule.
    `empty`: its result has no contents.
    `shaped`: the shape of its result is an argument.
    `pointwise`: there may be a rule for it.
    `elementwise`: it treats each element alike, so that it computes a part of a tensor
        as it computes the whole.
    `meta_free`: its result on meta is its first argument.
    """

    schema: Schema
    arguments: tuple[str, ...]
    name: str
    inplace: bool
    foreach: bool
    operands: Operands
    others: Operands
    empty: bool
    shaped: bool
    pointwise: bool
    elementwise: bool
    meta_free: bool


@functools.lru_cache(maxsize=4096)
def op_info(func: Any) -> OpInfo:
    """Return the properties of an OpOverload."""
    schema = schema_of(func)
    assert schema is not None
    namespace, _, full = schema.name.partition("::")
    inplace = full.endswith("_") and not full.endswith("__")
    base = full[:-1] if inplace else full
    is_torchs = namespace in ("aten", "prims")
    name = base.removeprefix("_foreach_") if is_torchs else schema.name
    operands, others = [], []
    for argument, kind, default in zip(
        schema.arguments, schema.types, schema.defaults, strict=True
    ):
        if argument not in LAYOUT:
            if not arithmetic(kind):
                others.append((argument, default))
            elif argument != "out":
                operands.append((argument, default))
    return OpInfo(
        schema,
        schema.arguments,
        name,
        inplace,
        base.startswith("_foreach_"),
        tuple(operands),
        tuple(others),
        name in EMPTY,
        name in EMPTY or name in SHAPED,
        name in RULES or name in RENAMED or name in CONSTANTS,
        not schema.seeded and is_torchs and _elementwise(func, name),
        inplace and name in META_FREE,
    )


def _elementwise(func: Any, name: str) -> bool:
    return name in RULES or name in LIKE or torch.Tag.pointwise in func.tags


def arithmetic(kind: str) -> bool:
    """Is an argument of this type an operand?"""
    return "Tensor" in kind or "number" in kind or "Scalar" in kind or "float" in kind


def lowering(
    op: OpInfo, bound: Mapping[str, Any], absent: Callable[[str, Any], Any]
) -> tuple[str, Operands] | None:
    """Return the rule of a call and its operands; None if no rule takes all arguments.

    `absent(argument, default)` returns the operand for an argument that was left out.
    """
    name = op.name
    if name == INDEX and not bound["t"].is_contiguous():
        return None
    if name == INDEX and bound["t"].numel() == 1:
        return "fill", (("value", 0),)
    if name in CONSTANTS:
        return "fill", (("value", CONSTANTS[name]),)
    if name in RENAMED:
        rule, argument_names = RENAMED[name]
        return rule, tuple((n, bound[n]) for n in argument_names)
    filled = _filled(name, bound)
    if filled is not None:
        return "masked_fill", filled
    variant = next(
        (r for (n, a, v), r in MODES.items() if n == name and bound.get(a) == v), ""
    )
    if not variant:
        changed = any(bound.get(n, default) != default for n, default in op.others)
        if name not in RULES or changed:
            return None
        given = (x for argument, x in bound.items() if argument != "out")
        dtypes = [x.dtype for x in given if isinstance(x, torch.Tensor)]
        if dtypes:
            variant = rule_of_form(name, dtypes[0], len(dtypes))
            if not variant:
                return None
    return variant or name, tuple(
        (n, bound[n] if n in bound else absent(n, default))
        for n, default in op.operands
    )


def _filled(name: str, bound: Mapping[str, Any]) -> Operands | None:
    """Return operands of masked_fill if a call is `x[mask] = number`; else None."""
    if name != "index_put":
        return None
    indices, value = bound["indices"], bound["values"]
    if bound.get("accumulate") or len(indices) != 1:
        return None
    target, (mask,) = bound["self"], indices
    alike = mask is not None and mask.dtype is torch.bool and mask.shape == target.shape
    if not alike or value.dim() or value.dtype != target.dtype:
        return None
    return ("self", target), ("mask", mask), ("value", value)


def column(name: str, value: Any, n: int) -> list[Any]:
    """Return one operand of a foreach call, as a list with an entry per position."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if _is_column(name, value):
        return list(value.unbind())
    return [value] * n


def position(name: str, value: Any, i: int) -> Any:
    """Return an argument of a foreach call for position i alone."""
    if isinstance(value, (list, tuple)):
        return [value[i]]
    return value[i : i + 1] if _is_column(name, value) else value


def _is_column(name: str, value: Any) -> bool:
    """Is an argument a tensor with a number for each position?"""
    return name == "scalars" and getattr(value, "ndim", 0) == 1

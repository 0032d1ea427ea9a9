"""What an ATen op is: its schema, and what becomes of a call of it.

`op_info(func)` says all that is known of an op by itself, from its schema and from the
tables of names here; `lowering` which rule of arithmetic a call is, with its operands.
How operands are promoted is a matter of rules, see `dtypes`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ...compat import Schema, schema_of
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
#: Calls of lists that fold each of their tensors.
FOREACH_REDUCTIONS = frozenset({"norm", "max"})

#: Calls that give or change a tensor as large as the one they are given, and treat all
#: of its elements alike.
LIKE = frozenset(
    "zeros_like ones_like full_like empty_like clone copy _to_copy fill zero detach "
    "alias lift_fresh_copy".split()
)
#: The operands of a rule: arguments by name.
Operands = tuple[tuple[str, Any], ...]


class OpInfo(NamedTuple):
    """What is known of an op before it is called.

    `name`: without namespace, `_foreach_` and trailing underscore. `inplace`: it
    changes its first argument and returns it. `foreach`: it is a call of lists.
    `operands`: the arguments that a rule may take, with their defaults; `others` are
    those that no rule understands unless they have their defaults. `empty`: it gives
    memory and no contents. `shaped`: it is told the shape of its result. `pointwise`:
    a rule may be found for it. `elementwise`: it does the same to each element, and so
    does to a part of a tensor what it does to the whole. `meta_free`: its shape rule
    need not be asked.
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
    """What an OpOverload is."""
    schema = schema_of(func)
    assert schema is not None
    namespace, _, full = schema.name.partition("::")
    inplace = full.endswith("_") and not full.endswith("__")
    base = full[:-1] if inplace else full
    own = namespace in ("aten", "prims")
    name = base.removeprefix("_foreach_") if own else schema.name
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
        not schema.seeded and own and _elementwise(func, name),
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
    """The rule for a call, and its operands; None if no rule understands all of its
    arguments. `absent(argument, default)` is the operand that a call left out.
    """
    name = op.name
    if name in CONSTANTS:
        return "fill", (("value", CONSTANTS[name]),)
    if name in RENAMED:
        rule, taken = RENAMED[name]
        return rule, tuple((n, bound[n]) for n in taken)
    filled = _filled(name, bound)
    if filled is not None:
        return "masked_fill", filled
    own = next(
        (r for (n, a, v), r in MODES.items() if n == name and bound.get(a) == v), ""
    )
    if not own:
        changed = any(bound.get(n, default) != default for n, default in op.others)
        if name not in RULES or changed:
            return None
    return own or name, tuple(
        (n, bound[n] if n in bound else absent(n, default))
        for n, default in op.operands
    )


def _filled(name: str, bound: Mapping[str, Any]) -> Operands | None:
    """The operands of the masked_fill that a call is: `x[mask] = number`; or None."""
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
    """One operand of a foreach call, as a list with an entry per position."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if _is_column(name, value):
        return list(value.unbind())
    return [value] * n


def position(name: str, value: Any, i: int) -> Any:
    """An argument of a foreach call for position i alone."""
    if isinstance(value, (list, tuple)):
        return [value[i]]
    return value[i : i + 1] if _is_column(name, value) else value


def _is_column(name: str, value: Any) -> bool:
    """Is an argument a tensor with a number for each position?"""
    return name == "scalars" and getattr(value, "ndim", 0) == 1

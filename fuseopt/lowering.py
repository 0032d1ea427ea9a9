"""ATen name -> Body: the arithmetic of every pointwise operation, in one table.

`lower` takes the name of an op, its operands and the dtypes torch's promotion gave, and
returns the `Body` that gives the bits of eager on a CPU; None if no rule covers it. A
rule receives its operands already in the type eager computes in (bf16 and f16 compute
in f32) and returns the unrounded result; the store rounds it, as eager does after every
call.

docs/ops.md shows the table, docs/numerics.md what is not exact.
"""

from __future__ import annotations

from typing import NamedTuple

from . import formulas as f
from .formulas import Builder, Rule
from .ir import FLOATS, VENDOR, Body, Instr


class Tensor(NamedTuple):
    """An operand in memory: its storage dtype, and whether it has no dimension."""

    dtype: str
    zero_dim: bool = False


class Number(NamedTuple):
    """A scalar operand. `value` is None unless the value is part of the structure."""

    value: float | None
    is_float: bool = True
    stored: bool = False  # lies in memory, as a 0-d float64


Operand = Tensor | Number

#: Scalars whose value decides the form of a body, for any op; others only for `pow`.
STRUCTURAL = (0, 1)
STRUCTURAL_OPS = frozenset({"pow"})
#: Operands (op, position) that choose, and take no part in the arithmetic.
MASKS = frozenset({("where", 0), ("masked_fill", 1)})


def opmath(dtype: str) -> str:
    """The dtype in which eager computes on tensors of `dtype`."""
    return "f32" if dtype in ("bf16", "f16") else dtype


#: Ops that take their operand as it is stored.
UNCHANGED = frozenset({"copy", "fill", "bitcast"})
#: Ops whose bf16 and f16 kernels round a number to the tensor's type before they use
#: it; the others keep it in float32.
ROUND_NUMBERS = frozenset(
    (
        "add sub rsub mul_rounded pow clamp clamp_min clamp_max maximum minimum "
        "hardtanh lt le gt ge eq ne copysign heaviside xlogy fmod remainder "
        "masked_fill nan_to_num atan2 hypot"
    ).split()
)
#: Operands (op, position) that stay in float32 where they are 0-d, as if numbers.
WIDE_ZERO_DIM = frozenset(
    {("mul", 1), ("div", 1), ("lerp", 2), ("addcmul", 3), ("addcdiv", 3)}
    | {("floor_divide", 1), ("div_floor", 1), ("div_trunc", 1)}
)

RULES: dict[str, Rule] = {
    "add": f.add,
    "sub": f.sub,
    "rsub": f.rsub,
    "mul": f.mul,
    # in-place aten._foreach_mul_ by a number, which eager rounds to the tensor's type
    "mul_rounded": f.mul,
    # of the parts of complex numbers
    "add_parts": f.add_parts,
    "sub_parts": f.sub_parts,
    "div": f.plain("div"),
    "neg": f.plain("neg"),
    "abs": f.plain("abs"),
    "sqrt": f.sqrt,
    "root": f.plain("sqrt"),  # the end of a norm, which no vector library takes
    "rsqrt": f.rsqrt,
    "reciprocal": f.reciprocal,
    "square": lambda b, x: b.op("mul", x, x),
    "addcmul": f.addcmul,
    "addcdiv": f.addcdiv,
    "lerp": f.lerp,
    "fma": f.plain("fma"),
    "pow": f.pow,
    "maximum": f.clamp,
    "minimum": f.clamp_max,
    "clamp": f.clamp,
    "clamp_min": f.clamp,
    "clamp_max": f.clamp_max,
    "relu": lambda b, x: f.clamp(b, x, b.zero()),
    "sign": f.sign,
    "sigmoid": f.sigmoid,
    "floor": f.whole("floor"),
    "ceil": f.whole("ceil"),
    "trunc": f.whole("trunc"),
    "round": f.whole("round"),
    "lt": f.comparison("lt"),
    "le": f.comparison("le"),
    "gt": f.comparison("lt", swap=True),
    "ge": f.comparison("le", swap=True),
    "eq": f.comparison("eq"),
    "ne": f.comparison("ne"),
    "logical_and": f.logical("and"),
    "logical_or": f.logical("or"),
    "logical_xor": f.logical("xor"),
    "logical_not": f.logical("not"),
    "isnan": lambda b, x: b.compare("ne", x, x),
    "where": f.where,
    "copy": f.identity,
    "fill": f.identity,
    "isinf": f.is_infinite,
    "hardtanh": f.clamp,
    "masked_fill": f.masked_fill,
    "threshold": f.threshold,
    "leaky_relu": f.leaky_relu,
    "softplus": f.softplus,
    "silu": f.silu,
    "heaviside": f.heaviside,
    "nan_to_num": f.nan_to_num,
    "xlogy": f.xlogy,
    "sgn": f.sign,
    "signbit": f.sign_bit,
    "copysign": f.copysign,
    "frac": f.frac,
    "fmod": f.fmod,
    "remainder": f.remainder,
    "floor_divide": f.div_floor,
    # aten.div with a rounding_mode
    "div_floor": f.div_floor,
    "div_trunc": f.div_trunc,
    "bitwise_and": f.bitwise("and"),
    "bitwise_or": f.bitwise("or"),
    "bitwise_xor": f.bitwise("xor"),
    "bitwise_not": f.bitwise("not"),
    "bitwise_left_shift": f.shift("shl"),
    "bitwise_right_shift": f.shift("shr"),
    "__lshift__": f.shift("shl"),
    "__rshift__": f.shift("shr"),
    # a tensor seen as another type of the same size
    "bitcast": lambda b, x: b.op("bitcast", x, dtype=b.common),
    **{op: f.library(op) for op in VENDOR},
    "erf": f.erf,
    **{op: f.mapped(op) for op in f.MAPPED},
    **{op: f.loop(op) for op in f.LOOPS},
    **{op: f.plain(op) for op in ("asinh", "acosh")},
    "nextafter": f.nextafter,
}
#: Ops without a meaning on integers, which eager makes floats of first.
FLOAT_ONLY = frozenset(
    (*VENDOR, *f.MAPPED, *f.LOOPS, "asinh", "acosh", "nextafter")
) | frozenset("sqrt rsqrt reciprocal sigmoid silu softplus copysign xlogy".split())


def lower(
    op: str,
    operands: tuple[Operand | None, ...],
    common: str,
    out: str,
    vector_library: bool = True,
) -> Body | None:
    """The body of `op`, or None where no rule covers it.

    `operands`: tensors and numbers in the order of the op's arguments, None for one
    left out. `common`: the dtype torch's promotion gives the operands. `out`: storage
    dtype of the result. `vector_library`: give the bits of eager on a CPU, which takes
    some functions from a vector library; else those of IEEE arithmetic, as on a GPU.
    """
    rule = RULES.get(op)
    if rule is None:
        return None
    compute = opmath(common)
    if op in FLOAT_ONLY and compute not in FLOATS:
        return None
    tensors = [x for x in operands if isinstance(x, Tensor)]
    single = bool(tensors) and all(x.zero_dim for x in tensors)
    b = Builder(common, compute, vector_library, single)
    args: list[int | None] = []
    reads: list[str] = []
    n_scalars = 0
    for position, operand in enumerate(operands):
        if operand is None:
            args.append(None)
            continue
        if isinstance(operand, Tensor):
            x = b.emit(Instr("load", (), operand.dtype, len(reads)))
            reads.append(operand.dtype)
            if op in UNCHANGED or (op, position) in MASKS:
                args.append(x)
            else:
                # eager casts to the common type, then widens to compute; the first
                # rounds only where a 0-d tensor is wider than what it meets
                wide = operand.zero_dim and (op, position) in WIDE_ZERO_DIM
                x = b.cast(x if wide else b.cast(x, common), compute)
                args.append(x)
                if operand.zero_dim:
                    b.shared.add(x)
            continue
        if operand.stored and (op, position) == ("pow", 1):
            return None  # eager goes other ways for some exponents
        if operand.stored:
            x = b.cast(b.emit(Instr("load", (), "f64", len(reads))), compute)
            reads.append("f64")
        else:
            x = b.emit(Instr("scalar", (), compute, n_scalars))
            n_scalars += 1
        if op in ROUND_NUMBERS:
            x = b.rounded(x)
        b.numbers[x] = operand.value
        b.shared.add(x)
        args.append(x)
    made = rule(b, *args)
    if made is None:
        return None
    result = b.cast(made, out)
    return Body(op, tuple(reads), n_scalars, tuple(b.instrs), ((result, out),))

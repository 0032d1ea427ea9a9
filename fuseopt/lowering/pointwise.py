"""Lower an ATen name to a Body: the arithmetic of every pointwise op, in one table.

`lower` takes the name of an op, its operands and the dtypes of torch's promotion. It
returns the `Body` with the bits of eager, on a CPU or on a GPU; None if no rule covers
it. A rule receives its operands in eager's compute type (bf16 and f16 compute in f32).
It returns the unrounded result; the store rounds it, as eager does after every call.

docs/ops.md shows the table, docs/numerics.md the inexact cases.
"""

from __future__ import annotations

from typing import NamedTuple

from ..ir.graph import FLOATS, VENDOR, Body, Instr
from . import arithmetic, division, functions, select
from .builder import Builder, Rule


class Tensor(NamedTuple):
    """An operand in memory: its storage dtype, and whether it has no dimension.

    `on_host`: it is 0-d, on the CPU, beside tensors of a GPU.
    """

    dtype: str
    zero_dim: bool = False
    on_host: bool = False


class Number(NamedTuple):
    """A scalar operand. `value` is None unless the value is part of the structure."""

    value: float | None
    is_float: bool = True
    stored: bool = False  # in memory, as a 0-d float64


Operand = Tensor | Number

#: Scalars whose value decides the structure of a body, for any op; `pow` also depends
#: on all others.
STRUCTURAL = (0, 1)
STRUCTURAL_OPS = frozenset({"pow"})
#: Operands (op, position) that select, without arithmetic.
MASKS = frozenset({("where", 0), ("masked_fill", 1)})


def opmath(dtype: str) -> str:
    """Return the dtype in which eager computes on tensors of `dtype`."""
    return "f32" if dtype in ("bf16", "f16") else dtype


#: Ops that use their operand in its storage type.
UNCHANGED = frozenset({"copy", "fill", "bitcast", "fuseopt::index_like"})
#: Ops whose bf16 and f16 kernels round a number to the tensor's type before they use
#: it; the others keep it in float32.
ROUND_NUMBERS = frozenset(
    (
        "add sub rsub mul_rounded pow clamp clamp_min clamp_max maximum minimum "
        "hardtanh lt le gt ge eq ne copysign heaviside xlogy fmod remainder "
        "masked_fill nan_to_num atan2 hypot hardshrink"
    ).split()
)
#: Ops among them whose GPU kernels keep the number in float32 too. (`maximum` and
#: `minimum` of a number are foreach calls.)
WIDE_ON_GPU = frozenset(
    (
        "add sub rsub mul_rounded clamp clamp_min clamp_max maximum minimum hardtanh"
    ).split()
)
#: Ops whose GPU kernels round the number.
ROUNDED_ON_GPU = ROUND_NUMBERS - WIDE_ON_GPU | {"softshrink"}
#: Operands (op, position) that stay in float32 if they are 0-d, like numbers.
WIDE_ZERO_DIM = frozenset(
    {("mul", 1), ("div", 1), ("lerp_listed", 2), ("addcmul", 3), ("addcdiv", 3)}
    | {("floor_divide", 1), ("div_floor", 1), ("div_trunc", 1)}
)
#: Operands for which eager reads the tensor's number and passes it to its GPU kernel,
#: on any device. Any other 0-d tensor of the GPU is rounded to the type of the larger
#: tensors.
READ_ON_GPU = frozenset(
    {("add", 2), ("sub", 2), ("rsub", 2), ("addcmul", 3), ("addcdiv", 3)}
    | {("lerp_listed", 2)}
)
#: Operands that GPU kernels get as numbers if they lie on the CPU.
GIVEN_ON_GPU = frozenset(
    {(op, i) for op in ("add", "sub", "rsub", "mul") for i in (0, 1)}
    | {(op, 1) for op in ("div", "floor_divide", "div_floor")}
    | {("div_trunc", 1), ("lerp", 2), ("mul_rounded", 1)}
)

RULES: dict[str, Rule] = {
    "add": arithmetic.add,
    "sub": arithmetic.sub,
    "rsub": arithmetic.rsub,
    "mul": arithmetic.mul,
    # in-place aten._foreach_mul_ by a number, which eager rounds to the tensor's type
    "mul_rounded": arithmetic.mul,
    # for the parts of complex numbers
    "add_parts": arithmetic.add_parts,
    "sub_parts": arithmetic.sub_parts,
    "div": arithmetic.div,
    # aten._foreach_div by a number and by a list of numbers, on a GPU
    "div_exact": select.plain("div"),
    "neg": select.plain("neg"),
    "abs": select.plain("abs"),
    "sqrt": arithmetic.sqrt,
    # the root of a norm, which never uses a vector library
    "root": select.plain("sqrt"),
    "rsqrt": arithmetic.rsqrt,
    "reciprocal": arithmetic.reciprocal,
    "square": lambda b, x: b.op("mul", x, x),
    "addcmul": arithmetic.addcmul,
    "addcdiv": arithmetic.addcdiv,
    "lerp": arithmetic.lerp,
    # aten._foreach_lerp_ by a 0-d tensor, whose number eager reads
    "lerp_listed": arithmetic.lerp,
    "fma": select.plain("fma"),
    "pow": arithmetic.pow,
    "maximum": arithmetic.clamp,
    "minimum": arithmetic.clamp_max,
    "maximum_of_ordered_zeros": select.of_ordered_zeros("max"),
    "minimum_of_ordered_zeros": select.of_ordered_zeros("min"),
    "clamp": arithmetic.clamp,
    "clamp_min": arithmetic.clamp,
    "clamp_max": arithmetic.clamp_max,
    "relu": lambda b, x: arithmetic.clamp(b, x, b.zero()),
    "sign": arithmetic.sign,
    "sigmoid": functions.sigmoid,
    "floor": select.whole("floor"),
    "ceil": select.whole("ceil"),
    "trunc": select.whole("trunc"),
    "round": select.whole("round"),
    "lt": select.comparison("lt"),
    "le": select.comparison("le"),
    "gt": select.comparison("lt", swap=True),
    "ge": select.comparison("le", swap=True),
    "eq": select.comparison("eq"),
    "ne": select.comparison("ne"),
    "logical_and": select.logical("and"),
    "logical_or": select.logical("or"),
    "logical_xor": select.logical("xor"),
    "logical_not": select.logical("not"),
    "isnan": lambda b, x: b.compare("ne", x, x),
    "where": select.where,
    "copy": select.identity,
    "fill": select.identity,
    "isinf": select.is_infinite,
    "hardtanh": arithmetic.clamp,
    "masked_fill": select.masked_fill,
    "threshold": select.threshold,
    "leaky_relu": select.leaky_relu,
    "hardshrink": select.hardshrink,
    "softshrink": select.softshrink,
    "softplus": functions.softplus,
    "silu": functions.silu,
    "heaviside": select.heaviside,
    "nan_to_num": select.nan_to_num,
    "xlogy": functions.xlogy,
    "sgn": arithmetic.sign,
    "signbit": select.sign_bit,
    "copysign": select.copysign,
    "frac": division.frac,
    "fmod": division.fmod,
    "remainder": division.remainder,
    "floor_divide": division.div_floor,
    # aten.div with a rounding_mode
    "div_floor": division.div_floor,
    "div_trunc": division.div_trunc,
    "bitwise_and": select.bitwise("and"),
    "bitwise_or": select.bitwise("or"),
    "bitwise_xor": select.bitwise("xor"),
    "bitwise_not": select.bitwise("not"),
    "bitwise_left_shift": select.shift("shl"),
    "bitwise_right_shift": select.shift("shr"),
    "__lshift__": select.shift("shl"),
    "__rshift__": select.shift("shr"),
    # a tensor viewed as another type of the same size
    "bitcast": lambda b, x: b.op("bitcast", x, dtype=b.common),
    # the index of each element of a contiguous tensor
    "fuseopt::index_like": lambda b, x: b.op("index", x, dtype="i32"),
    **{op: functions.library(op) for op in VENDOR},
    "erf": functions.erf,
    **{op: functions.mapped(op) for op in functions.MAPPED},
    **{op: functions.loop(op) for op in functions.LOOPS},
    **{op: select.plain(op) for op in ("asinh", "acosh")},
    "nextafter": select.nextafter,
}
#: Ops that eager computes in floats, even for integers.
FLOAT_ONLY = frozenset(
    (*VENDOR, *functions.MAPPED, *functions.LOOPS, "asinh", "acosh", "nextafter")
) | frozenset("sqrt rsqrt reciprocal sigmoid silu softplus copysign xlogy".split())


def lower(
    op: str,
    operands: tuple[Operand | None, ...],
    common: str,
    out: str,
    vector_library: bool = True,
    on_gpu: bool = False,
) -> Body | None:
    """Return the body of `op`, or None if no rule covers it.

    `operands`: tensors and numbers in the order of the op's arguments, None for one
    left out. `common`: the dtype of torch's promotion. `out`: storage dtype of the
    result. `vector_library`: give the bits of eager on a CPU, which takes some
    functions from a vector library; else those of IEEE arithmetic. `on_gpu`: give the
    bits of eager's GPU kernels.
    """
    rule = RULES.get(op)
    if rule is None:
        return None
    compute = opmath(common)
    if op in FLOAT_ONLY and compute not in FLOATS:
        return None
    tensors = [x for x in operands if isinstance(x, Tensor)]
    single = bool(tensors) and all(x.zero_dim for x in tensors)
    b = Builder(common, compute, vector_library and not on_gpu, single, on_gpu)
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
                # eager casts to the common type, then widens to compute; the cast
                # rounds only if a 0-d tensor is wider than the common type
                wide = _stays_wide(op, position, operand, on_gpu)
                x = b.cast(x if wide else b.cast(x, common), compute)
                args.append(x)
                if operand.zero_dim:
                    b.shared.add(x)
                if operand.on_host:
                    b.on_host.add(x)
            continue
        if operand.stored and (op, position) == ("pow", 1):
            return None  # eager uses other formulas for some exponents
        if operand.stored:
            x = b.cast(b.emit(Instr("load", (), "f64", len(reads))), compute)
            reads.append("f64")
        else:
            x = b.emit(Instr("scalar", (), compute, n_scalars))
            n_scalars += 1
        if op in (ROUNDED_ON_GPU if on_gpu else ROUND_NUMBERS):
            x = b.rounded(x)
        b.numbers[x] = operand.value
        b.shared.add(x)
        args.append(x)
    returned = rule(b, *args)
    if returned is None:
        return None
    result = b.cast(returned, out)
    return Body(op, tuple(reads), n_scalars, tuple(b.instrs), ((result, out),))


def _stays_wide(op: str, position: int, operand: Tensor, on_gpu: bool) -> bool:
    """Is a 0-d operand used in float32 although the common type has 16 bits?"""
    place = (op, position)
    if not on_gpu:
        return operand.zero_dim and place in WIDE_ZERO_DIM
    if operand.zero_dim and place in READ_ON_GPU:
        return True
    return operand.on_host and place in GIVEN_ON_GPU

"""ATen name -> Body: the arithmetic of every pointwise operation, in one table.

`lower` takes the name of an op, its operands and the dtypes torch's promotion gave, and
returns the `Body` that gives the bits of eager on a CPU; None if no rule covers it. A
rule receives its operands already in the type eager computes in (bf16 and f16 compute
in f32) and returns the unrounded result; the store rounds it, as eager does after every
call.

The formulas were found by comparing bits with eager over random data (torch 2.13, AVX2
and AVX-512): where eager's compiler contracted a product and a sum, the rule says
`fma`; where it did not, it says `mul` and `add`. docs/numerics.md lists what is not
exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .ir import FLOATS, Body, Instr


class Tensor(NamedTuple):
    """An operand in memory: its storage dtype, and whether it has no dimension."""

    dtype: str
    zero_dim: bool = False


class Number(NamedTuple):
    """A scalar operand. `value` is None unless the value is part of the structure."""

    value: float | None
    is_float: bool = True


Operand = Tensor | Number

#: Scalars whose value decides the form of a body, for any op; others only for `pow`.
STRUCTURAL = (0, 1)
STRUCTURAL_OPS = frozenset({"pow"})


def opmath(dtype: str) -> str:
    """The dtype in which eager computes on tensors of `dtype`."""
    return "f32" if dtype in ("bf16", "f16") else dtype


class Builder:
    """Collects the instructions of one body, reusing those that are equal."""

    def __init__(self, common: str, compute: str, vector_library: bool) -> None:
        self.common = common
        self.compute = compute
        self.vector_library = vector_library
        self.instrs: list[Instr] = []
        self.known: dict[Instr, int] = {}
        self.numbers: dict[int, float | None] = {}

    def emit(self, instr: Instr) -> int:
        if instr not in self.known:
            self.known[instr] = len(self.instrs)
            self.instrs.append(instr)
        return self.known[instr]

    def op(self, op: str, *args: int, dtype: str | None = None) -> int:
        return self.emit(Instr(op, args, dtype or self.compute))

    def const(self, value: float) -> int:
        return self.emit(Instr("const", (), self.compute, value))

    def zero(self) -> int:
        """The number 0, as an operand that stood in the call."""
        x = self.const(0.0)
        self.numbers[x] = 0.0
        return x

    def cast(self, x: int, dtype: str) -> int:
        return x if self.instrs[x].dtype == dtype else self.op("cast", x, dtype=dtype)

    def is_number(self, x: int, value: float) -> bool:
        """Was operand x written in the graph as exactly this number?"""
        return self.numbers.get(x) == value

    def rounded(self, x: int) -> int:
        """x as a tensor of the common dtype would hold it."""
        return self.cast(self.cast(x, self.common), self.compute)

    def tail(self, tail: int, body: int) -> int:
        """`tail` where eager's vectorized loop has ended, `body` inside it."""
        return (
            body
            if tail == body
            else self.op("where", self.emit(Instr("tail", (), "b8")), tail, body)
        )

    def compare(self, op: str, x: int, y: int) -> int:
        return self.op(op, x, y, dtype="b8")


Rule = Callable[..., int]

#: Ops whose bf16 and f16 kernels round a number to the tensor's type before they use
#: it; the others keep it in float32.
ROUND_NUMBERS = frozenset(
    (
        "add sub rsub mul_rounded pow clamp clamp_min clamp_max maximum minimum "
        "lt le gt ge eq ne"
    ).split()
)
#: Operands (op, position) that stay in float32 where they are 0-d, as if numbers.
WIDE_ZERO_DIM = frozenset(
    {("mul", 1), ("div", 1), ("lerp", 2), ("addcmul", 3), ("addcdiv", 3)}
)


def _add(b: Builder, x: int, y: int, alpha: int | None = None) -> int:
    if alpha is None or b.is_number(alpha, 1):
        return b.op("add", x, y)
    if b.compute in FLOATS:
        # for bf16 and f16 the vector loop rounds once, what it leaves over rounds twice
        leftover = b.op("add", x, b.rounded(b.op("mul", y, alpha)))
        body = b.op("fma", y, alpha, x)
        return b.tail(leftover, body) if b.common != b.compute else body
    return b.op("add", x, b.op("mul", y, alpha))


def _sub(b: Builder, x: int, y: int, alpha: int | None = None) -> int:
    if alpha is None or b.is_number(alpha, 1):
        return b.op("sub", x, y)
    # eager calls add with -alpha
    return _add(b, x, y, b.op("neg", alpha))


def _rsub(b: Builder, x: int, y: int, alpha: int | None = None) -> int:
    return _sub(b, y, x, alpha)


def _add_parts(b: Builder, x: int, y: int, alpha: int | None = None) -> int:
    """Eager multiplies complex numbers first, and then adds: two roundings."""
    return b.op("add", x, y if alpha is None else b.op("mul", y, alpha))


def _sub_parts(b: Builder, x: int, y: int, alpha: int | None = None) -> int:
    if alpha is None:
        return b.op("sub", x, y)
    return _add_parts(b, x, y, b.op("neg", alpha))


def _addcmul(b: Builder, x: int, s: int, t: int, value: int | None = None) -> int:
    if value is not None and not b.is_number(value, 1):
        s = b.op("mul", value, s)
    return b.op("fma", s, t, x)


def _addcdiv(b: Builder, x: int, s: int, t: int, value: int | None = None) -> int:
    if value is not None and not b.is_number(value, 1):
        s = b.op("mul", value, s)
    return b.op("add", x, b.op("div", s, t))


def _lerp(b: Builder, start: int, end: int, weight: int) -> int:
    """`|w| < 0.5 ? fma(w, end - start, start) : fma(w - 1, end - start, end)`."""
    one = b.const(1.0)
    low = b.compare("lt", b.op("abs", weight), b.const(0.5))
    factor = b.op("where", low, weight, b.op("sub", weight, one))
    base = b.op("where", low, start, end)
    return b.op("fma", factor, b.op("sub", end, start), base)


def _pow(b: Builder, x: int, y: int) -> int:
    exponent = b.numbers.get(y)
    if exponent is not None and b.compute in FLOATS and x not in b.numbers:
        if exponent == 2:
            return b.op("mul", x, x)
        if exponent == 3:
            square = b.op("mul", x, x)
            return b.op("mul", b.rounded(square) if b.common == "bf16" else square, x)
        if exponent == 0.5:
            return _sqrt(b, x)
        if exponent == 1:
            return x
        if exponent == -1:
            return b.op("div", b.const(1.0), x)
        if exponent == -2:
            square = b.op("mul", x, x)
            square = b.rounded(square) if b.common == "bf16" else square
            return b.op("div", b.const(1.0), square)
        if exponent == -0.5:
            return _rsqrt(b, x) if b.common != "f16" else _inverse_sqrt(b, x)
        if b.common == "f32":
            # eager takes the power in double, the exponent being one
            wide = b.cast(x, "f64"), b.emit(b.instrs[y]._replace(dtype="f64"))
            return b.cast(b.op("pow", *wide, dtype="f64"), "f32")
    return b.op("pow", x, y)


def _sign(b: Builder, x: int) -> int:
    zero, one = b.const(0.0), b.const(1.0)
    below = b.op("where", b.compare("lt", x, zero), b.op("neg", one), zero)
    return b.op("where", b.compare("lt", zero, x), one, below)


def _clamp(b: Builder, x: int, low: int | None = None, high: int | None = None) -> int:
    """A NaN, or an x equal to the bound, stays x; tensor bounds spread their NaN."""
    if low is not None:
        number = low in b.numbers
        x = (
            b.op("where", b.compare("lt", x, low), low, x)
            if number
            else b.op("max", x, low)
        )
    if high is not None:
        number = high in b.numbers
        x = (
            b.op("where", b.compare("lt", high, x), high, x)
            if number
            else b.op("min", x, high)
        )
    return x


def _clamp_max(b: Builder, x: int, high: int) -> int:
    return _clamp(b, x, None, high)


def _sqrt(b: Builder, x: int) -> int:
    """Eager takes the roots of f32 and f64 from a vector library, on a CPU."""
    return b.op(
        "vsqrt" if b.vector_library and b.common in ("f32", "f64") else "sqrt", x
    )


def _reciprocal(b: Builder, x: int) -> int:
    return b.op("div", b.const(1.0), x)


def _inverse_sqrt(b: Builder, x: int) -> int:
    return b.op("div", b.const(1.0), b.op("sqrt", x))


def _rsqrt(b: Builder, x: int) -> int:
    leftover = b.op("div", b.const(1.0), b.rounded(b.op("sqrt", x)))
    return b.tail(leftover, _inverse_sqrt(b, x))


def _sigmoid(b: Builder, x: int) -> int:
    one = b.const(1.0)
    return b.op("div", one, b.op("add", one, b.op("exp", b.op("neg", x))))


def _where(b: Builder, mask: int, x: int, y: int) -> int:
    return b.op("where", mask, x, y)


def _plain(op: str) -> Rule:
    return lambda b, *args: b.op(op, *args)


def _comparison(op: str, swap: bool = False) -> Rule:
    def rule(b: Builder, x: int, y: int) -> int:
        return b.compare(op, y, x) if swap else b.compare(op, x, y)

    return rule


def _logical(op: str) -> Rule:
    """Operands count as true where they are not zero."""

    def rule(b: Builder, *args: int) -> int:
        zero = b.const(0.0)
        masks = [
            a if b.instrs[a].dtype == "b8" else b.compare("ne", a, zero) for a in args
        ]
        return b.op(op, *masks, dtype="b8")

    return rule


def _identity(b: Builder, x: int) -> int:
    return x


RULES: dict[str, Rule] = {
    "add": _add,
    "sub": _sub,
    "rsub": _rsub,
    "mul": _plain("mul"),
    # in-place aten._foreach_mul_ by a number, which eager rounds to the tensor's type
    "mul_rounded": _plain("mul"),
    # of the parts of complex numbers
    "add_parts": _add_parts,
    "sub_parts": _sub_parts,
    "div": _plain("div"),
    "neg": _plain("neg"),
    "abs": _plain("abs"),
    "sqrt": _sqrt,
    "rsqrt": _rsqrt,
    "reciprocal": _reciprocal,
    "square": lambda b, x: b.op("mul", x, x),
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "lerp": _lerp,
    "fma": _plain("fma"),
    "pow": _pow,
    "maximum": _clamp,
    "minimum": _clamp_max,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp_max,
    "relu": lambda b, x: _clamp(b, x, b.zero()),
    "sign": _sign,
    "exp": _plain("exp"),
    "expm1": _plain("expm1"),
    "log": _plain("log"),
    "log1p": _plain("log1p"),
    "tanh": _plain("tanh"),
    "erf": _plain("erf"),
    "sin": _plain("sin"),
    "cos": _plain("cos"),
    "sigmoid": _sigmoid,
    "floor": _plain("floor"),
    "ceil": _plain("ceil"),
    "trunc": _plain("trunc"),
    "round": _plain("round"),
    "lt": _comparison("lt"),
    "le": _comparison("le"),
    "gt": _comparison("lt", swap=True),
    "ge": _comparison("le", swap=True),
    "eq": _comparison("eq"),
    "ne": _comparison("ne"),
    "logical_and": _logical("and"),
    "logical_or": _logical("or"),
    "logical_xor": _logical("xor"),
    "logical_not": _logical("not"),
    "isnan": lambda b, x: b.compare("ne", x, x),
    "where": _where,
    "copy": _identity,
    "fill": _identity,
}


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
    if (
        op in ("pow", "exp", "log", "tanh", "erf", "sin", "cos")
        and compute not in FLOATS
    ):
        return None
    b = Builder(common, compute, vector_library)
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
            mask = op == "where" and position == 0
            if op in ("copy", "fill") or mask:
                args.append(x)
            else:
                # eager casts to the common type, then widens to compute; the first
                # rounds only where a 0-d tensor is wider than what it meets
                wide = operand.zero_dim and (op, position) in WIDE_ZERO_DIM
                args.append(b.cast(x if wide else b.cast(x, common), compute))
            continue
        x = b.emit(Instr("scalar", (), compute, n_scalars))
        n_scalars += 1
        if op in ROUND_NUMBERS:
            x = b.rounded(x)
        b.numbers[x] = operand.value
        args.append(x)
    result = rule(b, *args)
    result = b.cast(result, out)
    return Body(op, tuple(reads), n_scalars, tuple(b.instrs), ((result, out),))

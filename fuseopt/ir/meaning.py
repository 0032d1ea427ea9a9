"""Semantics of each IR instruction, in plain torch.

A result depends only on the values of the arguments, and not on their number or their
place in memory. bf16 and f16 are rounded by casts. `fma` is exact (see `_fma`).
Functions on which libraries disagree (exp, pow, ...) are computed in double, element by
element, and rounded once. `vsqrt` is `torch.sqrt`. `tail`, which depends on how eager
splits its loops, is a constant that the caller chooses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import torch

from ..errors import GraphError
from .blocks import count
from .graph import REDUCTIONS, VECTOR, Instr
from .opcodes import TORCH_NAMES
from .tables import TABLES, Table

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, attribute) for name, attribute in TORCH_NAMES.items()
}


def evaluate(
    instrs: Sequence[Instr],
    loads: Sequence[torch.Tensor | None],
    numbers: Sequence[float],
    tail: bool = False,
    dims: tuple[int, ...] = (),
    space: tuple[int, ...] = (),
) -> list[torch.Tensor]:
    """Return the value of every instruction.

    Numbers are 0-d and broadcast. `dims`: removed by reductions from the shape `space`.
    """
    results: list[torch.Tensor] = []
    for x, instr in enumerate(instrs):
        dtype = DTYPES[instr.dtype]
        if instr.op == "load":
            value = loads[int(instr.attr or 0)]
            if value is None:
                raise GraphError(f"%{x} loads slot {instr.attr}, which is never read")
        elif instr.op in ("scalar", "const"):
            if instr.op == "scalar":
                number = numbers[int(instr.attr or 0)]
            else:
                number = float(instr.attr or 0)
            value = torch.tensor(number, dtype=torch.float64).to(dtype)
        elif instr.op == "tail":
            value = torch.tensor(tail)
        elif instr.op == "cast":
            value = results[instr.args[0]].to(dtype)
        elif instr.op == "bitcast":
            value = results[instr.args[0]].view(dtype)
        elif instr.op == "index":
            shape = results[instr.args[0]].shape
            value = torch.arange(shape.numel(), dtype=dtype).view(shape)
        elif instr.op in REDUCTIONS:
            operand = results[instr.args[0]]
            operand = operand.expand(space) if space else operand
            value = FOLDS[instr.op](operand, list(dims))
        elif instr.op in BLOCKED:
            value = BLOCKED[instr.op](
                results[instr.args[0]], int(instr.attr or 0), space
            )
        elif instr.op in ("lookup", "search"):
            of_table = TABLED[instr.op]
            args = _same_shape([results[a] for a in instr.args])
            value = of_table(TABLES[int(instr.attr or 0)], *args)
        else:
            value = _apply(instr.op, [results[a] for a in instr.args])
        if value.dtype != dtype:
            raise GraphError(f"%{x} = {instr.op} is {value.dtype}, not {dtype}")
        results.append(value)
    return results


def _apply(op: str, args: list[torch.Tensor]) -> torch.Tensor:
    """Compute one arithmetic instruction; 16-bit floats in float32, then rounded."""
    result = next(
        (a.dtype for a in reversed(args) if a.dtype != torch.bool), torch.bool
    )
    if op in PLAIN:
        return PLAIN[op](*args)
    narrow = result in (torch.bfloat16, torch.float16)
    args = [a.float() if a.dtype == result and narrow else a for a in args]
    if op == "div" and not result.is_floating_point:
        return torch.div(*args, rounding_mode="trunc")
    if op in ARITHMETIC:
        return ARITHMETIC[op](*args).to(result)
    if op == "fma":
        a, b, c = _same_shape(args)
        if not result.is_floating_point:
            return torch.add(torch.mul(a, b), c)
        return _fma(a, b, c).to(result)
    wide = [a.double() for a in args]
    return _one_by_one(FUNCTIONS[op], *wide).to(result)


def _same_shape(args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    shapes = [a.shape for a in args]
    shape = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return [a.expand(shape) for a in args]


def _larger(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(a.ne(a) | (a > b), a, b)


def _smaller(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(a.ne(a) | (a < b), a, b)


# ---------------------------------------------------------------- blocks, tables


def _in_blocks(x: torch.Tensor, size: int, space: tuple[int, ...]) -> torch.Tensor:
    """A row for each block; the last one is filled with its own first element."""
    flat = x.expand(space).reshape(-1)
    n = count(len(flat), size) * size - len(flat)
    last = flat[len(flat) - size + n :][:1].expand(n)
    return torch.cat((flat, last)).view(-1, size)


def _spread(x: torch.Tensor, size: int, space: tuple[int, ...]) -> torch.Tensor:
    n = math.prod(space)
    return x.reshape(-1, 1).expand(-1, size).reshape(-1)[:n].view(space)


def _largest(x: torch.Tensor, size: int, space: tuple[int, ...]) -> torch.Tensor:
    return _spread(_in_blocks(x, size, space).amax(1), size, space)


def _least(x: torch.Tensor, size: int, space: tuple[int, ...]) -> torch.Tensor:
    return _spread(_in_blocks(x, size, space).amin(1), size, space)


def _first(x: torch.Tensor, size: int, space: tuple[int, ...]) -> torch.Tensor:
    return _in_blocks(x, size, space)[:, 0].clone()


#: (argument, size of blocks, shape of elements) -> result
BLOCKED: dict[str, Callable[..., torch.Tensor]] = {
    "block_largest": _largest,
    "block_least": _least,
    "spread": _spread,
    "first": _first,
}


def _look_up(table: Table, code: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    return torch.tensor(table.values, dtype=torch.float32)[part.long(), code.long()]


def _search(table: Table, x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    codes = torch.zeros(x.shape, dtype=torch.int32)
    for k, steps in enumerate(table.steps):
        found = torch.searchsorted(torch.tensor(steps), x.contiguous(), right=True)
        codes = torch.where((part == k) & x.eq(x), found.int(), codes)
    return codes


TABLED: dict[str, Callable[..., torch.Tensor]] = {"lookup": _look_up, "search": _search}

Function = Callable[..., torch.Tensor]

#: Reductions: sums have torch's order, which the IR does not prescribe.
FOLDS: dict[str, Callable[[torch.Tensor, list[int]], torch.Tensor]] = {
    "sum": lambda x, dims: torch.sum(x, dims),
    "sumsq": lambda x, dims: torch.sum(x * x, dims),
    "fold": lambda x, dims: torch.sum(x, dims),
    "largest": lambda x, dims: torch.amax(x, dims),
    "least": lambda x, dims: torch.amin(x, dims),
}

#: Ops that round nothing: they compare, choose, or work on bits.
PLAIN: dict[str, Function] = {
    "lt": torch.lt,
    "le": torch.le,
    "eq": torch.eq,
    "ne": torch.ne,
    "isnan": lambda a: a.ne(a),
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "not": torch.bitwise_not,
    "where": torch.where,
    "max": _larger,
    "min": _smaller,
    "neg": torch.neg,
    "abs": torch.abs,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
    "nextafter": torch.nextafter,
}
#: Ops that IEEE arithmetic rounds correctly (vsqrt: as torch's vector library does).
ARITHMETIC: dict[str, Function] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "vsqrt": torch.sqrt,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "trunc": torch.trunc,
    "round": torch.round,
}


def _at_limits(function: Function) -> Callable[..., float]:
    """Return a function with IEEE's result where Python's math raises (log(0),
    exp(1000)).
    """

    def value(*args: float) -> float:
        got = function(*(torch.tensor(x, dtype=torch.float64) for x in args))
        return float(got)

    return value


#: Functions computed in double, element by element, with torch's counterpart.
_MATH: dict[str, tuple[Callable[..., float], Function]] = {
    "sqrt": (math.sqrt, torch.sqrt),  # a double root is exact enough to round again
    "pow": (math.pow, torch.pow),
    "exp": (math.exp, torch.exp),
    "exp2": (lambda x: 2.0**x, torch.exp2),
    "expm1": (math.expm1, torch.expm1),
    "log": (math.log, torch.log),
    "log2": (math.log2, torch.log2),
    "log10": (math.log10, torch.log10),
    "log1p": (math.log1p, torch.log1p),
    "sin": (math.sin, torch.sin),
    "cos": (math.cos, torch.cos),
    "tan": (math.tan, torch.tan),
    "asin": (math.asin, torch.asin),
    "acos": (math.acos, torch.acos),
    "atan": (math.atan, torch.atan),
    "sinh": (math.sinh, torch.sinh),
    "cosh": (math.cosh, torch.cosh),
    "tanh": (math.tanh, torch.tanh),
    "asinh": (math.asinh, torch.asinh),
    "acosh": (math.acosh, torch.acosh),
    "atanh": (math.atanh, torch.atanh),
    "erf": (math.erf, torch.erf),
    "erfc": (math.erfc, torch.erfc),
    "lgamma": (math.lgamma, torch.lgamma),
    "atan2": (math.atan2, torch.atan2),
    "hypot": (math.hypot, torch.hypot),
    "fmod": (math.fmod, torch.fmod),
}


def _total(pair: tuple[Callable[..., float], Function]) -> Callable[..., float]:
    function, limits = pair[0], _at_limits(pair[1])

    def value(*args: float) -> float:
        try:
            return function(*args)
        except (ValueError, OverflowError):
            return limits(*args)

    return value


FUNCTIONS = {name: _total(pair) for name, pair in _MATH.items()}
#: The library of a function changes its last bits, not its meaning.
FUNCTIONS.update({name: FUNCTIONS[plain] for name, plain in VECTOR.items()})


def _one_by_one(function: Callable[..., float], *args: torch.Tensor) -> torch.Tensor:
    same = _same_shape(args)
    lists = [a.reshape(-1).tolist() for a in same]
    values = [function(*xs) for xs in zip(*lists, strict=True)]
    return torch.tensor(values, dtype=torch.float64).reshape(same[0].shape)


# ---------------------------------------------------------------- exact fma


def _two_sum(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a + b rounded, and the exact rounding error (Knuth)."""
    s = a + b
    back = s - a
    return s, (a - (s - back)) + (b - back)


def _odd_sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a + b rounded to odd: of the two doubles around an inexact sum, the odd
    one.

    A number rounded to odd can safely be rounded once more, to fewer digits.
    """
    s, lost = _two_sum(a, b)
    bits = s.view(torch.int64)
    inexact = lost.ne(0) & lost.isfinite() & (bits & 1).eq(0)
    outward = (lost > 0).eq(s > 0)
    moved = torch.where(outward, bits + 1, bits - 1)
    return torch.where(inexact, moved, bits).view(torch.float64)


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return a * b + c, rounded once.

    float32: the product is exact in double; the sum is rounded to odd, then to float32.
    float64: the product is an exact pair (Dekker), summed as Boldo and Melquiond do.
    That holds within a range in which no step can over- or underflow; outside it,
    fractions are used.
    """
    if a.dtype == torch.float32:
        return _odd_sum(a.double() * b.double(), c.double()).float()
    p = a * b
    plain = a.eq(0) | b.eq(0) | ~(a.isfinite() & b.isfinite() & c.isfinite())
    small, big = 2.0**-900, 2.0**900
    safe = (p.abs() > small) & (p.abs() < big) & (a.abs() < big)
    safe &= (b.abs() < big) & (c.abs() < big)
    lost = _product_error(a, b, p)
    high, low = _two_sum(c, lost)
    top, rest = _two_sum(p, high)
    result = torch.where(plain, p + c, top + _odd_sum(low, rest))
    slow = ~(plain | safe)
    if slow.any():
        columns = (a[slow].tolist(), b[slow].tolist(), c[slow].tolist())
        exact = [_fraction_fma(*x) for x in zip(*columns, strict=True)]
        result[slow] = torch.tensor(exact, dtype=torch.float64)
    return result


def _product_error(a: torch.Tensor, b: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Return a * b - p exactly, from halves of 26 bits (Veltkamp, Dekker)."""
    a_high, a_low = _halves(a)
    b_high, b_low = _halves(b)
    rest = a_high * b_high - p
    return ((rest + a_high * b_low) + a_low * b_high) + a_low * b_low


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scaled = x * 134217729.0  # 2**27 + 1
    high = scaled - (scaled - x)
    return high, x - high


def _fraction_fma(a: float, b: float, c: float) -> float:
    total = Fraction(a) * Fraction(b) + Fraction(c)
    try:
        return float(total)
    except OverflowError:
        return math.inf if total > 0 else -math.inf

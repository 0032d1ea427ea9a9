"""Numbers of the host: formulas and evaluation have the bits of Python."""

from __future__ import annotations

import math
import operator
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuseopt.ir.expressions import Apply, Arg, Expr, Item, Sym, evaluator, formulas

BINARY = (
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.pow),
    *(operator.floordiv, operator.mod, operator.iadd, operator.itruediv),
    *(operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne),
    *(max, min, math.atan2),
)
UNARY = (operator.neg, abs, math.sqrt, float, int, math.exp)
LEAVES = 3
FLOATS = st.floats(width=64)
NUMBERS = st.one_of(
    FLOATS,
    st.integers(-50, 50),
    st.sampled_from([0.0, -0.0, 1, 1.0, -1, 0.1, 1e308, 5e-324, math.inf]),
)


def bits(x: Any) -> Any:
    """What tells numbers apart that Python takes for equal."""
    return (type(x), struct.pack("d", x)) if isinstance(x, float) else (type(x), x)


@st.composite
def programs(draw: Any) -> list[Expr]:
    """Numbers of which each is made of earlier ones and of constants."""
    exprs: list[Expr] = [Arg(0, "lr"), Item(1, "t"), Item(0, "")]
    for _ in range(draw(st.integers(1, 8))):
        earlier = st.integers(0, len(exprs) - 1).map(lambda i: Sym(i, True))
        operand = st.one_of(earlier, earlier, NUMBERS)
        if draw(st.booleans()):
            function = draw(st.sampled_from(BINARY))
            operands = draw(operand), draw(operand)
            if function is operator.pow:  # of floats: whole numbers would not end
                operands = draw(
                    st.sampled_from([(draw(FLOATS), operands[0])])
                    | st.sampled_from([(operands[0], draw(FLOATS))])
                )
            exprs.append(Apply(function, operands, {}))
        else:
            exprs.append(Apply(draw(st.sampled_from(UNARY)), (draw(earlier),), {}))
    return exprs


def in_python(exprs: list[Expr], args: list[Any], tensors: list[Any]) -> list[Any]:
    """Every number by the call that the step makes."""
    values: list[Any] = []
    for expr in exprs:
        if isinstance(expr, Arg):
            values.append(args[expr.position])
        elif isinstance(expr, Item):
            values.append(tensors[expr.position].item())
        else:
            given = [values[x.index] if isinstance(x, Sym) else x for x in expr.args]
            values.append(expr.function(*given, **expr.kwargs))
    return values


class Scalar:
    """A tensor with one number in it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def item(self) -> Any:
        return self.value


FAILURES = (ArithmeticError, ValueError, TypeError)


@settings(deadline=None)
@given(programs(), st.tuples(*[NUMBERS] * LEAVES))
def test_formulas_and_evaluation_have_the_bits_of_python(
    exprs: list[Expr], leaves: tuple[Any, ...]
) -> None:
    args, tensors = [leaves[0]], [Scalar(leaves[2]), Scalar(leaves[1])]
    texts = formulas(exprs, range(len(exprs)))
    names = {"lr": leaves[0], "t": leaves[1], "item0": leaves[2], "inf": math.inf}
    names |= {"nan": math.nan, "atan2": math.atan2, "sqrt": math.sqrt, "exp": math.exp}
    try:
        want = in_python(exprs, args, tensors)
    except FAILURES as error:
        with pytest.raises(type(error)):
            evaluator(exprs)(args, tensors.__getitem__)
        return
    got = evaluator(exprs)(args, tensors.__getitem__)
    assert list(map(bits, got)) == list(map(bits, want))
    for i, value in enumerate(want):
        names[f"sym{i}"] = value
    for i, value in enumerate(want):
        found = eval(texts[i], {}, names)
        # a formula says that a number is none, and not which one
        same = bits(found) == bits(value) or (found != found and value != value)
        assert same, texts[i]
        assert type(found) is type(value), texts[i]


def test_a_formula_reads_as_a_person_writes_it() -> None:
    exprs: list[Expr] = [
        Arg(0, "lr"),
        Item(3, "t"),
        Apply(operator.pow, (0.9, Sym(1, False)), {}),
        Apply(operator.sub, (1, Sym(2, True)), {}),
        Apply(operator.truediv, (Sym(0, True), Sym(3, True)), {}),
        Apply(operator.neg, (Sym(4, True),), {}),
        Apply(operator.sub, (Sym(0, True), Sym(3, True)), {}),
        Apply(operator.sub, (Sym(0, True), Sym(6, True)), {}),
        Apply(operator.pow, (-0.5, Sym(1, False)), {}),
        Apply(operator.pow, (Sym(2, True), Sym(1, False)), {}),
    ]
    assert formulas(exprs, range(2, len(exprs))) == {
        2: "0.9 ** t",
        3: "1 - 0.9 ** t",
        4: "lr / (1 - 0.9 ** t)",
        5: "-(lr / (1 - 0.9 ** t))",
        6: "lr - (1 - 0.9 ** t)",
        7: "lr - (lr - (1 - 0.9 ** t))",
        8: "(-0.5) ** t",
        9: "(0.9 ** t) ** t",
    }


def test_a_formula_of_many_numbers_stays_short() -> None:
    exprs: list[Expr] = [Arg(0, "x")]
    for i in range(2000):
        exprs.append(Apply(operator.add, (Sym(i, True), Sym(i, True)), {}))
    (text,) = formulas(exprs, [2000]).values()
    assert len(text) < 200
    assert text.startswith("sym")


def test_constants_keep_their_type_and_sign() -> None:
    constants = (1, 1.0, True, 0.0, -0.0, math.inf, -math.inf)
    pick = lambda *x: x  # noqa: E731
    (got,) = evaluator([Apply(pick, constants, {})])([], lambda i: None)
    assert list(map(bits, got)) == list(map(bits, constants))

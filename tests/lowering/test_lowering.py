"""ATen name -> Body: well-formed for every dtype, of the form that eager rounds as."""

from __future__ import annotations

import inspect

import pytest

from fuseopt.ir.graph import ARITY, Body
from fuseopt.lowering.pointwise import RULES, Number, Operand, Tensor, lower, opmath
from tests.build_graphs import GraphBuilder

DTYPES = ("f32", "f64", "bf16", "f16")
MASKED = {"logical_and", "logical_or", "logical_xor", "logical_not", "isnan"}
MASKED |= {"isinf", "signbit"}
#: Ops of integers alone, on whose bits they work.
WHOLE = {op for op in RULES if op.startswith(("bitwise", "__"))}
COMPARE = {"lt", "le", "gt", "ge", "eq", "ne"}
#: Ops that compute nothing, or nothing on floats, or not on all of them.
ELSEWHERE = {"copy", "fill", "where", "masked_fill", "bitcast", "nextafter", *WHOLE}


def operands(op: str, dtype: str) -> tuple[Operand, ...]:
    """As many tensors as the rule asks for; of a rule for any number, as many as its
    instructions take.
    """
    kinds = list(inspect.signature(RULES[op]).parameters.values())[1:]
    count = sum(x.default is x.empty for x in kinds)
    if any(x.kind is x.VAR_POSITIONAL for x in kinds):
        count = next(n for n in (1, 2, 3) if takes(op, n, dtype))
    if op in ("maximum", "clamp_min"):
        count = 2  # their rule is that of `clamp`, which may have no bound
    tensors: list[Operand] = [Tensor(dtype)] * count
    if op in ("where", "masked_fill"):
        tensors[op == "masked_fill"] = Tensor("b8")
    return tuple(tensors)


def takes(op: str, count: int, dtype: str) -> bool:
    lowered = lower(op, (Tensor(dtype),) * count, dtype, dtype)
    assert lowered is not None
    return all(len(i.args) == ARITY[i.op] for i in lowered.instrs)


def body(op: str, *args: Operand | None, dtype: str = "f32", **more) -> Body:
    result = lower(op, args, dtype, more.pop("out", dtype), **more)
    assert result is not None
    return result


def ops(b: Body) -> list[str]:
    return [i.op for i in b.instrs if i.op not in ("load", "scalar", "const")]


X = Tensor("f32")
H = Tensor("bf16")
ANY = Number(None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", RULES)
def test_every_rule_gives_a_well_formed_body(op: str, dtype: str) -> None:
    if op in WHOLE:
        dtype = {"f32": "i32", "f64": "i64", "bf16": "i16", "f16": "u8"}[dtype]
    out = "b8" if op in MASKED | COMPARE else dtype
    made = lower(op, operands(op, dtype), dtype, out)
    if op == "nextafter" and opmath(dtype) != dtype:
        assert made is None
        return
    assert made is not None
    assert {i.op for i in made.instrs} <= set(ARITY)
    g = GraphBuilder()
    read = [g.tensor(f"x{k}", (4,), d) for k, d in enumerate(made.reads)]
    result = g.tensor("out", (4,), out)
    g._bodies[op, tuple(Tensor(d) for d in made.reads), out] = made
    g.op(op, *read, out=result)
    g.graph()  # check_graph looks at arity, order and dtypes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", sorted(RULES.keys() - ELSEWHERE))
def test_bodies_compute_in_the_type_eager_computes_in(op: str, dtype: str) -> None:
    made = lower(op, operands(op, dtype), dtype, dtype)
    assert made is not None
    bits = {x for x, i in enumerate(made.instrs) if i.op == "bitcast"}
    computed = {
        i.dtype
        for x, i in enumerate(made.instrs)
        if i.op not in ("load", "cast") and i.dtype != "b8" and x not in bits
    }
    assert computed <= {opmath(dtype), "i64", "i32"} if bits else {opmath(dtype)}


def test_unknown_op() -> None:
    assert lower("no_such_op", (X,), "f32", "f32") is None


def test_functions_of_integers_have_no_rule() -> None:
    assert lower("exp", (Tensor("i64"),), "i64", "i64") is None


def test_result_is_stored_as_asked() -> None:
    assert body("mul", H, H, dtype="bf16").writes[0][1] == "bf16"
    assert body("lt", X, X, out="b8").instrs[-1].dtype == "b8"


@pytest.mark.parametrize("op", ["add", "mul", "lerp", "addcdiv", "clamp_min", "fill"])
def test_a_number_is_no_part_of_the_text(op: str) -> None:
    """Any two literals that are not structural give equal bodies."""
    tensors = operands(op, "f32")[: {"lerp": 2, "mul": 1, "clamp_min": 1}.get(op, 3)]
    tensors = () if op == "fill" else tensors
    a = body(op, *tensors, Number(None))
    b = body(op, *tensors, Number(None, is_float=False))
    assert a.instrs == b.instrs


def test_alpha_of_one_is_no_product() -> None:
    assert ops(body("add", X, X, Number(1.0))) == ["add"]
    assert ops(body("add", X, X, None)) == ["add"]


def test_alpha_is_contracted_as_eager_contracts_it() -> None:
    made = body("add", X, X, ANY)
    result = made.instrs[made.writes[0][0]]
    assert result.op == "fma"


def test_integers_are_not_contracted() -> None:
    i = Tensor("i64")
    assert "fma" not in ops(body("add", i, i, ANY, dtype="i64"))


def test_bf16_knows_the_tail_of_the_vector_loop() -> None:
    made = ops(body("add", H, H, ANY, dtype="bf16"))
    assert {"tail", "where", "fma"} <= set(made)


def test_value_of_one_in_addcmul_and_addcdiv() -> None:
    assert ops(body("addcmul", X, X, X, Number(1.0))) == ["fma"]
    assert ops(body("addcmul", X, X, X, ANY)) == ["mul", "fma"]
    assert ops(body("addcdiv", X, X, X, Number(1.0))) == ["div", "add"]
    assert ops(body("addcdiv", X, X, X, ANY)) == ["mul", "div", "add"]


def test_products_and_quotients_with_a_value_on_a_gpu() -> None:
    """As eager's kernels for GPUs are compiled: the value comes last, contracted."""
    gpu = {"on_gpu": True}
    assert ops(body("addcmul", X, X, X, Number(1.0), **gpu)) == ["fma"]
    made = body("addcmul", X, X, X, ANY, **gpu)
    assert ops(made) == ["mul", "fma"]
    loads = [i for i, x in enumerate(made.instrs) if x.op == "load"]
    (product,) = [x.args for x in made.instrs if x.op == "mul"]
    assert product == tuple(loads[1:])
    assert ops(body("addcdiv", X, X, X, Number(1.0), **gpu)) == ["div", "add"]
    assert ops(body("addcdiv", X, X, X, ANY, **gpu)) == ["div", "fma"]


def test_a_division_by_a_number_is_a_product_on_a_gpu() -> None:
    gpu = {"on_gpu": True}
    assert ops(body("div", X, ANY)) == ["div"]
    made = body("div", X, ANY, **gpu)
    assert ops(made) == ["div", "cast", "mul"]
    assert [x.dtype for x in made.instrs if x.op == "div"] == ["f64"]
    assert ops(body("div", X, X, **gpu)) == ["div"]
    assert ops(body("div_exact", X, ANY, **gpu)) == ["div"]


def test_numbers_meet_16_bits_unrounded_on_a_gpu() -> None:
    gpu = {"on_gpu": True, "dtype": "bf16"}
    for op in ("add", "mul_rounded", "maximum", "clamp_min"):
        casts = [x for x in body(op, H, ANY, **gpu).instrs if x.op == "cast"]
        rounded = [x for x in body(op, H, ANY, dtype="bf16").instrs if x.op == "cast"]
        assert len(casts) < len(rounded), op


@pytest.mark.parametrize("common", ["bf16", "f16"])
def test_a_gpu_has_no_elements_left_over(common: str) -> None:
    """Eager's loop on a GPU rounds once, for a tensor without dimensions too."""
    for zero_dim in (False, True):
        x = Tensor(common, zero_dim)
        made = body("add", x, x, ANY, dtype=common, on_gpu=True)
        ((result, _),) = made.writes
        (before,) = made.instrs[result].args
        assert made.instrs[before].op == "fma"


def rounds(op: str, position: int, operand: Operand) -> bool:
    """Is the operand at a position rounded to bfloat16 beside tensors of a GPU?"""
    args: list[Operand] = [H] * max(position + 1, len(operands(op, "f32")), 2)
    args[position] = operand
    made = body(op, *args, dtype="bf16", on_gpu=True)
    of = [x.op in ("scalar", "load") and x.dtype == "f32" for x in made.instrs]
    (number,) = [i for i, own in enumerate(of) if own]
    casts = [x for x in made.instrs if x.op == "cast" and x.args == (number,)]
    return any(x.dtype == "bf16" for x in casts)


@pytest.mark.parametrize("op", ["lt", "le", "gt", "ge", "eq", "ne"])
def test_a_comparison_rounds_what_it_compares_with_on_a_gpu(op: str) -> None:
    """Eager's kernels take the number as the tensor's type, wherever it comes from."""
    for operand in (ANY, Tensor("f32", True), Tensor("f32", True, on_host=True)):
        assert rounds(op, 1, operand)


def test_where_a_tensor_without_dimensions_lies_decides_on_a_gpu() -> None:
    there, here = Tensor("f32", True), Tensor("f32", True, on_host=True)
    for op, position in (
        ("mul", 1), ("add", 1), ("sub", 1), ("div", 1), ("lerp", 2), ("mul", 0)
    ):  # fmt: skip
        assert rounds(op, position, there), op
        assert not rounds(op, position, here), op
    for op, position in (("maximum", 1), ("fmod", 1), ("pow", 1), ("div", 0)):
        assert rounds(op, position, there), op
        assert rounds(op, position, here), op
    for op, position in (
        ("addcmul", 3),
        ("addcdiv", 3),
        ("add", 2),
        ("lerp_listed", 2),
    ):
        assert not rounds(op, position, there), op
        assert not rounds(op, position, here), op
    # an inverse is taken of what eager is given as a number
    assert ops(body("div", X, there, on_gpu=True)) == ["div"]
    assert ops(body("div", X, here, on_gpu=True)) == ["cast", "div", "cast", "mul"]


def test_roots_come_from_the_vector_library_where_eager_has_one() -> None:
    assert ops(body("sqrt", X)) == ["vsqrt"]
    assert ops(body("sqrt", X, vector_library=False)) == ["sqrt"]
    assert "vsqrt" not in ops(body("sqrt", H, dtype="bf16"))


@pytest.mark.parametrize(
    ("exponent", "expected"),
    [
        (2.0, ["mul"]),
        (3.0, ["mul", "mul"]),
        (0.5, ["vsqrt"]),
        (1.0, []),
        (-1.0, ["div"]),
        (-2.0, ["mul", "div"]),
    ],
)
def test_special_powers(exponent: float, expected: list[str]) -> None:
    assert ops(body("pow", X, Number(exponent))) == expected


def test_other_powers_of_float32_are_taken_in_double() -> None:
    made = body("pow", X, Number(1.7))
    assert [i.dtype for i in made.instrs if i.op == "pow"] == ["f64"]


def test_equal_instructions_are_one() -> None:
    made = body("mul", X, X)
    assert len(set(made.instrs)) == len(made.instrs)


def test_capture_asks_the_device_of_each_result(monkeypatch) -> None:
    """No GPU is needed to see which forms a step there would take."""
    import torch
    from torch.fx import symbolic_trace

    from fuseopt.capture import capture
    from fuseopt.capture.aten.pointwise import Pointwise
    from fuseopt.ir.graph import rows_of

    def step(p, q):
        torch._foreach_div_([p, q], 3.0)
        torch._foreach_div_([p, q], [3.0, 5.0])
        p.div_(7.0)
        p.addcdiv_(q, q, value=0.5)

    def forms() -> list[str]:
        captured = capture(symbolic_trace(step), [torch.ones(4), torch.ones(4)])
        rows = [row for node in captured.graph.nodes for row in rows_of(node)]
        return [f"{row.body.name} {' '.join(ops(row.body))}" for row in rows]

    assert forms() == ["div div"] * 5 + ["addcdiv mul div add"]
    monkeypatch.setattr(Pointwise, "_on_gpu", lambda self, out: True)
    assert forms() == [
        *["div div cast mul"] * 2,
        *["div_exact div"] * 2,
        "div div cast mul",
        "addcdiv div fma",
    ]

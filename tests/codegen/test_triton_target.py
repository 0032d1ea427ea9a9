"""The Triton target: the bits of C++ in the interpreter, and what GPUs are given."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fuseopt.codegen import CppTarget
from fuseopt.codegen.triton.kernel import TritonTarget
from fuseopt.errors import BuildError, ConfigError, LaunchError
from fuseopt.ir.graph import Instr, Kernel, Literal, Slot, Symbol, Variant
from fuseopt.runtime.cpp.table import TensorLayout
from fuseopt.runtime.triton.build import TritonBuilder, compile_offline
from fuseopt.runtime.triton.table import TritonTable, triton_factory
from tests.triton_cases import (
    CASES,
    Case,
    Compilers,
    bits,
    kernels,
    options,
    parameters,
    strided_grads,
    train,
)
from tests.versions import golden_graphs

triton = pytest.importorskip("triton")

HALVES = (torch.bfloat16, torch.float16)
ADAMW = Case("AdamW")
MOMENTUM = Case("SGD", options(lr=0.1, momentum=0.9))


@pytest.fixture(scope="module")
def compilers(tmp_path_factory: pytest.TempPathFactory) -> Compilers:
    return Compilers(str(tmp_path_factory.mktemp("kernels")))


def assert_targets_agree(case: Case, compilers: Compilers) -> None:
    ours = train(case, compilers.backend("triton"))
    theirs = train(case, compilers.backend("cpp"))
    assert len(ours) == len(theirs)
    for k, (x, y) in enumerate(zip(ours, theirs, strict=True)):
        assert x.dtype == y.dtype
        assert torch.equal(bits(x), bits(y)), f"tensor {k} of shape {tuple(x.shape)}"


# ---------------------------------------------------------------- in the interpreter


@pytest.mark.family(15)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gives_the_bits_of_cpp(case: Case, compilers: Compilers) -> None:
    assert_targets_agree(case, compilers)


@pytest.mark.family(3)
@pytest.mark.parametrize("case", [ADAMW, MOMENTUM, Case("Adadelta")], ids=str)
def test_takes_any_strides_and_alignment(case: Case, compilers: Compilers) -> None:
    assert_targets_agree(replace(case, grads=strided_grads), compilers)


def _mixed() -> list[torch.nn.Parameter]:
    shapes = ((), (3,), (129, 17), (64, 64), (0,))
    return parameters((torch.bfloat16, torch.float32), shapes)


@pytest.mark.family(3)
@pytest.mark.parametrize("case", [ADAMW, MOMENTUM, Case("Adagrad")], ids=str)
def test_runs_all_dtypes_in_one_launch(case: Case, compilers: Compilers) -> None:
    case = replace(case, make=_mixed)
    (kernel,) = kernels(case)
    assert len({v.slots[-1].dtype for v in kernel.variants}) == 2
    assert_targets_agree(case, compilers)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [*HALVES, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gives_the_bits_of_cpp_in_other_dtypes(
    case: Case, dtype: torch.dtype, compilers: Compilers
) -> None:
    assert_targets_agree(replace(case, make=lambda: parameters((dtype,))), compilers)


def test_counts_steps_once_however_many_chunks(compilers: Compilers) -> None:
    case = Case("AdamW", make=lambda: parameters(shapes=((130, 65), (3,), (0, 2))))
    left = train(replace(case, steps=4), compilers.backend("triton"))
    steps = [float(x) for x in left if x.dim() == 0]
    assert steps == [4.0, 4.0, 4.0]


# ---------------------------------------------------------------- bodies by hand


def lane(dtype: str, count: int = 1) -> tuple[Slot, ...]:
    return (Slot(dtype, "lane", True, True),) * count


def elementwise(
    instrs: Sequence[Instr],
    stores: Sequence[tuple[int, int]],
    slots: Sequence[Slot],
    shape: tuple[int, ...],
    scalars: Sequence[Any] = (),
) -> Kernel:
    """A kernel of one lane, all of whose arithmetic is element code."""
    outer = [i for i, x in enumerate(instrs) if x.op in ("const", "scalar", "tail")]
    variant = Variant(
        tuple(instrs),
        tuple(outer),
        tuple(i for i in range(len(instrs)) if i not in outer),
        tuple(stores),
        tuple(slots),
        tuple((k,) for k in range(len(slots))),
        tuple((s,) for s in scalars),
        (shape,),
    )
    return Kernel("by_hand", (variant,))


class Bound:
    """A kernel bound to tensors, in the interpreter."""

    def __init__(self, kernel: Kernel, folder: Path, *tensors: torch.Tensor) -> None:
        self.pool = array("Q", [t.data_ptr() for t in tensors])
        layouts = {
            k: TensorLayout(tuple(t.shape), t.stride()) for k, t in enumerate(tensors)
        }
        position = {k: k for k in range(len(tensors))}
        make = triton_factory(
            TritonTarget().render(kernel), str(folder), "cpu", interpret=True
        )
        table = make(kernel, self.pool, position, layouts)
        assert isinstance(table, TritonTable)
        self.table = table


READ = Slot("f32", "element", True, False)
WRITE = Slot("f32", "element", False, True)

AWKWARD = [0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 0.5, 1.5, 1e-40, 3e38, -3e38, 7.25]
AWKWARD += [math.inf, -math.inf, math.nan, 1e-20, 88.0, -104.0, 3.0, 20.0]

EXACT = ("neg", "abs", "sqrt", "vsqrt", "floor", "ceil", "trunc", "round")
CLOSE = ("exp", "log", "tanh", "erf", "sin", "cos", "expm1", "log1p")


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("op", [*EXACT, *CLOSE])
def test_functions_of_one_number(op: str, dtype: str, tmp_path: Path) -> None:
    kind = torch.float32 if dtype == "f32" else torch.float64
    x = torch.tensor(AWKWARD, dtype=kind)
    y = torch.zeros_like(x)
    kernel = elementwise(
        [Instr("load", (), dtype, 0), Instr(op, (0,), dtype)],
        [(1, 1)],
        [Slot(dtype, "element", True, False), Slot(dtype, "element", False, True)],
        (len(x),),
    )
    bound = Bound(kernel, tmp_path, x, y)
    bound.table.fill_rows(())
    bound.table.launch()
    if op in ("sqrt", "vsqrt"):
        # torch's own may be an ulp off
        with np.errstate(invalid="ignore"):
            expected = torch.from_numpy(np.sqrt(x.numpy()))
    else:
        expected = getattr(torch, op)(x)
    if op in EXACT:
        assert torch.equal(bits(y), bits(expected))
    else:
        torch.testing.assert_close(y, expected, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "pow", "max", "min", "fma"])
def test_functions_of_pairs(op: str, tmp_path: Path) -> None:
    x, y = (
        t.contiguous().view(-1)
        for t in torch.meshgrid(
            torch.tensor(AWKWARD), torch.tensor(AWKWARD), indexing="ij"
        )
    )
    z = torch.zeros_like(x)
    args = (0, 1, 0) if op == "fma" else (0, 1)
    kernel = elementwise(
        [Instr("load", (), "f32", 0), Instr("load", (), "f32", 1), Instr(op, args)],
        [(2, 2)],
        [READ, READ, WRITE],
        (len(x),),
    )
    bound = Bound(kernel, tmp_path, x, y, z)
    bound.table.fill_rows(())
    bound.table.launch()
    if op == "fma":
        # exact in double but for a sum, whose second rounding changes none of these
        expected = (x.double() * y.double() + x.double()).float()
    else:
        names = {"max": "maximum", "min": "minimum"}
        expected = getattr(torch, names.get(op, op))(x, y)
    if op == "pow":
        # torch's vectorized pow is up to an ulp off libm's
        torch.testing.assert_close(z, expected, rtol=2e-7, atol=0, equal_nan=True)
    elif op in ("max", "min"):
        assert torch.equal(
            bits(z + 0.0), bits(expected + 0.0)
        )  # 0.0 and -0.0 are equal
    else:
        assert torch.equal(bits(z), bits(expected))


def test_fma_is_rounded_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    n = 4000
    x, y = torch.randn(n), torch.randn(n)
    # close to minus the product, so that all that is left is what rounding would drop
    z = -(x * y)
    z[::3] = torch.randn(len(z[::3])) * 2.0 ** torch.randint(-60, 60, (len(z[::3]),))
    out = torch.zeros(n)
    loads = [Instr("load", (), "f32", k) for k in range(3)]
    kernel = elementwise(
        [*loads, Instr("fma", (0, 1, 2))], [(3, 3)], [READ, READ, READ, WRITE], (n,)
    )
    bound = Bound(kernel, tmp_path, x, y, z, out)
    bound.table.fill_rows(())
    bound.table.launch()
    from fractions import Fraction

    for a, b, c, got in zip(*(t.tolist() for t in (x, y, z, out)), strict=True):
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        near = torch.tensor(got)
        ulp = float(torch.nextafter(near.abs(), torch.tensor(math.inf)) - near.abs())
        assert abs(Fraction(got) - exact) <= Fraction(ulp) / 2


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_casts_round_to_nearest_even(dtype: str, tmp_path: Path) -> None:
    kind = {"bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    torch.manual_seed(0)
    exact = torch.randn(512).to(kind).float()
    # a value, the middle between it and the next, and a bit to each side
    up = exact.to(kind).view(torch.int16).add(1).view(kind).float()
    middle = (exact + up) / 2
    around = [torch.nextafter(middle, torch.tensor(s * math.inf)) for s in (1, -1)]
    x = torch.cat([exact, middle, *around, torch.tensor(AWKWARD)])
    y = torch.zeros(len(x), dtype=kind)
    kernel = elementwise(
        [Instr("load", (), "f32", 0), Instr("cast", (0,), dtype)],
        [(1, 1)],
        [READ, Slot(dtype, "element", False, True)],
        (len(x),),
    )
    bound = Bound(kernel, tmp_path, x, y)
    bound.table.fill_rows(())
    bound.table.launch()
    assert torch.equal(bits(y), bits(x.to(kind)))


def test_integers_masks_and_choices(tmp_path: Path) -> None:
    x = torch.arange(-8, 9, dtype=torch.int32)
    mask = torch.zeros(17, dtype=torch.bool)
    y = torch.zeros(17, dtype=torch.int64)
    instrs = [
        Instr("load", (), "i32", 0),
        Instr("const", (), "i32", 3),
        Instr("lt", (0, 1), "b8"),
        Instr("not", (2,), "b8"),
        Instr("mul", (0, 1), "i32"),
        Instr("neg", (4,), "i32"),
        Instr("where", (3, 5, 0), "i32"),
        Instr("cast", (6,), "i64"),
    ]
    slots = [
        Slot("i32", "element", True, False),
        Slot("b8", "element", False, True),
        Slot("i64", "element", False, True),
    ]
    bound = Bound(
        elementwise(instrs, [(3, 1), (7, 2)], slots, (17,)), tmp_path, x, mask, y
    )
    bound.table.fill_rows(())
    bound.table.launch()
    assert torch.equal(mask, x >= 3)
    assert torch.equal(y, torch.where(x >= 3, -3 * x, x).long())


def _scaled(shape: tuple[int, ...], dtype: str = "f32") -> Kernel:
    """y = x * scalar, the scalar a symbol of the step."""
    return elementwise(
        [
            Instr("load", (), dtype, 0),
            Instr("scalar", (), dtype, 0),
            Instr("mul", (0, 1), dtype),
        ],
        [(2, 1)],
        [Slot(dtype, "element", True, False), Slot(dtype, "element", False, True)],
        shape,
        [Symbol(0)],
    )


def test_scalars_and_addresses_may_change_between_launches(tmp_path: Path) -> None:
    x, y = torch.arange(40.0), torch.zeros(40)
    bound = Bound(_scaled((40,)), tmp_path, x, y)
    assert bound.table.symbolic
    for scale in (2.0, 3.0):
        bound.table.fill_rows([scale])
        bound.table.launch()
        assert torch.equal(y, x * scale)
    # the same tensors at places that no 16-byte access may use
    moved, target = torch.rand(41)[1:], torch.zeros(41)[1:]
    bound.pool[:] = array("Q", [moved.data_ptr(), target.data_ptr()])
    bound.table.launch()
    assert torch.equal(target, moved * 3.0)


def test_offsets_have_64_bits(tmp_path: Path) -> None:
    """A tensor of more than 2**31 elements, in files that are nearly all holes."""
    n = 2**31 + 5000
    x, y = (
        torch.from_file(str(tmp_path / name), shared=True, size=n, dtype=torch.int8)
        for name in ("x", "y")
    )
    x[-6000:] = torch.arange(6000) % 50
    slots = [Slot("i8", "element", True, False), Slot("i8", "element", False, True)]
    instrs = [Instr("load", (), "i8", 0), Instr("add", (0, 0), "i8")]
    bound = Bound(elementwise(instrs, [(1, 1)], slots, (n,)), tmp_path, x, y)
    table = bound.table
    block = table.module.sizes["BLOCK"]
    assert table.programs == -(-n // (block * table.span))
    # of a million chunks the last ones
    chunks, *others = table.constants
    table.constants = (torch.cat((chunks[:1], chunks[-2:])), *others)
    table.programs = 2
    table.fill_rows(())
    table.launch()
    assert torch.equal(y[-5000:], x[-5000:] * 2)


def test_pow_of_lane_code(tmp_path: Path) -> None:
    """0.999 ** step, at the precision of the C library."""
    step, out = torch.tensor(5.0), torch.tensor(0.0)
    variant = Variant(
        (
            Instr("load", (), "f32", 0),
            Instr("scalar", (), "f32", 0),
            Instr("pow", (1, 0)),
        ),
        (0, 1, 2),
        (),
        ((2, 1),),
        lane("f32", 2),
        ((0,), (1,)),
        ((Literal(0.999),),),
        ((),),
    )
    bound = Bound(Kernel("power", (variant,)), tmp_path, step, out)
    bound.table.fill_rows(())
    bases_and_powers = [(0.999, 5), (0.9, 1), (0.95, 1000), (0.999, 100000), (0.0, 3)]
    for base, power in [*bases_and_powers, (-2.0, 3), (-2.0, 0.5), (7.0, 0)]:
        step.fill_(power)
        bound.table.rows[0] = base
        bound.table.launch()
        single = float(torch.tensor(base, dtype=torch.float32))
        try:
            exact = single**power
        except ZeroDivisionError:  # pragma: no cover - none of these
            exact = math.inf
        if isinstance(exact, complex):
            assert math.isnan(float(out))
            continue
        near = torch.tensor(exact, dtype=torch.float32)
        one_up = torch.nextafter(near.abs(), torch.tensor(math.inf)) - near.abs()
        assert abs(float(out) - exact) <= float(one_up)


# ---------------------------------------------------------------- the text


def _text(case: Case, calls: int = 2) -> str:
    (kernel,) = kernels(case, calls)
    return TritonTarget().render(kernel).text


def _many(n: int) -> list[torch.nn.Parameter]:
    return parameters(shapes=((5, 3), (7,), ()) * (n // 3) + ((2,),) * (n % 3))


@pytest.mark.slow
def test_text_knows_neither_lanes_nor_shapes_nor_hyperparameters() -> None:
    few = replace(ADAMW, make=lambda: _many(3))
    text = _text(few)
    other = options(lr=0.5, betas=(0.6, 0.7), eps=0.1, weight_decay=0.3)
    assert _text(replace(few, options=other)) == text
    assert _text(replace(ADAMW, make=lambda: _many(40))) == text
    # no word about whether some lanes have no dimension
    flat = parameters(shapes=((4,), (9, 2)))
    assert _text(replace(ADAMW, make=lambda: flat)) == text


@pytest.mark.slow
def test_text_of_3_and_of_1000_lanes_is_the_same() -> None:
    texts = [_text(replace(ADAMW, make=lambda n=n: _many(n))) for n in (3, 1000)]
    assert texts[0] == texts[1]


@golden_graphs
@pytest.mark.parametrize("case", [ADAMW, MOMENTUM], ids=str)
def test_golden_text(case: Case, golden: Any) -> None:
    golden(f"{case.name.lower()}.triton.txt", _text(replace(case, make=_mixed)))


def test_text_imports_triton_alone() -> None:
    text = _text(ADAMW)
    imports = re.findall(r"^(?:import|from) (\S+)", text, re.M)
    assert {name.split(".")[0] for name in imports} == {"triton"}
    assert "libdevice" not in _text(MOMENTUM)


# ---------------------------------------------------------------- modules and errors


def test_loads_a_text_once_and_from_disk(tmp_path: Path) -> None:
    source = TritonTarget().render(_scaled((3,)))
    first = TritonBuilder()
    module = first.load(source, str(tmp_path), interpret=True)
    assert first.load(source, str(tmp_path), interpret=True) is module
    assert (first.builds, first.disk_hits, first.memory_hits) == (1, 0, 1)
    again = TritonBuilder()
    again.load(source, str(tmp_path), interpret=True)
    assert (again.builds, again.disk_hits) == (0, 1)
    module.path.write_text("damaged")
    third = TritonBuilder()
    third.load(source, str(tmp_path), interpret=True)
    assert third.builds == 1
    assert module.path.read_text() == source.text


def test_a_folder_that_cannot_be_written_is_replaced(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    builder = TritonBuilder()
    module = builder.load(TritonTarget().render(_scaled((3,))), str(blocked), True)
    assert module.path.exists()
    assert tmp_path not in module.path.parents


def test_refuses_cpu_tensors_without_the_interpreter(tmp_path: Path) -> None:
    kernel = _scaled((3,))
    with pytest.raises(ConfigError, match="TRITON_INTERPRET=1"):
        triton_factory(TritonTarget().render(kernel), str(tmp_path), interpret=False)


def test_refused_text_is_named(tmp_path: Path) -> None:
    source = replace(TritonTarget().render(_scaled((3,))), text="import nothing_such\n")
    with pytest.raises(BuildError, match="nothing_such"):
        TritonBuilder().load(source, str(tmp_path), interpret=True)


def test_a_failed_launch_names_kernel_and_file(tmp_path: Path) -> None:
    x = torch.zeros(3)
    bound = Bound(_scaled((3,)), tmp_path, x, x)
    bound.table.constants = bound.table.constants[:1]
    bound.table.fill_rows([1.0])
    with pytest.raises(LaunchError, match=r"by_hand failed.*fuseopt_\w+\.py"):
        bound.table.launch()


def test_interpreter_is_left_as_it_was(tmp_path: Path) -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    before = InterpreterBuilder.create_fma, InterpreterBuilder.cast_impl
    x, y = torch.ones(3), torch.ones(3)
    bound = Bound(_scaled((3,)), tmp_path, x, y)
    bound.table.fill_rows([2.0])
    bound.table.launch()
    assert (InterpreterBuilder.create_fma, InterpreterBuilder.cast_impl) == before


# ---------------------------------------------------------------- offline


def test_unknown_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="unknown GPU 'tpu'"):
        compile_offline(TritonTarget().render(_scaled((3,))), "tpu", str(tmp_path))


def test_cpp_and_triton_share_a_layout() -> None:
    kernel = _scaled((3,))
    assert CppTarget().render(kernel).layout == TritonTarget().render(kernel).layout

"""16-bit floats in C++: each conversion and rounding, over all numbers there are.

What is rounded to 16 bits is asked for every number of the type, the ties between two
of them, and the float32 next to each; loops of pairs for odd lengths, and with the
instructions of several processors.
"""

from __future__ import annotations

import ctypes
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fuseopt.codegen.cpp.headers import header
from fuseopt.codegen.cpp.kernel import CppTarget
from fuseopt.codegen.cpp.rounding import known
from fuseopt.ir.graph import Instr, Kernel, Slot, Variant
from fuseopt.runtime.cpp import toolchain

torch = pytest.importorskip("torch")

from tests.steps import compiled, eager_step, make, same_bits  # noqa: E402

BF16, F16 = torch.bfloat16, torch.float16
#: The processor at hand, one without vectors of 512 bits, one with the least there is.
MACHINES = ("native", "haswell", "x86-64")
DRIVER = r"""
#define EACH(name, to, from, expression) \
  extern "C" void name(int64_t n, const from* __restrict__ x, to* __restrict__ y) { \
    for (int64_t i = 0; i < n; ++i) y[i] = expression; \
  }
EACH(calm_bf16s, float, float, calm_bf16(x[i]))
EACH(round_bf16s, float, float, round_bf16(x[i]))
EACH(round_f16s, float, float, round_f16(x[i]))
EACH(vector_f16s, float, float, vector_f16(x[i]))
EACH(first_bf16s, float, uint32_t, first_bf16(x[i]))
EACH(second_bf16s, float, uint32_t, second_bf16(x[i]))
EACH(first_f16s, float, uint32_t, first_f16(x[i]))
EACH(second_f16s, float, uint32_t, second_f16(x[i]))
EACH(pair_bf16s, uint32_t, float, pair_bf16(x[2 * i], x[2 * i + 1]))
EACH(pair_f16s, uint32_t, float, pair_f16(x[2 * i], x[2 * i + 1]))
"""


def flags(machine: str) -> tuple[str, ...]:
    """The flags of a build, for a machine."""
    return tuple(
        f"-march={machine}" if x.startswith("-march") else x
        for x in toolchain.COMMON_FLAGS
    )


def runs(machine: str) -> bool:
    """Has the processor at hand what a machine's code may use?"""
    return machine != "haswell" or {"avx2", "fma", "f16c", "bmi2"} <= set(
        toolchain.processor().split()
    )


@pytest.fixture(scope="module", params=MACHINES)
def pieces(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ctypes.CDLL:
    if not runs(request.param):
        pytest.skip(f"this processor is no {request.param}")
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "pieces.cpp").write_text(
        f"#include <math.h>\n#include <stdint.h>\n{header('halves')}{DRIVER}"
    )
    made = str(folder / "pieces.so")
    asked = [*flags(request.param), *toolchain.EXACT_FLAGS, "-o", made]
    compiler = toolchain.find_compiler()
    subprocess.run([compiler.path, *asked, str(folder / "pieces.cpp")], check=True)
    return ctypes.CDLL(made)


def through(function: Any, x: Any, n: int, dtype: Any) -> Any:
    """What a function of DRIVER makes of a tensor's memory."""
    result = torch.empty(n, dtype=dtype)
    function(
        ctypes.c_int64(n),
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_void_p(result.data_ptr()),
    )
    return result


def every(dtype: Any) -> Any:
    """All numbers of a 16-bit type."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


def near(dtype: Any) -> Any:
    """All float32 numbers of a 16-bit type, what lies halfway, the two next to each,
    and random ones.
    """
    digits = 16 if dtype is BF16 else 13
    own = every(dtype).float().view(torch.int32)
    ties = [own + k * (1 << digits - 1) for k in (-1, 0, 1)]
    # between subnormal numbers of float16 the ties are elsewhere
    grid = torch.arange(-4096, 4096).float() * 2.0**-25
    limits = torch.tensor([65504.0, 65519.996, 65520.0, 65536.0, 3.4e38, math.inf])
    others = torch.cat([grid, limits, -limits]).view(torch.int32)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(
        -(2**31), 2**31, (100_000,), generator=generator, dtype=torch.int64
    )
    middle = torch.cat([*ties, others, drawn.to(torch.int32)])
    bits = torch.cat([middle + k for k in (-1, 0, 1)])
    return bits.view(torch.float32)


@pytest.mark.parametrize(
    "name", ["round_bf16s", "calm_bf16s", "round_f16s", "vector_f16s"]
)
def test_rounding_is_torchs(pieces: ctypes.CDLL, name: str) -> None:
    dtype = BF16 if "bf16" in name else F16
    x = near(dtype)
    if name == "calm_bf16s":  # is given no other NaN
        bits = x.view(torch.int32)
        x = torch.where(x.isnan(), bits & ~0xFFFF | 0x400000, bits).view(torch.float32)
    got = through(pieces[name], x, len(x), torch.float32)
    assert same_bits(got, x.to(dtype).float())


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_pairs_hold_every_number(pieces: ctypes.CDLL, dtype: Any) -> None:
    name = "bf16" if dtype is BF16 else "f16"
    x = every(dtype)
    first = through(pieces[f"first_{name}s"], x, 2**15, torch.float32)
    second = through(pieces[f"second_{name}s"], x, 2**15, torch.float32)
    wide = torch.stack([first, second], 1).flatten()
    assert same_bits(wide, x.float())
    back = through(pieces[f"pair_{name}s"], wide, 2**15, torch.int32)
    assert same_bits(back.view(dtype), x)
    same = ~x.isnan()
    assert torch.equal(back.view(torch.int16)[same], x.view(torch.int16)[same])


SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e-39, 6e-8, 3e38, 65504.0)


def of_every_kind(dtype: Any, n: int, seed: int) -> Any:
    """Numbers of all sizes, and the limits."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, (n,), generator=generator)
    x = bits.to(torch.int16).view(dtype)
    half = torch.randn(n, generator=generator).to(dtype)
    x = torch.where(torch.rand(n, generator=generator) < 0.7, half, x)
    x[: len(SPECIAL)] = torch.tensor(SPECIAL).to(dtype)[:n]
    return x[torch.randperm(n, generator=generator)]


STEPS = [
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    ("AdamW", {"lr": 0.01}),
]


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES[:2])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_steps_of_numbers_of_every_kind(
    dtype: Any, machine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """NaN, infinities, subnormals in parameters, gradients and state; odd lengths."""
    if not runs(machine):
        pytest.skip(f"this processor is no {machine}")
    monkeypatch.setattr(toolchain, "COMMON_FLAGS", flags(machine))
    sizes = (1, 2, 63, 1001, 33001)
    for name, options in STEPS:
        torch._dynamo.reset()
        params = [
            torch.nn.Parameter(of_every_kind(dtype, n, k)) for k, n in enumerate(sizes)
        ]
        others = [torch.nn.Parameter(p.detach().clone()) for p in params]
        mine, eager = make(name, params, **options), make(name, others, True, **options)
        step = compiled(mine, cache_dir=str(tmp_path))
        for round_ in range(2):
            for k, (p, q) in enumerate(zip(params, others, strict=True)):
                grad = of_every_kind(dtype, p.numel(), 100 * round_ + k + 50)
                p.grad, q.grad = grad.clone(), grad.clone()
            step()
            eager_step(eager)
            for p, q in zip(params, others, strict=True):
                assert same_bits(p, q), (name, round_, p.shape)
                for key, value in eager.state[q].items():
                    assert same_bits(mine.state[p][key], value), (name, key, p.shape)


# ---------------------------------------------------------------- what is known


def variant_of(
    *instrs: Instr, lanes: tuple[int, ...] = (), store: str = "bf16"
) -> Variant:
    """Element code whose last instruction is stored."""
    loads = [i for i in instrs if i.op == "load"]
    slots = [Slot(i.dtype, "element", True, False) for i in loads]
    slots.append(Slot("bf16", "element", False, True))
    code = tuple(range(len(instrs)))
    columns = tuple((k,) for k in range(len(slots)))
    return Variant(
        instrs,
        (),
        code,
        ((len(instrs) - 1, len(loads)),),
        tuple(slots),
        columns,
        (),
        ((40,),),
    )


LOAD = Instr("load", (), "bf16", 0)


@pytest.mark.parametrize("op", ["neg", "abs", "floor", "cast"])
def test_what_needs_no_more_digits_is_not_rounded(op: str) -> None:
    made = known(variant_of(LOAD, Instr(op, (0,)), Instr("cast", (1,), "bf16")))
    assert (made.fits[1], made.calm[1]) == ({"bf16"}, True)


def test_a_sum_is_rounded_and_a_number_of_float32_may_hold_any_nan() -> None:
    total = Instr("add", (0, 0))
    made = known(variant_of(LOAD, total, Instr("cast", (1,), "bf16")))
    assert (made.fits[1], made.calm[1]) == (set(), True)
    wide = Instr("load", (), "f32", 0)
    made = known(variant_of(wide, total, Instr("cast", (1,), "bf16")))
    assert made.calm == (False, False, True)
    assert made.fits[2] == {"bf16"}


def test_the_type_that_holds_a_constant() -> None:
    held = {
        x: known(variant_of(Instr("const", (), "f32", x))).fits[0]
        for x in (1.0, 257.0, 2.0**-24, 2.0**-25, 65504.0, 1e300, math.inf, 0.1)
    }
    assert held == {
        1.0: {"bf16", "f16"},
        257.0: {"f16"},
        2.0**-24: {"bf16", "f16"},
        2.0**-25: {"bf16"},
        65504.0: {"f16"},
        1e300: set(),
        math.inf: {"bf16", "f16"},
        0.1: set(),
    }


def roundings(*instrs: Instr) -> int:
    text = CppTarget().render(Kernel("k", (variant_of(*instrs),))).text
    code = text[text.index("static void row0") :]
    element = code[code.index("each0 = ") : code.index("};")]
    return element.count("calm_bf16(") + element.count("round_bf16(")


@pytest.mark.parametrize(
    ("op", "count"), [("neg", 0), ("abs", 0), ("sqrt", 1), ("add", 1), ("max", 0)]
)
def test_roundings_that_element_code_has(op: str, count: int) -> None:
    args = (0, 0) if op in ("add", "max") else (0,)
    assert roundings(LOAD, Instr(op, args), Instr("cast", (1,), "bf16")) == count


def test_all_sums_of_some_numbers_and_every_number() -> None:
    """x + y rounded, for all x and some y: what `calm` says of NaN and overflow."""
    ys = torch.tensor([*SPECIAL, 1.0, -1.0, 1e-3]).to(BF16)
    xs = [every(BF16) for _ in ys]
    others = [torch.full_like(x, float(y)) for x, y in zip(xs, ys, strict=True)]
    wants = [x + y for x, y in zip(xs, others, strict=True)]

    def step() -> None:
        torch._foreach_add_(xs, others)

    torch.compile(step, backend="fuseopt", options={"fallback": "error"})()
    for got, want in zip(xs, wants, strict=True):
        assert same_bits(got, want)

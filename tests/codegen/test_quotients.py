"""Quotients by a number that elements share, made by multiplying: their bits."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import fuseopt
from fuseopt.codegen.cpp import quotients
from fuseopt.codegen.cpp.distribute import phases
from fuseopt.codegen.cpp.headers import header
from fuseopt.codegen.cpp.quotients import divisions
from fuseopt.codegen.cpp.variant import Function
from fuseopt.ir.graph import Literal, Variant
from fuseopt.runtime.cpp.toolchain import COMMON_FLAGS, EXACT_FLAGS
from tests.codegen.test_golden import VariantBuilder
from tests.steps import eager_step, same_bits

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("g++") is None,
    reason="flags and reports of GCC on x86-64",
)
LOOPS = """
#include <fenv.h>
extern "C" int fits(float y) { return Divisor(y, true).fits; }
extern "C" int divide(float y, const float* __restrict__ x, float* __restrict__ to,
                      int64_t n) {
  const Divisor by(y, true);
  uint32_t top = 0, low = 0;
  #pragma GCC ivdep
  for (int64_t j = 0; j < n; ++j) {
    to[j] = by.divide(x[j]);
    const uint32_t u = size_bits(x[j]), v = 0u - u;
    top = u > top ? u : top;
    low = v > low ? v : low;
  }
  return by.fits && by.has(top, low);
}
extern "C" int64_t wrong(float y, float first, int64_t n, int corrected) {
  // of n neighbours from `first` on; none are out of the range
  int64_t found = 0;
  const Divisor by(y, true);
  for (int64_t j = 0; j < n; ++j) {
    union { float f; uint32_t i; } u = {first};
    u.i += (uint32_t)j;
    found += (corrected ? by.divide(u.f) : u.f * by.inverse) != u.f / y;
  }
  return found;
}
extern "C" int nearest(int mode) {
  fesetround(mode);
  const int result = rounds_to_nearest();
  fesetround(FE_TONEAREST);
  return result;
}
extern "C" int modes(int k) {
  const int all[] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
  return all[k];
}
"""
FLAGS = [
    "-march=x86-64-v3" if x == "-march=native" else x
    for x in (*COMMON_FLAGS, *EXACT_FLAGS)
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("quotients")
    text = "#include <math.h>\n#include <stdint.h>\n" + header("quotients") + LOOPS
    (folder / "loops.cpp").write_text(text)
    command = ["g++", *FLAGS, "loops.cpp", "-lm", "-o", "loops.so"]
    subprocess.run(command, cwd=folder, check=True, timeout=120)
    loaded = ctypes.CDLL(str(folder / "loops.so"))
    real, places, n = ctypes.c_float, ctypes.c_void_p, ctypes.c_int64
    loaded.fits.argtypes = [real]
    loaded.divide.argtypes = [real, places, places, n]
    loaded.wrong.argtypes = [real, real, n, ctypes.c_int]
    loaded.wrong.restype = n
    return loaded


def divided(library: ctypes.CDLL, x: torch.Tensor, y: float) -> torch.Tensor | None:
    """x / y by products; None where these numbers are out of the range."""
    to = torch.empty_like(x)
    inside = library.divide(y, x.data_ptr(), to.data_ptr(), x.numel())
    return to if inside else None


def bits(x: torch.Tensor) -> list[int]:
    return x.view(torch.int32).tolist()


EDGE = torch.finfo(torch.float32)
#: One below 1 and 2, which hard cases have as a factor; the ends of the range.
DIVISORS = [
    *(1.0, 3.0, 0.1, 1e-7, 7.25e-5, 1e9, 2.0**-70, 2.0**70),
    *(1 - 2.0**-24, 2 - 2.0**-23, 1 + 2.0**-23, 1.5 - 2.0**-23),
]


@pytest.mark.parametrize("y", DIVISORS)
def test_quotients_have_the_bits_of_a_division(y: float, library: ctypes.CDLL) -> None:
    """Of random bits, and of the ends of the range; each alone is in the range or is
    refused.
    """
    draws = torch.Generator().manual_seed(1)
    drawn = torch.randint(-(2**31), 2**31, (100_000,), generator=draws)
    x = drawn.to(torch.int32).view(torch.float32)
    by = torch.tensor(y)
    size = x.abs()
    low, high = max(EDGE.tiny, 2.0**-123 * y), min(2.0**78, 2.0**125 * y)
    inside = (size >= low) & (size <= high)
    taken = torch.cat([x[inside], torch.tensor([0.0, -0.0])])
    assert taken.numel() > 30_000
    found = divided(library, taken, y)
    assert found is not None
    assert bits(found) == bits(taken / by)
    for one in x[~inside][:2000].split(1):
        near = divided(library, one, y)
        assert near is None or bits(near) == bits(one / by)


@pytest.mark.parametrize("y", [3.0, 0.1, 1 - 2.0**-24, 2 - 2.0**-23, 1.0001])
def test_all_significands(y: float, library: ctypes.CDLL) -> None:
    assert library.wrong(y, 1.0, 2**23, 1) == 0
    least = 2.0**-126 if y < 1 else 2.0**-122
    assert library.wrong(y, least, 2**23, 1) == 0, "the remainder is scaled"


def test_products_alone_are_other_numbers(library: ctypes.CDLL) -> None:
    """Else the tests above could not fail."""
    assert library.wrong(3.0, 1.0, 2**23, 0) > 1000


def test_numbers_near_the_ends_are_refused(library: ctypes.CDLL) -> None:
    tiny = EDGE.tiny / 2
    for x in (float("inf"), -float("inf"), float("nan"), EDGE.max, tiny, -1e-45):
        assert divided(library, torch.tensor([1.0, x]), 0.5) is None, x
    # a quotient that is not normal
    assert divided(library, torch.tensor([1e-30]), 1e15) is None
    for y in (0.0, -0.0, -1.0, 1e-30, 1e30, float("inf"), float("nan")):
        assert not library.fits(y), y
    zeros = torch.tensor([0.0, -0.0, 1.0])
    found = divided(library, zeros, 0.5)
    assert found is not None
    assert bits(found) == bits(zeros / 0.5)


def test_a_thread_that_rounds_otherwise_divides(library: ctypes.CDLL) -> None:
    assert library.nearest(library.modes(0))
    for k in (1, 2, 3):
        assert not library.nearest(library.modes(k))


def test_the_loop_is_of_vectors_and_does_not_divide(tmp_path: Path) -> None:
    text = "#include <math.h>\n#include <stdint.h>\n" + header("quotients") + LOOPS
    (tmp_path / "loops.cpp").write_text(text)
    command = ["g++", *FLAGS, "-S", "loops.cpp", "-o", "loops.s"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    code = (tmp_path / "loops.s").read_text()
    code = code.split("\ndivide:")[1].split(".cfi_endproc")[0]
    assert "vdivps" not in code
    assert code.count("vdivss") == 1, "the inverse"
    assert "vpmaxud" in code
    assert "%ymm" in code


# ---------------------------------------------------------------- which, and where


def second_moment(in_place: bool = True) -> Variant:
    """p or u = g / sqrt(v / mean) of a lane's mean, with p = p + that in place."""
    b = VariantBuilder()
    v = b.load(b.slot("f32", write=False))
    g = b.load(b.slot("f32", write=False))
    mean = b.load(b.slot("f32", "lane", write=False))
    update = b.emit("div", g, b.emit("sqrt", b.emit("div", v, mean)))
    if in_place:
        slot = b.slot("f32")
        b.store(b.emit("add", b.load(slot), update), slot)
    else:
        b.store(update, b.slot("f32", read=False))
    return b.variant(1, (4, 5), Literal(0.9))


def test_a_shared_divisor_is_chosen_where_the_divider_is_the_limit() -> None:
    v = second_moment()
    assert [v.instrs[x].args[1] in v.lane_code for x in divisions(v)] == [True]
    for sums, found in ((0, 1), (24, 0)):
        b = VariantBuilder()
        slot = b.slot("f32")
        x = b.load(slot)
        for _ in range(sums):
            x = b.emit("add", x, x)
        b.store(b.emit("div", x, b.scalar()), slot)
        assert len(divisions(b.variant(1, (4, 5), Literal(0.9)))) == found


def test_memory_that_is_read_is_written_when_the_range_is_known() -> None:
    v = second_moment()
    (divided,) = divisions(v)
    plan = phases(v, frozenset(), (divided,))
    assert plan.divided == ((divided,), ())
    assert [len(x) for x in plan.stores] == [0, 1]
    whole = second_moment(in_place=False)
    plan = phases(whole, frozenset(), divisions(whole))
    assert [len(x) for x in plan.stores] == [1]


@pytest.mark.parametrize("in_place", [True, False])
def test_the_text_divides_again_where_numbers_are_out_of_the_range(
    in_place: bool,
) -> None:
    text = "\n".join(Function(0, second_moment(in_place)).element())
    assert text.count(".divide(x") == 1
    first, again = text.index("if (done0)"), text.index("if (!done0)")
    assert first < text.index(".divide(x") < again < text.index(" / x", again)


# ---------------------------------------------------------------- whole steps

#: What gradients and state hold: powers of ten, the ends of the range, and beyond.
NUMBERS = [
    *(0.0, -0.0, 1e-45, -1e-40, 1e-38, 1e-30, -1e-20, 1e-12, 1e-3, -1.0, 1e3, 1e12),
    *(1e19, -1e25, 1e38, EDGE.max, float("inf"), -float("inf"), float("nan")),
]


@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "NAdam", "RAdam"])
@pytest.mark.parametrize("few", [True, False], ids=["few", "all"])
def test_steps_have_eagers_bits_at_the_ends_of_the_range(
    name: str, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All divisions by shared numbers are products, also where that is no faster.

    A block has ordinary numbers, a block has a few of all, a block nothing else.
    """
    if name != "Adafactor":
        monkeypatch.setattr(quotients, "_INSTEAD", -100)
    optimizers = []
    for _ in range(2):
        sizes = (40, 32), (700,)
        params = [torch.nn.Parameter(torch.ones(size)) for size in sizes]
        optimizers.append(getattr(torch.optim, name)(params, lr=1e-3))
    step = fuseopt.compile(optimizers[1]).step
    for turn in range(5):
        draws = torch.Generator().manual_seed(turn)
        ends = torch.tensor(NUMBERS[:-3] if turn < 3 else NUMBERS)
        both = [o.param_groups[0]["params"] for o in optimizers]
        pairs = list(zip(*both, strict=True))
        for pair in pairs:
            p = pair[0]
            grad = torch.randn(p.shape, generator=draws) * 1e-2
            any_of = ends[torch.randint(len(ends), p.shape, generator=draws)]
            chosen = torch.rand(p.shape, generator=draws) < (0.01 if few else 0.7)
            grad = torch.where(chosen, any_of, grad)
            for x in pair:
                x.grad = grad.clone()
        eager_step(optimizers[0])
        step()
        for p, q in pairs:
            assert same_bits(q, p), (turn, p.shape)
    report = fuseopt.reports()[-1]
    assert not report.fallback
    assert any(".divide(" in x.source for x in report.kernels)

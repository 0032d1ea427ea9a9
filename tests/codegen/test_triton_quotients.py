"""Quotients by a lane's number, taken without a division: the bits of division."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fuseopt.codegen.triton.kernel import PRELUDE
from fuseopt.codegen.triton.quotients import HELPERS, NARROW, quotients
from fuseopt.ir.graph import Instr, Literal, Slot, Variant
from fuseopt.runtime.triton.interpreter import interpreting

triton = pytest.importorskip("triton")

KERNELS = """

@triton.jit
def divide(x, d, out, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    minus, near, under, rest = inverse(tl.load(d))
    tl.store(out + at, quotient(tl.load(x + at), minus, near, under, rest))


@triton.jit
def try_all(d, out):
    number = tl.load(d + tl.program_id(0))
    minus, near, under, rest = inverse(number)
    x = tl.arange(0, 128).to(tl.float32) * 0.0078125 + 1
    own = out + tl.program_id(0) * 256
    tl.store(own + tl.arange(0, 128), narrow(x, under, rest).to(tl.bfloat16))
    found = every(serves(number, under, rest))
    tl.store(own + 128, found.to(tl.int32).to(tl.bfloat16))
"""


@pytest.fixture(scope="module")
def helpers(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The helpers' text, for the interpreter."""
    path = tmp_path_factory.mktemp("helpers") / "helpers.py"
    path.write_text(f"{PRELUDE}\n\n{HELPERS}{KERNELS}")
    spec = importlib.util.spec_from_file_location("quotient_helpers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        spec.loader.exec_module(module)
    return module


def divided(helpers: ModuleType, x: Any, d: float) -> Any:
    import torch

    size = 1 << 14
    padded = np.ones(-(-len(x) // size) * size, np.float32)
    padded[: len(x)] = x
    numerator, out = torch.from_numpy(padded), torch.zeros(len(padded))
    with interpreting():
        helpers.divide[(len(padded) // size,)](
            numerator, torch.tensor([d], dtype=torch.float32), out, size
        )
    return out.numpy()[: len(x)]


def hard(mantissa: int) -> Any:
    """Numerators whose quotient lies next to the middle of two numbers, or to a number.

    By X 2**k = r (mod Y) for small r: X = r / 2**k, with the odd part of Y.
    """
    odd = mantissa
    while odd % 2 == 0:
        odd //= 2
    if odd < 3:
        return np.array([], np.float32)
    found = []
    for power in (23, 24, 25, 26):
        inverse = pow(pow(2, power, odd), -1, odd)
        for r in range(-6, 7):
            first = r * inverse % odd
            least = (2**23 - first) // odd + 1
            found += [first + n * odd for n in range(least, least + 8)]
    made = np.array([x for x in found if 2**23 <= x < 2**24], np.float64)
    return (made / 2**23).astype(np.float32)


def same(a: Any, b: Any) -> bool:
    return bool(
        np.array_equal(a.view(np.uint32)[~np.isnan(a)], b.view(np.uint32)[~np.isnan(b)])
        and np.array_equal(np.isnan(a), np.isnan(b))
    )


def divisors() -> list[float]:
    rng = np.random.default_rng(3)
    special = [1.0, 2.0**-20, 2.0**12, 3.0, 2 - 2**-23, 1 + 2**-23, 1.5, 1 - 2.0**-24]
    made = (rng.random(40) + 1) * 2.0 ** rng.integers(-39, 12, 40)
    signs = np.where(rng.random(40) < 0.3, -1, 1)
    return [*special, *map(float, (made * signs).astype(np.float32))]


def test_quotients_are_rounded_correctly(helpers: ModuleType) -> None:
    rng = np.random.default_rng(1)
    several = (1 + rng.random(4000)).astype(np.float32)
    scales = 2.0 ** rng.integers(-74, 64, 4000).astype(np.float64)
    spread = (several * scales).astype(np.float32)
    limits = np.array(
        [0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-75, 1.9999999 * 2.0**63], np.float32
    )
    for d in divisors():
        mantissa = int(abs(np.frexp(np.float32(d))[0]) * 2**24)
        x = np.concatenate((several, spread, -spread, limits, hard(mantissa)))
        with np.errstate(all="ignore"):
            expected = x / np.float32(d)
        assert same(divided(helpers, x, d), expected), d


@pytest.mark.slow
@pytest.mark.parametrize("mantissa", [2**24 - 1, 2**24 - 3, 2**23 + 1, 11863283])
def test_every_mantissa(mantissa: int, helpers: ModuleType) -> None:
    """All numerators of one power of two, where the theorem has the least room."""
    d = np.float32(mantissa / 2**23)
    x = (np.arange(2**23, 2**24, dtype=np.float64) / 2**23).astype(np.float32)
    assert same(divided(helpers, x, float(d)), x / d)


def test_one_multiplication_would_not_do(helpers: ModuleType) -> None:
    """What the tests above find where the last correction is left out."""
    d = np.float32(1.7)
    x = (1 + np.random.default_rng(1).random(4000)).astype(np.float32)
    assert not same(x * (np.float32(1) / d), x / d)


@pytest.mark.slow
def test_mantissas_of_bfloat16_are_tried(helpers: ModuleType) -> None:
    import torch

    rng = np.random.default_rng(2)
    d = torch.from_numpy((1 + rng.random(200)).astype(np.float32))
    # next to the middle of two numbers: (1 + 2**-8) is no bfloat16
    d[:8] = torch.tensor([1 + 2.0**-8 * k for k in range(8)])
    out = torch.zeros(len(d) * 256, dtype=torch.bfloat16)
    with interpreting():
        helpers.try_all[(len(d),)](d, out)
    got = out.view(len(d), 256)
    x = 1 + torch.arange(128) / 128
    wanted = torch.stack([(x / t).to(torch.bfloat16) for t in d])
    right = (got[:, :128] == wanted).all(1)
    assert torch.equal(got[:, 128] != 0, right)
    assert right.float().mean() > 0.95


def body(*extra: Instr, root: str = "sqrt") -> Variant:
    """sqrt(x) / d, then `extra`; lane numbers d (0), eps (1), e (2)."""
    instrs = (
        *(Instr("scalar", (), "f32", k) for k in range(3)),
        Instr("load", (), "f32", 0),
        Instr(root, (3,)),
        Instr("div", (4, 0)),
        *extra,
    )
    last = len(instrs) - 1
    return Variant(
        instrs,
        (0, 1, 2),
        tuple(range(3, len(instrs))),
        ((last, 0),),
        (Slot("f32", "element", True, True),),
        ((0,),),
        tuple((Literal(1.0),) for _ in range(3)),
        ((4,),),
    )


def test_which_quotients_are_taken() -> None:
    made = quotients(body(Instr("add", (5, 1)), Instr("div", (6, 2))))
    assert set(made.by_instr) == {5, 7}
    first, second = made.by_instr.values()
    # the sum is not below 0 only where the divisor is above 0
    assert (first.positive, second.positive) == (True, False)
    assert made.addends == [1]
    # small divisors of the second are many: nothing else depends on its range
    assert (first.low, first.high) == (-24, 12)
    assert second.low < -30
    for q in (first, second):
        assert q.high <= 12


@pytest.mark.parametrize(
    "variant",
    [
        body(root="neg"),  # a numerator may be as small as numbers are
        body(root="abs"),
        body(root="exp"),
    ],
    ids=["neg", "abs", "exp"],
)
def test_which_are_not(variant: Variant) -> None:
    assert not quotients(variant).by_instr


def test_a_difference_is_not_followed() -> None:
    made = quotients(body(Instr("sub", (5, 1)), Instr("div", (6, 2))))
    assert set(made.by_instr) == {5}


def test_the_range_of_a_chain_stays_where_all_is_exact() -> None:
    """However many quotients follow each other."""
    extra = [Instr("div", (5 + k, 2)) for k in range(6)]
    made = quotients(body(*extra))
    assert 1 < len(made.by_instr) < 7
    low, high = -75, 64
    for q in made.by_instr.values():
        assert low >= -100
        low, high = low - q.high, high - q.low
        assert low >= -120
        assert high <= 127
    assert NARROW - 30 >= -126


def test_lanes_out_of_range_are_divided(tmp_path: Path) -> None:
    """A divisor of 0, one that is small or no number: the same bits, another path."""
    from array import array

    import torch

    from fuseopt.codegen.triton.kernel import TritonTarget
    from fuseopt.ir.graph import Kernel
    from fuseopt.runtime.cpp.table import TensorLayout
    from fuseopt.runtime.triton.table import triton_factory

    n = 4096
    for d in (0.0, -0.0, 1e-30, -1e30, float("nan"), float("inf"), 0.37, -0.37):
        variant = body()
        variant = Variant(
            **{
                **vars(variant),
                "scalars": tuple((Literal(v),) for v in (d, 0.0, 1.0)),
                "shapes": ((n,),),
            }
        )
        kernel = Kernel("divided", (variant,))
        x = torch.rand(n, generator=torch.Generator().manual_seed(1))
        x[:3] = torch.tensor([0.0, float("inf"), -0.0])
        # (the vector library's own root is not always rounded correctly)
        expected = x.double().sqrt().float() / torch.tensor(d)
        make = triton_factory(
            TritonTarget().render(kernel), str(tmp_path), "cpu", interpret=True
        )
        layouts = {0: TensorLayout((n,), (1,))}
        table = make(kernel, array("Q", [x.data_ptr()]), {0: 0}, layouts)
        table.fill_rows(())
        table.launch()
        assert same(x.numpy(), expected.numpy()), d

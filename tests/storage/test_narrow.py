"""Formats of 8 bits: their numbers, in formulas of torch and as peers have them."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch

from fuseopt.errors import UnsupportedInput
from fuseopt.ir.blocks import SIZES
from fuseopt.ir.tables import DYNAMIC, TABLES
from fuseopt.storage.formats import format_named
from tests.storage.test_formats import any_bits, specials

MAPS = {
    part: torch.tensor(values) for part, values in enumerate(TABLES[DYNAMIC].values)
}
FLOATS = {"fp8-e4m3": torch.float8_e4m3fn, "fp8-e5m2": torch.float8_e5m2}


def peer(name: str) -> Any:
    """A module of a package that nobody has to install."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        pytest.skip(f"{name}: {error}")


def packed(name: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
    form = format_named(name)
    parts = form.empty(x, 0)
    form.pack(x, parts)
    return parts


def nearest(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The code of the nearest number in exact arithmetic, of two the upper one."""
    middles = (numbers[1:].double() + numbers[:-1].double()) / 2
    return torch.searchsorted(middles, x.double(), right=True)


def state(n: int, seed: int = 0, signed: bool = True) -> torch.Tensor:
    """Numbers as a state has them: of many sizes within a block."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator) ** 3 * 1e-3
    return x if signed else x * x


@pytest.mark.parametrize("part", [0, 1])
def test_the_maps_are_in_order_and_whole(part: int) -> None:
    numbers = MAPS[part]
    assert len(numbers) == 256
    assert (numbers[1:] > numbers[:-1]).all()
    assert numbers[-1] == 1
    assert (numbers == 0).any()
    assert (numbers.min() < 0) == bool(part)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest(size: int, signed: bool) -> None:
    x = state(10_000, size, signed)
    kind = "8bit-signed" if signed else "8bit-unsigned"
    parts = packed(f"{kind}/{size}", x)
    blocks = [x[k : k + size] for k in range(0, len(x), size)]
    scales = torch.stack([b.abs().max().clamp(min=1e-12) for b in blocks])
    assert torch.equal(parts["scale"], scales)
    scaled = torch.cat([b / s for b, s in zip(blocks, scales, strict=True)])
    numbers, codes = MAPS[int(signed)], parts[""].long()
    want = nearest(scaled, numbers)
    # float32 rounds the middles, so that a code may differ where a number lies there
    middles = (numbers[1:].double() + numbers[:-1].double()) / 2
    near = (scaled.double()[:, None] - middles).abs().amin(1) < 1e-7 * scaled.abs()
    assert torch.equal(codes[~near], want[~near])
    assert near.float().mean() < 1e-3
    back = format_named(f"{kind}/{size}").unpack(parts)
    repeated = scales.repeat_interleave(size)[: len(x)]
    assert torch.equal(back, numbers[codes] * repeated)


def test_a_block_takes_the_map_that_fits_it() -> None:
    x = torch.cat([state(256), state(256, 1, signed=False), state(100)])
    parts = packed("8bit", x)
    assert parts["scale"].sign().tolist() == [-1, 1, -1]
    signed, unsigned = packed("8bit-signed", x), packed("8bit-unsigned", x)
    for k, other in ((0, signed), (1, unsigned), (2, signed)):
        here = slice(256 * k, 256 * k + 256)
        assert torch.equal(parts[""][here], other[""][here])
        assert parts["scale"][k].abs() == other["scale"][k]
    half = format_named("8bit").unpack(parts)
    assert torch.equal(half[:256], format_named("8bit-signed").unpack(signed)[:256])


@pytest.mark.parametrize("name", ["8bit", "8bit-signed", "8bit-unsigned"])
def test_the_error_is_small_beside_the_blocks_largest(name: str) -> None:
    x = state(1 << 14, signed=name != "8bit-unsigned")
    back = format_named(name).unpack(packed(name, x))
    largest = x.view(-1, 256).abs().amax(1, keepdim=True)
    wrong = ((back - x).view(-1, 256) / largest).abs().max()
    assert wrong <= 0.5 * (0.9 / 64) * (1 + 1e-5)


@pytest.mark.parametrize("name", ["8bit", "fp8-e4m3/256", "fp8-e5m2/256"])
def test_zeros_stay_zeros(name: str) -> None:
    x = torch.zeros(1000)
    back = format_named(name).unpack(packed(name, x))
    assert not back.any()


@pytest.mark.parametrize("name", ["8bit", "fp8-e4m3/256", "fp8-e5m2/256"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_spoils_its_block_alone(name: str, bad: float) -> None:
    x = state(1024)
    whole = format_named(name).unpack(packed(name, x))
    x[300] = bad
    back = format_named(name).unpack(packed(name, x))
    clean = torch.ones(1024, dtype=torch.bool)
    clean[256:512] = False
    assert torch.equal(back[clean], whole[clean])
    assert not back[300].isfinite()


@pytest.mark.parametrize("name", FLOATS)
def test_floats_of_8_bits_are_torchs(name: str) -> None:
    dtype = FLOATS[name]
    largest = torch.finfo(dtype).max
    x = torch.cat([specials(), any_bits(), state(1 << 16), torch.randn(1 << 16) * 300])
    if torch.tensor(1e9).to(dtype).float().isnan():
        x = x[x.abs() <= largest]  # before 2.13 torch makes NaN of what is too large
    (codes,) = packed(name, x).values()
    assert codes.dtype == dtype
    want = x.to(dtype)
    assert torch.equal(codes.view(torch.uint8), want.view(torch.uint8))
    back = format_named(name).unpack({"": codes})
    assert torch.equal(back.nan_to_num(7.0), want.float().nan_to_num(7.0))


@pytest.mark.parametrize("name", FLOATS)
def test_a_scaled_float_uses_its_whole_range(name: str) -> None:
    x = state(1000)
    parts = packed(f"{name}/64", x)
    largest = torch.stack([b.abs().max() for b in x.split(64)])
    assert torch.equal(parts["scale"], largest / torch.finfo(FLOATS[name]).max)
    scaled = x / parts["scale"].repeat_interleave(64)[:1000]
    want = scaled.to(FLOATS[name]).view(torch.uint8)
    assert torch.equal(parts[""].view(torch.uint8), want)


def test_one_element_has_no_blocks() -> None:
    assert format_named("8bit").refusal(torch.ones(1, 1))
    assert not format_named("8bit").refusal(torch.ones(2))


@pytest.mark.parametrize("name", ["8bit/100", "8bit/32", "8bit/8192", "fp8-e4m3/x"])
def test_sizes_of_blocks_that_do_not_fit(name: str) -> None:
    with pytest.raises(UnsupportedInput, match="blocks have 64, 128"):
        format_named(name)


# ---------------------------------------------------------------- peers


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("size", [64, 256, 4096])
def test_torchao_has_the_same_codes_and_scales(signed: bool, size: int) -> None:
    theirs = peer("torchao.optim.subclass_8bit").OptimState8bit
    x = state(1 << 16, signed=signed)
    kept = theirs.zeros(x.shape, signed=signed, block_size=size)
    kept.copy_(x)
    mine = packed(f"{'8bit-signed' if signed else '8bit-unsigned'}/{size}", x)
    assert torch.equal(mine[""], kept.codes)
    assert torch.equal(mine["scale"], kept.scale)
    assert torch.equal(MAPS[int(signed)], kept.qmap)


def test_torchao_has_the_same_floats_of_8_bits() -> None:
    theirs = peer("torchao.optim.subclass_fp8").quantize_fp8
    x = state(1 << 16)
    codes, scale = theirs(x, 256)
    mine = packed("fp8-e4m3/256", x)
    assert torch.equal(mine[""].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(mine["scale"], scale)


@pytest.mark.parametrize("signed", [True, False])
def test_bitsandbytes_has_the_same_map_and_scales(signed: bool) -> None:
    """Its formula multiplies by an inverse and takes the lower of two numbers. Its
    kernel for the CPU gives small numbers other codes than the formula.
    """
    functional = peer("bitsandbytes.functional")
    numbers = functional.create_dynamic_map(signed=signed)
    assert torch.equal(MAPS[int(signed)], numbers)
    x = state(1 << 16, signed=signed)
    codes, found = functional.quantize_blockwise(x, code=numbers, blocksize=256)
    mine = packed("8bit-signed" if signed else "8bit-unsigned", x)
    assert torch.equal(mine["scale"], found.absmax)
    scaled = (x.view(-1, 256) * (1 / found.absmax[:, None])).clamp(-1, 1).flatten()
    formula = torch.bucketize(scaled, (numbers[:-1] + numbers[1:]) / 2)
    apart = (mine[""].long() - formula).abs()
    assert apart.max() <= 1
    assert (apart > 0).float().mean() < 1e-4
    # where its kernel is as fine as the map
    far = scaled.abs() > 0.1
    apart = (mine[""].int() - codes.int()).abs()[far]
    assert apart.max() <= 1

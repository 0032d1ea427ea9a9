"""Formats of packed tensors: what they keep, what they round, and how."""

from __future__ import annotations

import math

import pytest
import torch

from fuseopt.errors import UnsupportedInput
from fuseopt.storage.formats import FORMATS, format_named
from fuseopt.storage.ops import index_like
from tests.caller_states import STATES
from tests.storage.reference import same_bits

SPECIAL = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, 3.4e38, -3.4e38, 1e-45, 1.17e-38]


def specials() -> torch.Tensor:
    return torch.tensor(SPECIAL)


def any_bits(n: int = 1 << 18, seed: int = 0) -> torch.Tensor:
    """Numbers of float32 of any exponent, NaN and infinities too."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (n,), generator=generator)
    return bits.to(torch.int32).view(torch.float32)


def through(name: str, x: torch.Tensor, number: int = 0) -> torch.Tensor:
    """A tensor packed and unpacked."""
    form = FORMATS[name]
    parts = form.empty(x, number)
    form.pack(x, parts)
    return form.unpack(parts)


@pytest.mark.family(1)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", [x for x in FORMATS if "/" not in x or "/64" in x])
def test_a_state_of_the_caller_changes_nothing(name: str, state: str) -> None:
    """Such as a default dtype or autocast: both the parts and what they hold."""
    x = torch.cat([torch.randn(300), specials()])
    want = FORMATS[name].empty(x, 3)
    FORMATS[name].pack(x, want)
    with STATES[state]():
        have = FORMATS[name].empty(x, 3)
        FORMATS[name].pack(x, have)
        back = FORMATS[name].unpack(have)
    assert all(same_bits(have[part], t) for part, t in want.items())
    assert same_bits(back, FORMATS[name].unpack(want))


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_a_cast_is_torchs(name: str, dtype: torch.dtype) -> None:
    x = torch.cat([specials(), any_bits()])
    want = x.to(dtype).float()
    assert torch.equal(through(name, x).nan_to_num(7.0), want.nan_to_num(7.0))


@pytest.mark.parametrize("name", ["bf16", "fp16", "bf16-stochastic", "split"])
def test_what_is_packed_is_packed_the_same_again(name: str) -> None:
    x = through(name, torch.randn(4096))
    assert torch.equal(through(name, x), x)


def test_split_loses_nothing() -> None:
    x = torch.cat([specials(), any_bits()])
    back, numbers = through("split", x), ~x.isnan()
    assert torch.equal(back.view(torch.int32)[numbers], x.view(torch.int32)[numbers])
    assert back[~numbers].isnan().all()


def test_the_first_part_of_a_split_is_the_nearest() -> None:
    x = torch.cat([specials(), any_bits()])
    x = x[x.abs() < 3e38]
    form = FORMATS["split"]
    parts = form.empty(x, 0)
    form.pack(x, parts)
    nearest = x.to(torch.bfloat16).double()
    found = parts[""].double()
    # a tie has two that are the nearest
    assert torch.equal((found - x.double()).abs(), (nearest - x.double()).abs())
    nan = torch.tensor([math.nan]).view(torch.int32)
    strange = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF]).to(torch.int32)
    every = torch.cat([nan, strange]).view(torch.float32)
    assert every.isnan().all()
    parts = form.empty(every, 0)
    form.pack(every, parts)
    assert parts[""].isnan().all()
    assert form.unpack(parts).isnan().all()


def test_stochastic_rounds_to_a_neighbour() -> None:
    x = any_bits()
    x = x[x.abs() < 3e38]
    found = through("bf16-stochastic", x)
    down = (x.view(torch.int32) & -0x10000).view(torch.float32)
    up = ((x.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)
    exact = x == down
    assert torch.equal(found[exact], x[exact])
    assert ((found == down) | (found == up)).all()


def test_stochastic_keeps_what_is_not_finite() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan])
    found = through("bf16-stochastic", x)
    assert found[:2].tolist() == [math.inf, -math.inf]
    assert found[2].isnan()


@pytest.mark.parametrize("fraction", [1 / 256, 0.25, 0.5, 0.75, 255 / 256])
def test_the_mean_of_stochastic_rounding_is_the_number(fraction: float) -> None:
    # of a million draws of one number: the mean is known to 1/2000 of a step or better
    n, step = 1_000_000, 2.0**-7
    x = torch.full((n,), 1.0 + fraction * step)
    share = (through("bf16-stochastic", x).double().mean().item() - 1.0) / step
    deviation = math.sqrt(fraction * (1 - fraction) / n)
    assert abs(share - fraction) < 5 * deviation


def test_draws_are_independent() -> None:
    n, form = 1 << 16, FORMATS["bf16-stochastic"]
    x = torch.full((n,), 1.0 + 0.5 * 2.0**-7)
    ups = []
    for number in range(3):
        parts = form.empty(x, number)
        for _ in range(4):
            form.pack(x, parts)
            ups.append((form.unpack(parts) > 1.0).double() * 2 - 1)
    every = torch.stack(ups)
    # of each two draws, and of neighbours in one, half agree
    together = (every @ every.T / n).fill_diagonal_(0.0)
    assert together.abs().max() < 5 / math.sqrt(n)
    neighbours = (every[:, 1:] * every[:, :-1]).mean(1)
    assert neighbours.abs().max() < 5 / math.sqrt(n)


def test_a_draw_is_repeated_from_its_count() -> None:
    form, x = FORMATS["bf16-stochastic"], torch.randn(1000)
    parts = form.empty(x, 3)
    form.pack(x, parts)
    saved = {k: t.clone() for k, t in parts.items()}
    form.pack(x, parts)
    form.pack(x, saved)
    assert all(torch.equal(parts[k], saved[k]) for k in parts)
    assert not torch.equal(
        through("bf16-stochastic", x, 4), through("bf16-stochastic", x, 3)
    )


def test_elements_are_counted() -> None:
    t = torch.empty(3, 4, dtype=torch.bfloat16)
    assert index_like(t).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    with pytest.raises(RuntimeError, match="strides"):
        index_like(t.T)


def test_an_unknown_format_names_the_known_ones() -> None:
    with pytest.raises(UnsupportedInput, match=r"'int3'.*bf16"):
        format_named("int3")

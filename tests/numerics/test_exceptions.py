"""docs/numerics.md to the letter: what it calls exact is, and what it excepts is no
more than it says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fuseopt
from tests.steps import (
    DTYPES,
    ELEVEN,
    compiled,
    has,
    make,
    make_params,
    name_of,
    same_bits,
    set_grads,
)

STEPS = 10
#: A number, an odd matrix, and more than a part of eager's loops.
SHAPES = ((), (17, 5), (181, 193))


def ordered(t: Tensor) -> Tensor:
    """The bits as integers that count: neighbours differ by 1, 0.0 and -0.0 by 0."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    bits = t.contiguous().view(kind).long()
    return torch.where(bits < 0, torch.iinfo(kind).min - bits, bits)


def ulps(got: Tensor, want: Tensor) -> int:
    """The largest distance of two elements, counted in numbers between them."""
    assert got.dtype == want.dtype
    assert torch.equal(got.isnan(), want.isnan())
    apart = (ordered(got) - ordered(want)).abs().masked_fill(want.isnan(), 0)
    return int(apart.max())


# ---------------------------------------------------------------- eager's default


def states(params: Any, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for p in params:
        yield p.detach()
        yield from (v for v in optimizer.state[p].values() if isinstance(v, Tensor))


@pytest.mark.family(40)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("name", ELEVEN)
def test_no_distance_to_eagers_default(name: str, dtype: torch.dtype) -> None:
    """After ten steps; RAdam's rectified form begins at the sixth."""
    options = {"weight_decay": 0.1} if has(name, "weight_decay") else {}
    mine, theirs = (make_params(SHAPES, dtype) for _ in range(2))
    optimizer, plain = make(name, mine, **options), make(name, theirs, **options)
    step = compiled(optimizer)
    for k in range(STEPS):
        set_grads(mine, theirs, k)
        step()
        plain.step()
    assert all(report.launches == 1 for report in fuseopt.reports())
    pairs = zip(states(mine, optimizer), states(theirs, plain), strict=True)
    assert all(same_bits(x, y) for x, y in pairs)


# ---------------------------------------------------------------- functions

N = 30_000


def numbers(dtype: torch.dtype, seed: int) -> Tensor:
    return 3 * torch.randn(N, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_the_function_addcdiv_is_left_apart(dtype: torch.dtype) -> None:
    """As the page says: at most 2 ulp of the larger term, which the sum may cancel."""

    def update(x: Tensor, y: Tensor, z: Tensor) -> None:
        x.copy_(torch.addcdiv(x, y, z, value=0.3))

    x, y, z = (numbers(dtype, seed) for seed in range(3))
    got, want = x.clone(), x.clone()
    torch.compile(update, backend="fuseopt")(got, y, z)
    update(want, y, z)
    terms = torch.maximum(x.double().abs(), (0.3 * y.double() / z.double()).abs())
    unit = torch.finfo(dtype).eps * torch.exp2(terms.log2().floor())
    apart = ((got.double() - want.double()).abs() / unit).max().item()
    print(dtype, apart)
    assert apart <= 2


def scale_and_add(x: Tensor, y: Tensor, lr: Tensor) -> list[Tensor]:
    """All that is computed part by part, once out of place and once as lists."""
    lists = [torch._foreach_mul([x], 0.3)[0], torch._foreach_neg([x])[0]]
    lists += torch._foreach_add([x], [y], alpha=0.3)
    lists += torch._foreach_sub([x], [y], alpha=0.3)
    return [x + y, x - y, -x, x * 0.3, 0.7 * x, x * lr, x.add(y, alpha=0.3), *lists]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=name_of)
def test_complex_sums_and_products_with_a_number(dtype: torch.dtype) -> None:
    real = torch.float32 if dtype is torch.complex64 else torch.float64
    x, y = (torch.complex(numbers(real, i), numbers(real, i + 2)) for i in range(2))
    lr = torch.tensor(0.37)
    want = scale_and_add(x, y, lr)
    got = [torch.empty_like(x) for _ in want]

    def update(outs: list[Tensor], x: Tensor, y: Tensor, lr: Tensor) -> None:
        for out, result in zip(outs, scale_and_add(x, y, lr), strict=True):
            out.copy_(result)

    torch.compile(update, backend="fuseopt")(got, x, y, lr)
    (report,) = fuseopt.reports()
    assert (report.launches, report.externs, report.fallback) == (1, [], "")
    for a, b in zip(got, want, strict=True):
        assert same_bits(a, b)


def test_a_complex_zero_and_infinity_by_a_number() -> None:
    """What the page says: the parts that eager's full product makes otherwise."""
    inf = float("inf")
    x = torch.tensor([complex(-0.0, -1.0), complex(inf, 1.0), complex(2.0, 3.0)])
    got, want = x.clone(), x * 0.5
    torch.compile(lambda t: t.mul_(0.5), backend="fuseopt")(got)
    assert torch.equal(got[2], want[2])
    parts, full = torch.view_as_real(got), torch.view_as_real(want)
    assert torch.equal(parts[0], full[0])  # but for the sign of the zero
    assert parts[1].tolist() == [inf, 0.5]
    assert math.isnan(full[1, 1])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=name_of)
def test_a_complex_zero_negated(dtype: torch.dtype) -> None:
    """No element but zeros may differ, and those only in their signs."""
    zeros = torch.zeros(37, dtype=dtype)
    some = torch.randn(37, dtype=dtype)
    some[::3] = 0
    for x in (zeros, some):
        got, want = (torch.view_as_real(t) for t in (x.clone(), -x))
        torch.compile(lambda t: t.neg_(), backend="fuseopt")(torch.view_as_complex(got))
        assert torch.equal(got, want)
        assert got[want == 0].signbit().all()


def test_subnormal_quotients_half_way_between_two_numbers() -> None:
    odd = torch.arange(1, 2001, 2)
    for divisor in (6, 98, 206):
        x = (odd.double() * (divisor // 2) * 2.0**-149).float()
        got, want = x.clone(), x / float(divisor)
        torch.compile(torch.Tensor.div_, backend="fuseopt")(got, float(divisor))
        assert ulps(got, want) <= 1


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_methods_with_a_scale_are_put_together_again(dtype: torch.dtype) -> None:
    def update(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> None:
        x.addcdiv_(y, z, value=0.3)
        w.addcmul_(y, z, value=0.7)

    x, y, z = (numbers(dtype, seed) for seed in range(3))
    got, want = [x.clone(), y.clone()], [x.clone(), y.clone()]
    torch.compile(update, backend="fuseopt")(got[0], y, z, got[1])
    update(want[0], y, z, want[1])
    assert [ulps(a, b) for a, b in zip(got, want, strict=True)] == [0, 0]

"""docs/numerics.md to the letter: each entry of its tables is measured and held.

The bounds are read from the page, so there is one list of them. `pytest -s` prints what
was measured; a bound is at most twice that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
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
)

PAGE = Path(__file__).parent.parent / "docs" / "numerics.md"
STEPS = 10
#: A number, an odd matrix, and more than a part of eager's loops.
SHAPES = ((), (17, 5), (181, 193))
COLUMNS = [name_of(dtype) for dtype in DTYPES]


def rows(mark: str) -> dict[str, list[float]]:
    """The bounds of a table of the page, by the name in its first column."""
    text = PAGE.read_text(encoding="utf-8")
    block = text.split(f"<!-- {mark}:begin -->")[1].split(f"<!-- {mark}:end -->")[0]
    lines = [
        [c.strip() for c in x.strip("| ").split("|")] for x in block.split("\n") if x
    ]
    assert lines[0][1 : 1 + len(COLUMNS)] == COLUMNS
    return {line[0].strip("`"): [float(c) for c in line[1:]] for line in lines[2:]}


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


def ulps_of_largest(got: Tensor, want: Tensor) -> float:
    """The largest difference, in ulp of the largest element."""
    same = (got == want) | (got.isnan() & want.isnan())
    if bool(same.all()):
        return 0.0
    apart = (got.double() - want.double()).abs().masked_fill(same, 0).max().item()
    largest = want[want.isfinite()].double().abs().max().item()
    unit = torch.finfo(want.dtype).eps * 2.0 ** math.floor(math.log2(largest))
    return float(apart / unit)


# ---------------------------------------------------------------- eager's default


def states(params: Any, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for p in params:
        yield p.detach()
        yield from (v for v in optimizer.state[p].values() if isinstance(v, Tensor))


def distance(name: str) -> list[float]:
    """From the compiled step to eager's default: ulp by dtype, and of the way."""
    options = {"weight_decay": 0.1} if has(name, "weight_decay") else {}
    own, others = ([make_params(SHAPES, d) for d in DTYPES] for _ in range(2))
    start = [p.detach().clone() for p in own[1]]
    plain = make(name, [p for group in others for p in group], **options)
    optimizer = make(name, [p for group in own for p in group], **options)
    step = compiled(optimizer)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for mine, theirs in zip(own, others, strict=True):
            for p, q in zip(mine, theirs, strict=True):
                grad = torch.randn(p.shape, generator=generator).to(p.dtype)
                p.grad, q.grad = grad.clone(), grad.clone()
        step()
        plain.step()
    found = [
        max(
            ulps_of_largest(x, y)
            for x, y in zip(states(mine, optimizer), states(theirs, plain), strict=True)
            if x.numel()
        )
        for mine, theirs in zip(own, others, strict=True)
    ]
    assert DTYPES[1] == torch.float64
    full = [t for t in zip(own[1], others[1], start, strict=True) if t[0].numel()]
    apart = max(float((p - q).detach().abs().max()) for p, q, _ in full)
    way = max(float((q - s).detach().abs().max()) for _, q, s in full)
    return [*found, apart / way]


@pytest.mark.parametrize("name", ELEVEN)
def test_distance_to_eagers_default(name: str) -> None:
    found = distance(name)
    print(name, *(f"{x:.3g}" for x in found))
    assert all(report.launches == 1 for report in fuseopt.reports())
    for column, x, bound in zip(
        [*COLUMNS, "way"], found, rows("plain")[name], strict=True
    ):
        assert x <= bound, f"{column}: {x:.4g} over {bound:.4g}"


def test_the_table_of_optimizers_is_whole() -> None:
    assert sorted(rows("plain")) == ELEVEN


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

"""Where eager's kernel of an op has another form, another rule has its bits."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

import fuseopt
from fuseopt.compat import kernels


@pytest.fixture
def ordered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A torch whose zeros are in NEON's order."""
    for name in ("maximum", "minimum"):
        monkeypatch.setitem(kernels.FORMS, name, lambda dtype: False)
        rule, _ = kernels.OTHERS[name]
        monkeypatch.setitem(kernels.OTHERS, name, (rule, lambda dtype: True))
    kernels.is_as_ruled.cache_clear()
    kernels.rule_of_form.cache_clear()
    yield
    kernels.is_as_ruled.cache_clear()
    kernels.rule_of_form.cache_clear()


@pytest.mark.usefixtures("ordered")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_minus_zero_is_below_zero_in_whole_vectors(
    name: str, dtype: torch.dtype
) -> None:
    """The first of two zeros stays where they are left over."""
    op = getattr(torch, name)

    def put(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
        out.copy_(op(x, y))

    into = torch.compile(put, backend="fuseopt", options={"fallback": "error"})

    def got(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(x, 7)
        into(out, x, y)
        return out

    lower = name == "minimum"
    for n, want in ((64, [lower, lower]), (3, [False, True])):
        zeros = torch.zeros(n, dtype=dtype)
        signs = got(zeros, -zeros).signbit(), got(-zeros, zeros).signbit()
        assert [x.tolist() for x in signs] == [n * [x] for x in want]
        assert got(-zeros, -zeros).signbit().all()
        assert not got(zeros, zeros).signbit().any()
    report = fuseopt.reports()[-1]
    assert (report.launches, report.externs) == (1, [])
    x = torch.tensor([1.0, -2.0, torch.nan, 3.0, torch.inf], dtype=dtype)
    y = torch.tensor([2.0, -3.0, 1.0, torch.nan, -torch.inf], dtype=dtype)
    torch.testing.assert_close(got(x, y), op(x, y), rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("ordered")
def test_a_largest_number_is_in_the_kernel_of_its_step() -> None:
    """AMSGrad's maximum has an `out`."""
    params = [torch.nn.Parameter(torch.ones(5, 3)) for _ in range(3)]
    optimizer = torch.optim.AdamW(params, amsgrad=True)
    fuseopt.compile(optimizer, fallback="error")
    for _ in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    report = fuseopt.reports()[-1]
    assert (report.launches, report.externs) == (1, [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_test_of_an_order_of_zeros(dtype: torch.dtype) -> None:
    """NEON's maximum, and that of one that takes the second zero."""

    def neon(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y if len(x) > 16 else x

    of = functools.partial(kernels._orders_zeros, dtype=dtype)
    assert of(neon) == (dtype != torch.bfloat16)
    assert not of(lambda x, y: y)
    assert not of(lambda x, y: x)

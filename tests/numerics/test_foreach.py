"""Bit for bit what eager foreach does: every optimizer, option and dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fuseopt
from tests.steps import CASES, DTYPES, ELEVEN, Twins, name_of
from tests.versions import one_counter_for_all


@pytest.mark.family(120)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_five_steps_are_eagers_bits(
    case: tuple[str, dict[str, Any]], dtype: torch.dtype
) -> None:
    name, options = case
    twins = Twins(name, dtype=dtype, **options)
    for step in range(5):
        assert twins.step() == [], f"step {step}"
    for report in fuseopt.reports():
        assert report.launches == 1, str(report)
        assert not report.externs, str(report)
        assert not report.fallback, str(report)


def test_mixed_dtypes_in_one_optimizer() -> None:
    """bf16, fp32 and f64 parameters are variants of one kernel."""
    twins = Twins("AdamW", shapes=[(5, 7)] * 4)
    for params in (twins.eager_params, twins.params):
        for p, dtype in zip(params, (torch.bfloat16, torch.float32) * 2, strict=True):
            p.data = p.data.to(dtype)
    for _ in range(3):
        assert twins.step() == []
    (report,) = fuseopt.reports()
    assert report.launches == 1
    assert report.kernels[0].variants == 2


@pytest.mark.parametrize("numbers", [(float("nan"), float("inf")), (-0.0, 1e-45)])
def test_special_values_flow_as_in_eager(numbers: tuple[float, float]) -> None:
    twins = Twins("Adam", shapes=[(70,), (3, 3)], amsgrad=True, weight_decay=0.1)
    for _ in range(3):
        twins.seed += 1
        for params in (twins.eager_params, twins.params):
            for p in params:
                g = torch.linspace(-1, 1, p.numel()).reshape(p.shape)
                g.view(-1)[:2] = torch.tensor(numbers)
                p.grad = g
        assert twins.step(grads=False) == []


def test_more_elements_than_a_chunk_and_every_thread_count() -> None:
    """bf16 sums round otherwise at the ends of eager's parts, which threads decide."""
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            torch._dynamo.reset()
            twins = Twins(
                "SGD", [(100_003,), (257, 129)], torch.bfloat16, lr=0.1, momentum=0.9
            )
            for _ in range(3):
                assert twins.step() == [], f"{threads} threads"
    finally:
        torch.set_num_threads(before)


def test_fast_numerics_stay_close() -> None:
    twins = Twins("AdamW", backend_options={"numerics": "fast"}, lr=0.01)
    for _ in range(5):
        twins.step()
    for p, q in zip(twins.eager_params, twins.params, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.family(12)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=one_counter_for_all) if name == "Adagrad" else name
        for name in ELEVEN
    ],
)
def test_the_for_loop_form_is_eagers_bits_in_one_launch(name: str) -> None:
    """`foreach=False`: one parameter after the other, grouped into the same lists."""
    options: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {}
    twins = Twins(name, foreach=False, lr=0.05, **options)
    for step in range(4):
        assert twins.step() == [], f"step {step}"
    for report in fuseopt.reports():
        assert report.launches == 1, str(report)
        assert not report.externs, str(report)

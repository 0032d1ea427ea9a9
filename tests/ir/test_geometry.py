"""Shapes and strides, as torch has them."""

from __future__ import annotations

import pytest

from fuseopt.ir.geometry import contiguous_strides, is_block, is_contiguous, numel

torch = pytest.importorskip("torch")

SHAPES = [(), (1,), (3,), (2, 3), (1, 4), (4, 1), (2, 1, 3), (0,), (3, 0), (2, 3, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_contiguous_tensors(shape: tuple[int, ...]) -> None:
    t = torch.empty(shape)
    assert numel(shape) == t.numel()
    assert contiguous_strides(shape) == t.stride()
    assert is_contiguous(shape, t.stride())
    assert t.numel() == 0 or is_block(shape, t.stride())


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4), (3, 1, 2)], ids=str)
def test_other_orders_and_gaps(shape: tuple[int, ...]) -> None:
    t = torch.empty(shape).transpose(0, -1)
    assert is_contiguous(t.shape, t.stride()) == t.is_contiguous() == False  # noqa: E712
    assert is_block(t.shape, t.stride())
    gaps = torch.empty((*shape, 2))[..., 0]
    assert not is_contiguous(gaps.shape, gaps.stride())
    assert not is_block(gaps.shape, gaps.stride())
    repeated = torch.empty(1).expand(shape)
    assert not is_block(repeated.shape, repeated.stride())


def test_dimensions_of_one_element_may_have_any_stride() -> None:
    t = torch.empty_strided((1, 3, 1), (7, 1, 9))
    assert is_contiguous(t.shape, t.stride())
    assert t.is_contiguous()
    assert is_block(t.shape, t.stride())

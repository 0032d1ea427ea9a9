"""Numbers of bfloat16 in Triton's text: roots, and pairs that are widened together."""

from __future__ import annotations

import re

import pytest
import torch

from fuseopt.codegen.triton.kernel import TritonTarget
from tests.codegen.test_triton_code import CUDA, kernels_of


@pytest.mark.parametrize("off", [-2.0, -1.0, 0.0, 1.0, 2.0])
def test_a_root_that_is_nearly_right_rounds_to_the_same_bfloat16(off: float) -> None:
    """For all bfloat16, and twice the error that PTX admits."""
    bits = torch.arange(2**15).to(torch.int16)
    x = bits.view(torch.bfloat16).to(torch.float64)
    root = x.sqrt()
    exact = root.to(torch.float32).to(torch.bfloat16)
    near = (root * (1 + off * 2.0**-23)).to(torch.float32).to(torch.bfloat16)
    same = (near == exact) | (near.isnan() & exact.isnan())
    assert bool(same.all())


def test_a_root_that_is_farther_off_does_not() -> None:
    """Else the test above could not fail."""
    x = torch.arange(2**15).to(torch.int16).view(torch.bfloat16).to(torch.float64)
    exact = x.sqrt().to(torch.float32).to(torch.bfloat16)
    near = (x.sqrt() * (1 + 2.0**-16)).to(torch.float32).to(torch.bfloat16)
    assert not bool(((near == exact) | exact.isnan()).all())


def main_path(dtype: torch.dtype, cuda: tuple[int, int] | None) -> str:
    """The element code of AdamW's main path."""
    (kernel,) = kernels_of("AdamW", dtype)
    text = TritonTarget(cuda=cuda).render(kernel).text
    found = re.search(r"def main0\(.*?\n\n\n", text, re.DOTALL)
    assert found
    return found[0]


def test_text_of_a_gpu_of_nvidia_widens_pairs() -> None:
    text = main_path(torch.bfloat16, CUDA)
    assert text.count("wide(") >= 6
    assert text.count("tl.sqrt(") == 1
    assert "tl.sqrt_rn(" not in text


def test_other_text_has_no_ptx() -> None:
    text = main_path(torch.bfloat16, None)
    assert "wide(" not in text
    assert "tl.sqrt(" not in text


def test_float16_and_float32_keep_their_roots() -> None:
    for dtype in (torch.float16, torch.float32):
        text = main_path(dtype, CUDA)
        assert "wide(" not in text
        assert "tl.sqrt_rn(" in text

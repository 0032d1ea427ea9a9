"""A tail of the other target, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import ROOT

SKIPS = """
import torch, fuseopt
from tests.tails.test_tail import MAKES
from tests.tails.twins import SHAPES, Side, call, tail_of

one, other = (Side(MAKES["adamw"], SHAPES[:3], scaled=True) for _ in range(2))
tail = tail_of(other, clip_grad_norm=1.0, zero_grad=True, target="triton")
for n in range(5):
    bad = n in (0, 3)
    for side in (one, other):
        side.set_grads(n, bad)
    before = [p.detach().clone() for p in other.params]
    one.eager(1.0)
    assert bool(call(other, tail).skipped) == bad
    assert not bad or all(map(torch.equal, before, other.params))
    # sums have another order there
    for p, q in zip(one.params, other.params, strict=True):
        torch.testing.assert_close(q, p, rtol=1e-6, atol=1e-7)
report = fuseopt.reports()[-1]
assert report.launches == 2
assert {k.target for k in report.kernels} == {"triton"}
"""


@pytest.mark.slow
def test_skips_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SKIPS], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

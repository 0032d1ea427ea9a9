"""Weights and state in the CPU's memory, parameters on an accelerator."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fuseopt.offload import CPUOffloadOptimizer
from tests import ROOT
from tests.storage.reference import give_grads, params_of


@pytest.mark.slow
def test_on_a_simulated_device() -> None:
    command = [sys.executable, "-m", "tests.offload.on_device"]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.stdout.endswith("done\n"), result.stderr


def test_parameters_on_the_cpu_are_stepped_there() -> None:
    params = params_of(6, dtype=torch.bfloat16)
    places = [p.data_ptr() for p in params]
    optimizer = CPUOffloadOptimizer(params, torch.optim.AdamW, lr=1e-2)
    for step in range(3):
        give_grads(step, params)
        optimizer.step()
    assert [p.data_ptr() for p in params] == places
    assert all(
        p is q for p, q in zip(optimizer.param_groups[0]["params"], params, strict=True)
    )


def test_parameters_of_float32_and_of_16_bits() -> None:
    narrow, wide = params_of(9, dtype=torch.bfloat16), params_of(9, seed=1)
    optimizer = CPUOffloadOptimizer([*narrow, *wide], torch.optim.AdamW, lr=1e-2)
    plain = torch.optim.AdamW(
        [torch.nn.Parameter(p.detach().clone()) for p in wide], lr=1e-2
    )
    theirs = plain.param_groups[0]["params"]
    for step in range(4):
        give_grads(step, narrow)
        give_grads(step, wide, theirs)
        optimizer.step()
        plain.step()
        assert all(torch.equal(p, q) for p, q in zip(wide, theirs, strict=True))

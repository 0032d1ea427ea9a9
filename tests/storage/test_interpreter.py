"""Packed state on the Triton target, in Triton's interpreter: eager's bits.

Triton's roots are those of IEEE. Those of eager's vector library on a CPU may lie an
ulp beside them, so the reference takes roots in float64 and rounds them. That gives
the IEEE ones, since 53 bits are more than twice 24.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt import Storage
from tests import ROOT
from tests.storage.reference import Reference, give_grads, params_of, same_bits

OTHERS = ("bf16", "8bit/64", "fp8-e4m3")
#: Blocks of two sizes, in one launch.
TWO_SIZES = {"exp_avg": "8bit/64", "exp_avg_sq": "fp8-e4m3/256"}


@contextmanager
def exact_roots() -> Iterator[None]:
    """Within, torch's foreach roots of float32 are correctly rounded."""
    real: Any = torch._foreach_sqrt
    torch._foreach_sqrt = lambda ts: [t.double().sqrt().float() for t in ts]  # type: ignore
    try:
        yield
    finally:
        torch._foreach_sqrt = real


def differences(storage: Any, exact: bool) -> tuple[int, int]:
    """Elements of parameters that differ after four steps of AdamW, and of state."""
    make = lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True)  # noqa: E731
    theirs, ours = params_of(6), params_of(6)
    for params in (theirs, ours):  # enough elements to find a root that differs
        params += [torch.nn.Parameter(torch.linspace(-1, 1, 4096))]
    reference = Reference(make(theirs), storage)
    names = storage if isinstance(storage, dict) else {None: storage}
    optimizer = fuseopt.compile(
        make(ours),
        storage=[Storage(x, keys=key, least=0) for key, x in names.items()],
        target="triton",
        fallback="error",
    )
    for step in range(4):
        give_grads(step, theirs, ours)
        with exact_roots() if exact else torch.no_grad():
            reference.step()
            if step == 0:  # in eager, as the first step of all packed state
                optimizer.step()
        if step:
            optimizer.step()
    params = sum(int((p != q).sum()) for p, q in zip(theirs, ours, strict=True))
    state = sum(
        not same_bits(t, optimizer.state[q][key])
        for p, q in zip(theirs, ours, strict=True)
        for key, t in reference.content(p).items()
    )
    return params, state


def check() -> None:
    assert differences("8bit/256", True) == (0, 0)
    params, state = differences("8bit/256", False)
    assert params, "roots alone made them differ"
    assert not state, "AdamW's state has no roots"


def check_others() -> None:
    for storage in OTHERS:
        assert differences(storage, True) == (0, 0), storage


def check_two_sizes() -> None:
    assert differences(TWO_SIZES, True) == (0, 0)
    assert fuseopt.reports()[-1].launches == 1


@pytest.mark.slow
@pytest.mark.parametrize("what", ["check", "check_others", "check_two_sizes"])
def test_roots_alone_set_the_interpreter_apart(what: str) -> None:
    """In a process that has the interpreter from its start."""
    code = f"from {__name__} import {what}; {what}()"
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=280)

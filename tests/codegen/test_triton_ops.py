"""The Triton kernel of every op, in the interpreter: the bits of C++ for the same body.

Without the vector library, as on a GPU, both targets call plain functions, which the
interpreter takes from the C library. So every bit must be the same.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.numerics.test_ops import awkward, whole
from tests.op_cases import BOOLS, INTEGERS, OPS
from tests.steps import same_bits
from tests.triton_cases import Compilers

triton = pytest.importorskip("triton")

#: Elements: a group of the main path, and some that the general path takes.
N = 37


@pytest.fixture(scope="module")
def compilers(tmp_path_factory: pytest.TempPathFactory) -> Compilers:
    return Compilers(str(tmp_path_factory.mktemp("kernels")))


def differences(
    ops: dict[str, Callable[..., Tensor]], compilers: Compilers, *args: Tensor
) -> list[str]:
    """Names of ops whose results differ between the targets."""

    def every(outs: dict[str, Tensor], *args: Tensor) -> None:
        for name, op in ops.items():
            outs[name].copy_(op(*args))

    made = {}
    for target in ("cpp", "triton"):
        torch._dynamo.reset()
        outs = {name: torch.empty_like(op(*args)) for name, op in ops.items()}
        torch.compile(every, backend=compilers.backend(target))(outs, *args)
        made[target] = outs
    return [
        f"{name}: {made['triton'][name].tolist()} for {made['cpp'][name].tolist()}"
        for name in ops
        if not same_bits(made["triton"][name], made["cpp"][name])
    ]


def numbers(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(N, generator=torch.Generator().manual_seed(1))
    x = (3 * x).to(dtype)
    limits = awkward(dtype)[: N - 17]
    y = torch.cat((x[:17], limits)).flip(0)
    return x, y.clone(), x.roll(5).clone()


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        pytest.param(torch.float64, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(torch.float16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_op_has_the_bits_of_cpp(dtype: torch.dtype, compilers: Compilers) -> None:
    assert differences(OPS, compilers, *numbers(dtype)) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool], ids=str)
def test_integers_have_the_bits_of_cpp(
    dtype: torch.dtype, compilers: Compilers
) -> None:
    ops = BOOLS if dtype == torch.bool else INTEGERS
    x, y = (t[-N:].clone() for t in whole(dtype))
    assert differences(ops, compilers, x, y) == []

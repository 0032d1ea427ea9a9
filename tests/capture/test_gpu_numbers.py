"""Numbers beside 16-bit tensors of a GPU, as eager's kernels for GPUs are handed them.

A 0-d tensor of the GPU is read as the type of the larger tensors; one of the CPU, like
a number of Python, comes as an argument of the kernel's arithmetic. The reference is
that, written out; steps are captured from fake tensors of a GPU, and the graph is run
in plain torch.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import symbolic_trace

from fuseopt.capture import capture
from fuseopt.ir.graph_verifier import check_graph
from fuseopt.ir.interpreter import run_graph

#: Three digits of bfloat16 do not hold these.
NUMBERS = (0.0371, 1.2345, -0.8765, 0.4999, 1e-3)


def on_cuda(step, big, small, device):
    """What `step(big, small)` leaves in `big`, a tensor of a GPU; `small` lies on
    `device`.
    """
    with FakeTensorMode():
        fakes = [
            torch.empty(big.shape, dtype=big.dtype, device="cuda"),
            torch.empty(small.shape, dtype=small.dtype, device=device),
        ]
    captured = capture(symbolic_trace(step), fakes)
    check_graph(captured.graph)
    tensors = [big.clone(), small.clone()]
    run_graph(captured.graph, tensors, ())
    return tensors[0]


def narrow(x, dtype):
    return x.to(dtype).float()


#: (step, arithmetic in float32 of the wide tensor and the number, as it is used):
#: `given` says whether it came as a number.
CASES = {
    "mul_": (lambda p, s: p.mul_(s), lambda p, s, given: p * s),
    "add_": (lambda p, s: p.add_(s), lambda p, s, given: p + s),
    "sub_": (lambda p, s: p.sub_(s), lambda p, s, given: p - s),
    "div_": (
        lambda p, s: p.div_(s),
        lambda p, s, given: p * (1 / s) if given else p / s,
    ),
    "mul of lists": (
        lambda p, s: torch._foreach_mul_([p], s),
        lambda p, s, given: p * s,
    ),
    "div of lists": (
        lambda p, s: torch._foreach_div_([p], s),
        lambda p, s, given: p * (1 / s.double()).float() if given else p / s,
    ),
    "lists of numbers": (
        lambda p, s: torch._foreach_div_([p], [s]),
        lambda p, s, given: p * (1 / s) if given else p / s,
    ),
    "lerp_": (
        lambda p, s: p.lerp_(p * 2, s),
        lambda p, s, given: torch.where(
            s.abs() < 0.5, p + s * (p + p - p), (p + p) + (s - 1) * (p + p - p)
        ),
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("name", CASES)
def test_a_tensor_without_dimensions_beside_16_bits(name, device, dtype):
    step, arithmetic = CASES[name]
    random = torch.Generator().manual_seed(1)
    # few digits, so that sums and products of them are exact before they are rounded
    big = torch.randint(-64, 64, (4096,), generator=random).to(dtype)
    given = device == "cpu"
    told_apart = 0
    for number in NUMBERS:
        small = torch.tensor(number)
        used, other = (
            small if wide else narrow(small, dtype) for wide in (given, not given)
        )
        got = on_cuda(step, big, small, device)
        want = arithmetic(big.float(), used, given).to(dtype)
        assert torch.equal(got, want), f"{number}: {got[got != want][:3]}"
        told_apart += not torch.equal(
            want, arithmetic(big.float(), other, not given).to(dtype)
        )
    assert told_apart, "the two ways give the same bits here: nothing was compared"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_eager_reads_as_a_number_is_never_rounded(device):
    """`_foreach_lerp_` takes a number: eager reads it, wherever the tensor lies."""
    big = torch.randint(-64, 64, (4096,), generator=torch.Generator().manual_seed(1))
    big = big.bfloat16()

    def step(p, s):
        # as compat.rewrites writes torch._foreach_lerp_([p], [p * 2], s)
        end = p * 2
        difference = torch._foreach_sub([end], [p])[0]
        high = s.abs() >= 0.5
        factor = torch.where(high, -(1.0 - s), s)
        base = torch.where(high, end, p)
        torch._foreach_addcmul_([base], [factor], [difference])
        p.copy_(base)

    for number in (0.3371, 0.6543):
        small = torch.tensor(number)
        got = on_cuda(step, big, small, device)
        p = big.float()
        want = p + small * p if number < 0.5 else 2 * p + (small - 1) * p
        assert torch.equal(got, want.bfloat16())
        used = narrow(small, torch.bfloat16)
        other = p + used * p if number < 0.5 else 2 * p + (used - 1) * p
        assert not torch.equal(got, other.bfloat16())


def test_float32_is_not_rounded_beside_float64():
    """Of a 0-d float64 the float32 is taken."""
    big = torch.randn(100, generator=torch.Generator().manual_seed(1))
    small = torch.tensor(1.2345678901234, dtype=torch.float64)
    for device in ("cuda", "cpu"):
        got = on_cuda(lambda p, s: p.mul_(s), big, small, device)
        assert torch.equal(got, big * small.float())

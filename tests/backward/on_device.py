"""On a device whose backward runs in a thread of the engine's own (simulated).

In a process of its own: the engine makes its threads in the first backward of a
process, for the devices that there are.
"""

from __future__ import annotations

import copy
import os
import threading
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.utils.checkpoint import checkpoint

import fuseopt
from fuseopt.errors import UnsupportedInput
from fuseopt.runtime.triton.registry import DEVICES
from tests import simulated
from tests.backward.pairs import model
from tests.simulated.kernels import SIM
from tests.steps import same_bits


def momentum(params: Any) -> Optimizer:
    return SGD(params, 1e-2, momentum=0.9)


def bits_of_eager() -> None:
    """The forward is on the CPU, where it gives the bits of eager."""
    theirs = model(2)
    mine = copy.deepcopy(theirs).to("sim")
    threads = set()
    for p in mine.parameters():
        p.register_post_accumulate_grad_hook(
            lambda _: threads.add(threading.get_ident())
        )
    plain = momentum(theirs.parameters())
    handle = fuseopt.in_backward(mine, momentum, buckets="layer")
    for _ in range(3):
        x = torch.randn(3, 6)
        theirs(x).square().mean().backward()
        plain.step()
        plain.zero_grad()
        names = {k: p.cpu() for k, p in mine.named_parameters()}
        out = torch.func.functional_call(theirs, names, (x,))
        out.square().mean().backward()
        for p, q in zip(theirs.parameters(), mine.parameters(), strict=True):
            assert q.grad is None
            assert same_bits(q.detach().cpu(), p.detach())
    assert all(own["momentum_buffer"].is_cpu is False for own in handle.state.values())
    assert threading.get_ident() not in threads


def a_backward_within_a_backward() -> None:
    net = model(2).to("sim")
    handle = fuseopt.in_backward(net, momentum, buckets="layer")
    net(torch.randn(3, 6).to("sim")).sum().backward()
    before = [p.detach().cpu() for p in net[0].parameters()]
    forward = net[0].forward
    net[0].forward = lambda x: checkpoint(forward, x, use_reentrant=True)
    x = torch.randn(3, 6).to("sim").requires_grad_()
    with pytest.raises(UnsupportedInput, match="use_reentrant=False"):
        net(x).sum().backward()
    for p, q in zip(net[0].parameters(), before, strict=True):
        assert same_bits(p.detach().cpu(), q)
    assert handle.state


if __name__ == "__main__":
    device = simulated.load()
    device.reset()
    device.set_available(True)
    DEVICES["sim"] = SIM
    bits_of_eager()
    a_backward_within_a_backward()
    print("done", flush=True)
    # the engine's thread for the device would outlive what it uses
    os._exit(0)

"""Weights on the CPU, parameters on a device that works beside the host (simulated).

In a process without other tests: the engine makes its threads in the first backward of
a process, for the devices that there are.
"""

from __future__ import annotations

import gc
import os
import sys
import weakref
from typing import Any

import torch

import fuseopt
from fuseopt.offload import CPUOffloadOptimizer, MasterOptimizer
from fuseopt.runtime.triton.registry import DEVICES
from tests import simulated
from tests.simulated.kernels import SIM
from tests.storage.reference import Params, params_of, same_bits


def on_device(params: Params) -> Params:
    return [torch.nn.Parameter(p.detach().to("sim")) for p in params]


def backward(step: int, *lists: Params) -> None:
    """The same gradients for each list, by a backward."""
    generator = torch.Generator().manual_seed(step)
    factors = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in lists[0]]
    for params in lists:
        for p, factor in zip(params, factors, strict=True):
            (p * factor.to(p.device)).sum().backward()


def pair(
    kind: str, dtype: torch.dtype, storage: Any
) -> tuple[Any, Any, Params, Params]:
    here = params_of(12, dtype=dtype)
    there = on_device(here)
    make = torch.optim.AdamW
    arguments: dict[str, Any] = {"master": kind, "storage": storage, "lr": 1e-2}
    mine = CPUOffloadOptimizer(there, make, **arguments)
    return MasterOptimizer(here, make, **arguments), mine, here, there


def assert_same(here: Params, there: Params) -> None:
    for i, (p, q) in enumerate(zip(here, there, strict=True)):
        assert same_bits(p.detach(), q.detach().cpu()), f"parameter {i}"


def copies_of(optimizer: Any) -> list[int]:
    """The list to which an optimizer adds an entry for each gradient that it copies."""
    home, copies = optimizer._home, []
    copy = home.copy

    def counted(pair: Any) -> None:
        copies.append(1)
        copy(pair)

    home.copy = counted
    return copies


def bits(kind: str, dtype: torch.dtype, storage: Any) -> None:
    plain, mine, here, there = pair(kind, dtype, storage)
    copies = copies_of(mine)
    for step in range(5):
        backward(step, here, there)
        assert len(copies) == 12 * (step + 1), "each in the backward"
        plain.step()
        mine.step()
        assert len(copies) == 12 * (step + 1), "and no more at the step"
        assert_same(here, there)
        plain.zero_grad()
        mine.zero_grad()
    assert {p.device.type for p in mine.param_groups[0]["params"]} == {"sim"}
    states = mine.state.values()
    held = [
        t for state in states for t in state.values() if isinstance(t, torch.Tensor)
    ]
    assert held
    assert all(t.is_cpu for t in held)


def several_backwards() -> None:
    """Gradients are added up on the device; the last sum is stepped."""
    plain, mine, here, there = pair("fp32", torch.bfloat16, None)
    for step in range(3):
        for k in range(3):
            backward(10 * step + k, here, there)
        plain.step()
        mine.step()
        assert_same(here, there)
        plain.zero_grad()
        mine.zero_grad()


def a_clip_before_the_step() -> None:
    """A gradient that changes after its copy is copied again."""
    plain, mine, here, there = pair("split", torch.bfloat16, None)
    for step in range(3):
        backward(step, here, there)
        torch.accelerator.synchronize("sim")  # all copies are done
        with torch.no_grad():
            for p in (*here, *there):
                assert p.grad is not None
                p.grad.mul_(-0.5)
        plain.step()
        mine.step()
        assert_same(here, there)
        plain.zero_grad()
        mine.zero_grad()


def tails(kind: str, dtype: torch.dtype) -> None:
    """A tail unscales, clips and skips on the CPU; the scale lies on the device."""
    plain, mine, here, there = pair(kind, dtype, None)
    every, copies = [], copies_of(mine)
    for optimizer, place in ((plain, "cpu"), (mine, "sim")):
        scaler = torch.amp.GradScaler(place, init_scale=8, growth_interval=2)
        scaler.scale(torch.zeros(1, device=place))
        tail = fuseopt.tail(
            optimizer,
            scaler=scaler,
            clip_grad_norm=0.5,
            zero_grad=True,
            fallback="error",
        )
        every.append((tail, scaler))
    for step in range(7):
        backward(step, here, there)
        if step == 4:
            for params in (here, there):
                assert params[3].grad is not None
                params[3].grad[...] = torch.inf
        outcomes = [tail() for tail, _ in every]
        assert [bool(x.skips[0]) for x in outcomes] == [step == 4] * 2
        for _, scaler in every:
            scaler.update()
        assert_same(here, there)
        assert same_bits(outcomes[0].norm, outcomes[1].norm.cpu())
        assert every[0][1].get_scale() == every[1][1].get_scale()
        assert all(p.grad is None for p in (*here, *there))
    assert len(copies) == 12 * 7 + 1, "the infinity, which came after the copy"


def a_gradient_is_missing() -> None:
    plain, mine, here, there = pair("split", torch.bfloat16, None)
    for step in range(6):
        backward(step, here, there)
        for params in (here, there):
            for p in params[step % 3 :: 3] if step > 1 else ():
                p.grad = None
        plain.step()
        mine.step()
        assert_same(here, there)
        plain.zero_grad()
        mine.zero_grad()


def stepped_twice() -> None:
    """Two steps of one backward: its gradients count twice, as in torch."""
    plain, mine, here, there = pair("fp32", torch.bfloat16, None)
    for step in range(3):
        backward(step, here, there)
        for _ in range(2):
            plain.step()
            mine.step()
            assert_same(here, there)
        plain.zero_grad()
        mine.zero_grad()
    mine.step()  # without gradients
    assert_same(here, there)


def checkpoints() -> None:
    plain, mine, here, there = pair("fp32", torch.bfloat16, "bf16")
    backward(0, here, there)
    plain.step()
    mine.step()
    _, again, _, others = pair("split", torch.bfloat16, "bf16")
    again.load_state_dict(mine.state_dict())
    backward(1, here)
    for p, q in zip(here, others, strict=True):
        q.grad = None if p.grad is None else p.grad.to("sim")
    plain.load_state_dict(plain.state_dict())
    plain.step()
    again.step()
    for x, y in zip(plain._masters.every, again._masters.every, strict=True):
        assert same_bits(x.wide(), y.wide())


def the_hooks_end() -> None:
    _, mine, _, there = pair("fp32", torch.bfloat16, None)
    backward(0, there)
    mine.step()
    pinned = [weakref.ref(x) for pair in mine._home._pairs for x in pair[1:]]
    del mine
    gc.collect()
    assert not any(x() is not None for x in pinned), "hooks hold the CPU's memory"
    assert not any(p._post_accumulate_grad_hooks for p in there)
    for p in there:
        p.grad = None
    backward(1, there)
    assert all(p.grad is not None for p in there)


def beside_the_backward(kind: str, storage: Any, thread: bool) -> None:
    """Buckets are stepped in the backward; weights arrive before it ends."""
    here = params_of(12, dtype=torch.bfloat16)
    there = on_device(here)
    arguments: dict[str, Any] = {"master": kind, "storage": storage, "lr": 1e-2}
    plain = MasterOptimizer(here, torch.optim.AdamW, **arguments)
    mine = fuseopt.in_backward(
        there,
        lambda params: CPUOffloadOptimizer(params, torch.optim.AdamW, **arguments),
        buckets=[there[k : k + 3] for k in range(0, 12, 3)],
        thread=thread,
    )
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        factors = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in here]
        for params in (here, there):
            if step == 3:  # one gradient is missing: its bucket does not fill
                params = params[1:]
            pairs = zip(params, factors[len(here) - len(params) :], strict=True)
            losses = [(p * x.to(p.device)).sum() for p, x in pairs]
            torch.autograd.backward(losses)
        plain.step()
        assert_same(here, there)
        plain.zero_grad()
        assert all(p.grad is None for p in there)
    mine.close()


if __name__ == "__main__":
    device = simulated.load()
    device.reset()
    device.set_available(True)
    DEVICES["sim"] = SIM
    bits("fp32", torch.bfloat16, None)
    bits("split", torch.bfloat16, "bf16-stochastic")
    bits("fp32", torch.float32, None)
    several_backwards()
    a_clip_before_the_step()
    tails("fp32", torch.bfloat16)
    tails("split", torch.bfloat16)
    tails("fp32", torch.float16)
    a_gradient_is_missing()
    stepped_twice()
    checkpoints()
    the_hooks_end()
    beside_the_backward("fp32", None, False)
    beside_the_backward("fp32", None, True)
    beside_the_backward("split", "bf16", True)
    print("done", flush=True)
    sys.stdout.flush()
    # the engine's thread for the device would outlive what it uses
    os._exit(0)

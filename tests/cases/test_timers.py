"""A signal at any time of a step, of a tail, of a backward that steps, in C too.

What it interrupts is as before or as after it; the next one has eager's bits.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fuseopt
from tests.caller_states import Twin, alike
from tests.cases.trainer import SIZES

pytestmark = [
    pytest.mark.mishaps,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers"),
]

#: How often a call is interrupted, and how often that is tried at most.
HITS, TRIES = 12, 400


class Hit(BaseException):
    """What the handler of the timer raises."""


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    def handle(*_: Any) -> None:
        raise Hit

    before = signal.signal(signal.SIGALRM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


def interrupted(call: Callable[[], Any], seconds: float) -> bool:
    """Does a timer of that many seconds end the call?

    Where it does, the grad mode may be left off, in eager too (torch's `no_grad`).
    """
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Hit:
        torch.set_grad_enabled(True)
        return True
    return False


def length(call: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


@pytest.mark.family(12)
@pytest.mark.parametrize("lanes", SIZES)
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("elementwise", "compile"),
        ("elementwise", "torch.compile"),
        ("tail of AdamW", "compile"),
    ],
)
def test_a_step_is_whole(kind: str, way: str, lanes: int) -> None:
    fused, twin = Twin(kind, way, lanes), Twin(kind, "", lanes)

    def both() -> None:
        for x in (fused, twin):
            x.set_grads()
            x.step()

    for _ in range(4):
        both()
    lasts = length(both)
    drawn, hits = random.Random(lanes), 0
    for _ in range(TRIES):
        fused.set_grads()
        twin.set_grads()
        kept = [p.grad.clone() for p in fused.params]
        before = fused.held()
        if interrupted(fused.step, 1e-6 + drawn.random() * lasts):
            hits += 1
            if alike(fused.held(), before):
                for p, grad in zip(fused.params, kept, strict=True):
                    p.grad = grad
                fused.step()
        twin.step()
        assert alike(fused.held(), twin.held())
        if hits == HITS:
            break
    assert hits
    both()
    assert alike(fused.held(), twin.held())


def layers_of(lanes: int) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(lanes // 2)])


@pytest.mark.family(4)
@pytest.mark.parametrize("lanes", SIZES)
def test_each_bucket_of_a_backward_is_whole(lanes: int) -> None:
    """And has all that the step of its layer writes, or nothing of it."""
    nets = [layers_of(lanes) for _ in range(2)]
    x = torch.randn(4, 8)

    def make(params: Any) -> Any:
        return torch.optim.AdamW(params, lr=0.01)

    fused = fuseopt.in_backward(nets[0], make, buckets="layer")
    twin = make(nets[1].parameters())

    def backward(net: Any) -> None:
        net(x).square().mean().backward()

    def held(opt: Any, layer: Any) -> list[Any]:
        params = [*layer.parameters()]
        tensors = [*params, *(t for p in params for t in opt.state[p].values())]
        return [t.detach().clone() for t in tensors]

    def put(net: Any, opt: Any, values: list[list[Any]]) -> None:
        for layer, kept in zip(net, values, strict=True):
            for p, value in zip(layer.parameters(), kept, strict=False):
                p.data.copy_(value)
            tensors = (t for p in layer.parameters() for t in opt.state[p].values())
            for t, value in zip(tensors, kept[2:], strict=True):
                t.copy_(value)

    def both() -> None:
        for net in nets:
            backward(net)
        twin.step()
        twin.zero_grad()

    for _ in range(4):
        both()
    lasts = length(both)
    drawn, hits = random.Random(lanes), 0
    for _ in range(TRIES):
        before = [held(fused, layer) for layer in nets[0]]
        hits += interrupted(lambda: backward(nets[0]), 1e-6 + drawn.random() * lasts)
        for p in nets[0].parameters():
            p.grad = None
        backward(nets[1])
        twin.step()
        twin.zero_grad()
        now = [held(fused, layer) for layer in nets[0]]
        after = [held(twin, layer) for layer in nets[1]]
        for one, old, new in zip(now, before, after, strict=True):
            assert alike(one, old) or alike(one, new)
        # the next one goes on with what each bucket has
        put(nets[1], twin, now)
        if hits == HITS:
            break
    assert hits
    both()
    now, after = (
        [held(opt, layer) for layer in net]
        for opt, net in zip((fused, twin), nets, strict=True)
    )
    assert all(map(alike, now, after))
    fused.close()

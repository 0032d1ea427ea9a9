"""Steps on a second thread: the bits of `loss.backward(); opt.step(); zero_grad()`."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer

import fuseopt
from fuseopt.backward import on_thread
from fuseopt.backward.on_thread import OnThread
from fuseopt.errors import ConfigError, UnsupportedInput
from fuseopt.offload import CPUOffloadOptimizer, MasterOptimizer
from tests.backward.pairs import Pair
from tests.papers.momentum import Lion
from tests.papers.reducing import LAMB

Build = Callable[[Any], Optimizer]


def adamw(params: Any) -> Optimizer:
    return AdamW(params, 1e-2)


def momentum(params: Any) -> Optimizer:
    return SGD(params, 1e-2, momentum=0.9, weight_decay=0.01)


def lion(params: Any) -> Optimizer:
    return Lion(params, 1e-2, weight_decay=0.1)


def watched(handle: Any, before: Callable[[], None] = lambda: None) -> list[int]:
    """Return the list to which each step of a bucket adds its thread."""
    steps, threads = handle._stepper._steps, []
    step = steps.step

    def noted(params: Any) -> None:
        threads.append(threading.get_ident())
        before()
        step(params)

    steps.step = noted
    return threads


@pytest.mark.family(3)
@pytest.mark.parametrize("buckets", ["layer", 200])
@pytest.mark.parametrize("build", [adamw, momentum, lion, LAMB])
def test_bits_and_state(build: Build, buckets: Any) -> None:
    pair = Pair(build, buckets, thread=True)
    threads = watched(pair.handle)
    for _ in range(4):
        pair.step()
        assert all(p.grad is None for p in pair.mine.parameters())
    assert {r.fallback for r in fuseopt.reports()} == {""}
    assert len({*threads}) == 1
    assert threading.get_ident() not in threads


def test_a_backward_goes_on_while_a_bucket_is_stepped() -> None:
    """The first bucket waits in its step for a gradient of the last one."""
    pair = Pair(momentum, thread=True)
    pair.step()
    arrived, waited = threading.Event(), []
    first = next(pair.mine.parameters())
    first.register_post_accumulate_grad_hook(lambda _: arrived.set())
    watched(pair.handle, lambda: waited.append(arrived.wait(30)))
    pair.step()
    assert waited
    assert all(waited)


def test_accumulated_gradients_and_missing_ones() -> None:
    pair = Pair(adamw, thread=True)
    pair.step()
    with pair.handle.accumulate():
        pair.backward()
    pair.step()
    for m in (pair.mine, pair.theirs):
        m[1].off = True
    pair.step()
    for m in (pair.mine, pair.theirs):
        m[1].off = False
    pair.step()


def test_a_second_step_of_the_same_backward_does_nothing() -> None:
    """A bucket is not stepped twice: its gradients are gone."""
    pair = Pair(momentum, thread=True)
    for _ in range(3):
        pair.step()
        pair.handle.step()
        pair.check()


def test_an_error_of_a_step_is_raised_by_the_backward() -> None:
    """The buckets behind it keep their gradients, and the next backward adds to
    them.
    """
    pair = Pair(momentum, thread=True)
    pair.step()
    steps = pair.handle._stepper._steps  # type: ignore[attr-defined]
    step, calls = steps.step, []

    def fails(params: Any) -> None:
        calls.append(params)
        if len(calls) == 2:
            raise MemoryError("no")
        step(params)

    steps.step = fails
    with pytest.raises(MemoryError, match="no"):
        pair.mine(pair.input()).square().mean().backward()
    assert len(calls) == 2, "the others are left out"
    assert all(p.grad is None for p in calls[0])
    left = [p for p in pair.mine.parameters() if p.grad is not None]
    assert {*map(id, calls[1])} <= {*map(id, left)}
    steps.step = step
    pair.handle.step()
    assert all(p.grad is None for p in left)


def test_an_error_of_the_backward_waits_for_the_thread() -> None:
    """No bucket is stepped when the caller sees the error."""
    pair = Pair(momentum, thread=True)
    pair.step()
    ended: list[int] = []

    def slow() -> None:
        time.sleep(0.3)
        ended.append(1)

    threads = watched(pair.handle, slow)

    def fails(_: Any) -> None:
        raise ValueError("of the backward")

    hook = next(pair.mine.parameters()).register_hook(fails)
    with pytest.raises(ValueError, match="of the backward"):
        pair.mine(pair.input()).square().mean().backward()
    assert threads
    assert len(ended) == len(threads)
    hook.remove()
    pair.mine.zero_grad()


@pytest.mark.slow
def test_an_interrupt_while_the_backward_waits() -> None:
    """The thread goes on; the next call waits for it, and steps what is left."""
    pair = Pair(momentum, thread=True)
    pair.step()
    signals = [signal.SIGINT]

    def step_slowly() -> None:
        time.sleep(0.3)  # the backward ends, and waits
        if signals:
            os.kill(os.getpid(), signals.pop())
        time.sleep(0.3)

    threads = watched(pair.handle, step_slowly)
    pair.theirs(x := pair.input()).square().mean().backward()
    pair.plain.step()
    pair.plain.zero_grad()
    with pytest.raises(KeyboardInterrupt):
        pair.mine(x).square().mean().backward()
    assert threads
    pair.handle.step()
    pair.check()
    pair.step()


def test_a_state_dict_waits_for_the_thread() -> None:
    pair = Pair(adamw, thread=True)
    pair.step()
    stepper: Any = pair.handle._stepper
    watched(pair.handle, lambda: time.sleep(0.2))
    params = [*pair.mine.parameters()]
    for p in params:
        p.grad = torch.ones_like(p)
    stepper.step(params)
    steps = {int(s["step"]) for s in pair.handle.state_dict()["state"].values()}
    assert steps == {2}
    assert all(p.grad is None for p in params)


def test_gradients_come_after_the_optimizer_is_gone() -> None:
    pair = Pair(momentum, thread=True)
    pair.step()
    del pair.handle
    pair.mine(pair.input()).square().mean().backward()
    assert all(p.grad is not None for p in pair.mine.parameters())


def test_the_thread_ends_with_the_optimizer() -> None:
    before = {*threading.enumerate()}
    pair = Pair(momentum, thread=True)
    pair.step()
    (thread,) = {*threading.enumerate()} - before
    del pair
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore")
def test_a_forked_process_makes_its_thread() -> None:
    pair = Pair(momentum, thread=True)
    pair.step()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            params = [*pair.mine.parameters()]
            for p in params:
                p.grad = torch.ones_like(p)
            pair.handle.step()
            code = 0 if all(p.grad is None for p in params) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pair.step()


def test_parameters_of_another_device_are_refused() -> None:
    param = torch.nn.Parameter(torch.ones(3, device="meta"))
    with pytest.raises(UnsupportedInput, match="CPUOffloadOptimizer"):
        fuseopt.in_backward([param], momentum, thread=True)


# ---------------------------------------------------------------- threads


def test_the_threads_of_kernels_are_those_of_the_steps_alone() -> None:
    before = torch.get_num_threads()
    pair = Pair(momentum, thread=3)
    seen: list[int] = []
    watched(pair.handle, lambda: seen.append(torch.get_num_threads()))
    pair.step()
    assert {*seen} == {3}
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert [torch.get_num_threads(), *later] == [before, before]


def test_a_launcher_does_not_starve_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sets OMP_NUM_THREADS=1. Each of its processes takes its part."""
    monkeypatch.setattr(on_thread, "processors", lambda: range(8))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    threads_of = on_thread.threads_of
    assert threads_of(True, False) == 8
    for processes, share in (("1", 8), ("2", 4), ("16", 1), ("0", 8), ("odd", 8)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        assert threads_of(True, False) == share
    assert threads_of(True, True) == torch.get_num_threads()
    assert [threads_of(x, False) for x in (False, 0, 1, 5)] == [0, 0, 1, 5]


@pytest.mark.parametrize("thread", [-1, 1.5, "yes", None])
def test_what_is_no_number_of_threads(thread: Any) -> None:
    with pytest.raises(ConfigError, match="expected True, False or a number"):
        Pair(momentum, thread=thread)


# ---------------------------------------------------------------- masters

KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "split": {"master": "split"},
    "split, 8bit": {"master": "split", "storage": fuseopt.Storage("8bit/64", least=0)},
    "stochastic": {"storage": "bf16-stochastic"},
}


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 16) for _ in range(4)]
    return torch.nn.Sequential(*layers).bfloat16()


class Masters:
    """A model stepped after its backward, and one that is stepped in it."""

    def __init__(self, make: Any, kind: str, **options: Any) -> None:
        self.theirs, self.mine = network(), network()
        arguments = {"lr": 1e-2, **KINDS[kind]}
        # the order in which state is made decides the chances of its roundings
        params = [p for layer in reversed(self.theirs) for p in layer.parameters()]
        self.plain = MasterOptimizer(params, make, **arguments)
        self.handle: Any = fuseopt.in_backward(
            self.mine,
            lambda params: CPUOffloadOptimizer(params, make, **arguments),
            buckets="layer",
            **options,
        )

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(3, 16, generator=generator).bfloat16()
        for net in (self.theirs, self.mine):
            net(x).square().mean().backward()
        self.plain.step()
        self.plain.zero_grad()
        self.check()

    def check(self) -> None:
        pairs = zip(self.theirs.parameters(), self.mine.parameters(), strict=True)
        assert all(torch.equal(p, q) for p, q in pairs)
        theirs, mine = (
            {id(x.param): x.wide() for x in optimizer._masters.every}
            for optimizer in (self.plain, self.handle.optimizer)
        )
        pairs = zip(self.theirs.parameters(), self.mine.parameters(), strict=True)
        assert all(torch.equal(theirs[id(p)], mine[id(q)]) for p, q in pairs)
        assert all(p.grad is None for p in self.mine.parameters())


@pytest.mark.family(4)
@pytest.mark.parametrize("thread", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [torch.optim.AdamW, Lion, torch.optim.Adafactor])
def test_masters(make: Any, kind: str, thread: bool) -> None:
    pair = Masters(make, kind, thread=thread)
    assert isinstance(pair.handle._stepper, OnThread) is thread
    for number in range(5):
        pair.step(number)
    assert {r.fallback for r in fuseopt.reports()} == {""}


def test_groups_and_state_dicts_of_masters() -> None:
    pair = Masters(torch.optim.AdamW, "split", thread=True)
    pair.step(0)
    for optimizer in (pair.plain, pair.handle):
        optimizer.param_groups[0]["lr"] = 3e-2
    pair.step(1)
    pair.handle.load_state_dict(pair.handle.state_dict())
    pair.plain.load_state_dict(pair.plain.state_dict())
    pair.step(2)
    pair.step(3)


class OfAll(torch.optim.SGD):
    """Divides by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for g in self.param_groups for p in g["params"]]
        norm = torch.stack([g.norm() for g in grads if g is not None]).norm()
        for g in grads:
            if g is not None:
                g.div_(norm)
        return super().step(closure)


def test_what_is_refused_of_masters() -> None:
    params = [*network().parameters()]

    def masters(make: Any, of: Any, **options: Any) -> Any:
        return fuseopt.in_backward(
            of, lambda x: CPUOffloadOptimizer(x, make, lr=0.1), **options
        )

    with pytest.raises(UnsupportedInput, match="OfAll cannot step its parameters"):
        masters(OfAll, params)
    with pytest.raises(UnsupportedInput, match="give debug to CPUOffloadOptimizer"):
        masters(torch.optim.SGD, params, debug=1)
    wide = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(UnsupportedInput, match="float32 and no master"):
        masters(torch.optim.SGD, [*params, wide])

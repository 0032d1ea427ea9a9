"""Processes that are forked between steps, and while another thread is within one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt.runtime.commit import Pending
from tests.cases.trainer import SIZES

#: Seconds after which a child that waits is ended.
PATIENCE = 60


class Twin:
    """Parameters, their optimizer, and what is called in place of its step."""

    def __init__(self, way: str, lanes: int) -> None:
        self.params = [torch.nn.Parameter(torch.ones(5)) for _ in range(lanes)]
        self.opt = torch.optim.SGD(self.params, lr=0.1, momentum=0.9)
        if way == "step":
            fuseopt.compile(self.opt, eager_if_faster=False)
        self.call: Any = self.opt.step
        if way == "backend":
            self.call = torch.compile(self.opt.step, backend="fuseopt")
        if way == "tail":
            self.call = fuseopt.tail(self.opt, eager_if_faster=False)

    def step(self) -> None:
        for p in self.params:
            p.grad = torch.ones_like(p)
        self.call()

    def is_like(self, other: Twin) -> bool:
        """Have both the same parameters and the same state?"""
        pairs = [
            (x, y)
            for p, q in zip(self.params, other.params, strict=True)
            for x, y in (
                (p, q),
                (
                    self.opt.state[p]["momentum_buffer"],
                    other.opt.state[q]["momentum_buffer"],
                ),
            )
        ]
        return all(torch.equal(x, y) for x, y in pairs)


WAYS = ("step", "backend", "tail")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")


def both(way: str, lanes: int) -> tuple[Twin, Twin]:
    """A twin and eager's, after three steps."""
    twins = Twin(way, lanes), Twin("eager", lanes)
    for _ in range(3):
        for twin in twins:
            twin.step()
    return twins


def told_by(child: Callable[[], bool]) -> str:
    """What becomes of a function in a forked process."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(PATIENCE)
        try:
            os.write(writes, repr(child()).encode())
        except BaseException as error:
            os.write(writes, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writes)
    told = os.read(reads, 1000).decode()
    os.close(reads)
    os.waitpid(pid, 0)
    return told


@pytest.mark.family(12)
@needs_fork
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lanes", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_a_child_goes_on_and_compiles_another(way: str, lanes: int) -> None:
    fused, eager = both(way, lanes)

    def child() -> bool:
        for _ in range(3):
            fused.step()
            eager.step()
        other, twin = both(way, lanes)
        return fused.is_like(eager) and other.is_like(twin)

    assert told_by(child) == "True"
    for _ in range(2):
        fused.step()
        eager.step()
    assert fused.is_like(eager)


@pytest.mark.family(12)
@needs_fork
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lanes", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_workers_of_a_loader_between_steps(way: str, lanes: int) -> None:
    fused, eager = both(way, lanes)
    for _ in torch.utils.data.DataLoader(range(4), num_workers=2, timeout=PATIENCE):
        fused.step()
        eager.step()
    assert fused.is_like(eager)


@pytest.mark.slow
@needs_fork
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lanes", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_children_of_a_process_whose_thread_steps(way: str, lanes: int) -> None:
    """At any place of a step; a child compiles its own, and steps that one too."""
    fused, eager = both(way, lanes)
    stops = threading.Event()

    def run() -> None:
        while not stops.is_set():
            fused.step()
            eager.step()

    def child() -> bool:
        other, twin = both(way, lanes)
        fused.step()
        return other.is_like(twin)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        told = {told_by(child) for _ in range(6)}
    finally:
        stops.set()
        thread.join()
    assert told == {"True"}
    assert fused.is_like(eager)


def _child(twin: Twin, finish: Any, writes: int) -> None:
    """Step once in a forked process, which ends here; tell what became of it."""
    signal.alarm(PATIENCE)
    try:
        Pending.finish = finish  # type: ignore[method-assign]
        twin.step()
        os.write(writes, repr(float(twin.params[3][0].item())).encode())
    except BaseException as error:
        os.write(writes, repr(error).encode())
    finally:
        os._exit(0)


@pytest.mark.slow
@needs_fork
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lanes", SIZES)
@pytest.mark.parametrize("way", ["step", "tail"])
def test_a_child_steps_what_another_thread_was_stepping(
    way: str, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread is within the step, with the lock of the optimizer, at the fork."""
    fused, eager = both(way, lanes)
    finish, within, on = Pending.finish, threading.Event(), threading.Event()

    def slow(*args: Any) -> None:
        within.set()
        assert on.wait(2 * PATIENCE)
        finish(*args)

    monkeypatch.setattr(Pending, "finish", slow)
    thread = threading.Thread(target=fused.step)
    thread.start()
    try:
        assert within.wait(PATIENCE)
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            _child(fused, finish, writes)
        os.close(writes)
        told = os.read(reads, 1000).decode()
        os.close(reads)
        os.waitpid(child, 0)
    finally:
        on.set()
        thread.join()
    monkeypatch.undo()
    eager.step()
    # the step of the thread was not begun in the child, and is done in the parent
    assert told == repr(float(eager.params[3][0].item()))
    assert torch.equal(fused.params[3], eager.params[3])
    fused.step()
    eager.step()
    assert torch.equal(fused.params[3], eager.params[3])

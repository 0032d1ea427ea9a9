"""Processes that are forked while another thread is within a step."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt.runtime.commit import Pending

#: Seconds after which a child that waits is ended.
PATIENCE = 60


class Twin:
    """Parameters, their optimizer, and what is called in place of its step."""

    def __init__(self, way: str) -> None:
        self.params = [torch.nn.Parameter(torch.ones(5)) for _ in range(18)]
        self.opt = torch.optim.SGD(self.params, lr=0.1, momentum=0.9)
        if way == "step":
            fuseopt.compile(self.opt, eager_if_faster=False)
        self.call: Any = self.opt.step
        if way == "tail":
            self.call = fuseopt.tail(self.opt, eager_if_faster=False)

    def step(self) -> None:
        for p in self.params:
            p.grad = torch.ones_like(p)
        self.call()


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
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["step", "tail"])
def test_a_child_steps_what_another_thread_was_stepping(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread is within the step, with the lock of the optimizer, at the fork."""
    fused, eager = Twin(way), Twin("eager")
    for _ in range(3):
        fused.step()
        eager.step()
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

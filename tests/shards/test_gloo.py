"""Processes that used gloo end when its threads wait for work."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import pytest
import torch

from tests.shards.gloo import WORKER, wait_for_workers

_NAME = 15  # PR_SET_NAME


@pytest.mark.parametrize("busy", ["with the GIL", "without"])
def test_waits_for_a_thread_that_works(busy: str) -> None:
    named, end, done = threading.Event(), time.monotonic() + 0.5, threading.Event()
    ones = torch.ones(1 << 20)

    def work() -> None:
        ctypes.CDLL(None).prctl(_NAME, WORKER.encode())
        named.set()
        while time.monotonic() < end:
            if busy == "without":
                ones.add_(1)
        ended.append(done.is_set())
        stop.wait()

    ended: list[Any] = []
    stop = threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    try:
        named.wait()
        wait_for_workers()
        done.set()
        assert ended == [False]
    finally:
        stop.set()
        thread.join()


def test_returns_where_no_thread_works() -> None:
    wait_for_workers()

"""How a process that used gloo ends.

A thread of gloo takes the GIL as it drops the tensors of its last work. The group
waits for the work, and not for the thread; groups of DDP and of device meshes outlive
`destroy_process_group`. Python that ends meanwhile ends the thread within a destructor,
and C++ aborts the process (pytorch/pytorch#179291, #190489; the plain optimizer, too).
"""

from __future__ import annotations

import time
from pathlib import Path

WORKER = "pt_gloo_runloop"  # what torch calls the threads that do a group's works


def wait_for_workers() -> None:
    """Return when each of gloo's threads waits for work.

    The caller has waited for all works, those of other processes too. A thread that
    waits for the GIL wakes while this one sleeps, which its switches show.
    """
    before = _workers()
    while True:
        time.sleep(0.02)  # 4 times as long as a thread waits for the GIL in one go
        now = _workers()
        if now == before and all("S (sleeping)" in states for states in now.values()):
            return
        before = now


def _workers() -> dict[str, tuple[str, ...]]:
    """The state of each thread of gloo, and how often it was switched, by its path."""
    found = {}
    for status in Path("/proc/self/task").glob("*/status"):
        try:
            text = status.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has ended
        lines = dict(line.split(":\t", 1) for line in text.splitlines())
        if lines["Name"] == WORKER:
            kept = ("State", "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
            found[str(status)] = tuple(lines[name] for name in kept)
    return found

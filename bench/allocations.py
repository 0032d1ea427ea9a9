"""In: what runs in regions. Out: bytes that torch's allocator had given at their peaks.

Exact, and the same in each run: torch's profiler tells of each allocation on a CPU and
of each end of one. What was allocated before `Allocations` begins is not counted, nor
is memory that no tensor has.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import record_function


class Allocations:
    """Counts while it is entered; `region(name)` names what runs within."""

    def __init__(self) -> None:
        self._profile: Any = torch.autograd.profiler.profile(profile_memory=True)
        self._events: list[dict[str, Any]] = []

    def __enter__(self) -> Allocations:
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            found = json.loads(path.read_text("utf-8"))["traceEvents"]
        self._events = sorted((e for e in found if "ts" in e), key=lambda e: e["ts"])

    @staticmethod
    def region(name: str) -> record_function:
        """A region of this name, to be entered."""
        return record_function(name)

    def peaks(self, name: str) -> list[int]:
        """The most bytes there were in each region of this name, after the end."""
        sizes: dict[int, int] = {}
        found: list[int] = []
        now = end = 0
        for event in self._events:
            if event["name"] == "[memory]":
                at, size = event["args"]["Addr"], event["args"]["Bytes"]
                if size > 0:
                    sizes[at] = size
                    now += size
                else:  # of what was there before, nothing is known
                    now -= sizes.pop(at, 0)
                if found and event["ts"] <= end:
                    found[-1] = max(found[-1], now)
            elif event["name"] == name and "dur" in event:
                found.append(now)
                end = event["ts"] + event["dur"]
        return found

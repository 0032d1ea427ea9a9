"""Put the recorder in front of `fuseopt.compile`, for measurements and tests alone.

A step that the recorder refuses goes the way that it goes today.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

from fuseopt import compat
from fuseopt.isolate import compile as compiling
from fuseopt.isolate.isolated import TRACES, Isolated

from .step import RecordedStep


class RecordedIsolated(Isolated):
    """A step that is recorded where it can be. `every`: all that were made."""

    every: ClassVar[list[RecordedIsolated]] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.recorder = RecordedStep(self.function)
        self.steps = [0, 0]  # recorded, others
        RecordedIsolated.every.append(self)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do a step by a recording, or as today."""
        optimizer = self.owner()
        if optimizer is not None and len(args) == 1 and not kwargs:
            if not self.recorder.why and compat.stance() in TRACES:
                with self.lock:
                    if self.recorder.step(optimizer):
                        self.steps[0] += 1
                        return None
        self.steps[1] += 1
        return super().run(args, kwargs)


@contextmanager
def recorded() -> Iterator[list[RecordedIsolated]]:
    """Within this, `fuseopt.compile` and `torch.compile(opt.step)` record steps."""
    RecordedIsolated.every.clear()
    with mock.patch.object(compiling, "Isolated", RecordedIsolated):
        yield RecordedIsolated.every

"""Upload the words of kernels' tables that change between launches.

Addresses and hyperparameters of every kernel on a device lie in one *arena*: words in
host memory and their copy on the device. Tables write the host's words and report
which. `push` sends the changed range in one asynchronous copy. So a step whose
gradients moved and whose learning rate changed costs one small copy.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from ... import compat
from ...errors import LaunchError
from ..devices import is_remote

#: Regions begin at multiples of this number of words: a line of a cache.
LINE = 16
#: Most copies that wait on a device before the host waits for the oldest.
STAGES = 16
#: First number of steps that the user may capture before the next call outside of a
#: capture. It doubles each time that was too few.
SPARES = 4
NOTHING = array("q", (0, 0))


def rounded(words: int) -> int:
    """Round words up to the end of a line."""
    return -(-words // LINE) * LINE


class _Stage:
    """Pinned memory for one copy of words, and the event after it.

    The views of a copy are made when its range is another than the last copy's.
    """

    def __init__(self, words: torch.Tensor, device: torch.device) -> None:
        self.words = words
        self.done = torch.Event(device)
        self._range: tuple[int, int] | None = None
        self._views: list[torch.Tensor] = []

    def send(self, low: int, high: int, arena: Arena, stream: Any) -> None:
        """Copy words low to high of an arena to its device on the current stream."""
        if self._range != (low, high):
            every = arena.host, self.words, arena.device
            self._views = [words[low:high] for words in every]
            self._range = low, high
        host, stage, device = self._views
        stage.copy_(host)
        device.copy_(stage, non_blocking=True)
        self.done.record(stream)


class Arena:
    """int64 words on the host and their copy on a device; on a CPU they are one tensor.

    A copy reads pinned memory, which must stay unchanged until the copy is done. So
    each copy takes a *stage* from a ring, with an event that marks when it is free.
    """

    def __init__(self, words: int, device: torch.device, wanted: int = SPARES) -> None:
        self.at = device
        self.remote = is_remote(device)
        #: words of lanes, which stand before all others
        self.lanes = words
        self.host = torch.zeros(words, dtype=torch.int64)
        self.device = (
            torch.empty(words, dtype=torch.int64, device=device)
            if self.remote
            else self.host
        )
        #: the words that the device lacks: from, to
        self.range = array("q", (0, words))
        #: called when tables must write all their addresses
        self.when_stale: list[Callable[[], object]] = []
        self._stream = compat.stream_on(device) if self.remote else None
        self._ring: deque[_Stage] = deque()
        # a capture may not make pinned memory
        self.wanted = wanted if self.remote else 0
        self._spares = [self._pinned() for _ in range(self.wanted)]
        #: streams that may read the device's words; first the one that allocated them
        self._streams: list[Any] = []

    def _pinned(self) -> torch.Tensor:
        return torch.empty(len(self.host), dtype=torch.int64, pin_memory=True)

    def changed(self, low: int, high: int) -> None:
        """Mark words low to high of the host as different from the device's."""
        before, end = self.range
        if before == end:
            self.range[:] = array("q", (low, high))
        elif low < high:
            self.range[:] = array("q", (min(before, low), max(end, high)))

    def push(self) -> None:
        """Copy the changed words to the device on the current stream, which must not be
        capturing.
        """
        while len(self._spares) < self.wanted:
            self._spares.append(self._pinned())
        low, high = self.range
        if low == high:
            return
        if self._stream is not None:
            stage = self._stage()
            stage.send(low, high, self, self._stream())
            self._ring.append(stage)
        self.range[:] = NOTHING

    def follow(self, tables: Iterable[Settles]) -> None:
        """Record that the current stream reads these words and the constants of the
        tables on this device. The allocator then reuses their memory only after the
        stream's work.
        """
        if self._stream is None:
            return
        stream = self._stream()
        if self._streams and stream == self._streams[-1]:
            return
        if stream in self._streams:
            self._streams.remove(stream)
        elif self._streams:
            here = [table for table in tables if table.place == self.at]
            for t in (self.device, *(x for table in here for x in table.constants)):
                t.record_stream(stream)
        self._streams.append(stream)

    def _stage(self) -> _Stage:
        """Return pinned memory that no copy reads any more."""
        if self._ring:
            free = self._ring[0].done.query()
            if not free and len(self._ring) == STAGES:
                self._ring[0].done.synchronize()
                free = True
            if free:
                return self._ring.popleft()
        return _Stage(self._pinned(), self.at)

    def frozen(self, every: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the present words, for a capture under way on the current stream:
        every one, or those of lanes.

        These are the device's words and their pinned source. The copy between them is
        part of the capture, and each replay repeats it. Both must live as long as the
        graph. Raises LaunchError where no such memory is left.
        """
        if not self._spares:
            self.wanted *= 2
            raise LaunchError(
                f"a CUDA graph capture is active on {self.at}, and earlier captures of "
                "the step used all its pinned memory. Run the step once outside of a "
                "capture, which allocates more"
            )
        stage = self._spares.pop()
        stage.copy_(self.host)
        words = torch.empty_like(self.device)
        end = len(words) if every else self.lanes
        words[:end].copy_(stage[:end], non_blocking=True)
        return words, stage


class Settles(Protocol):
    """Interface of a table with words in an arena, some for lanes and some for rows
    (`words`). Its `constants` lie in separate memory.
    """

    @property
    def place(self) -> torch.device | None:
        """The table's device."""

    @property
    def words(self) -> tuple[int, int]:
        """See above."""

    @property
    def constants(self) -> tuple[torch.Tensor, ...]:
        """See above."""

    def settle(self, arena: Arena, lanes: int, rows: int) -> None:
        """Take the table's words, from `lanes` and from `rows` on."""


def settle_together(
    tables: Iterable[Settles], before: Sequence[Arena] = ()
) -> list[Arena]:
    """Place tables in an arena, one for each device.

    `before` are the arenas that these replace; they have counted the captures.

    All rows stand behind all lanes: when only numbers changed, only rows are sent.
    """
    wanted = {arena.at: arena.wanted for arena in before}
    by_place: dict[torch.device, list[Settles]] = {}
    for table in tables:
        if table.place is not None:
            by_place.setdefault(table.place, []).append(table)
    arenas = []
    for place, group in by_place.items():
        lanes = sum(rounded(t.words[0]) for t in group)
        words = lanes + sum(rounded(t.words[1]) for t in group)
        arena = Arena(words, place, wanted.get(place, SPARES))
        arena.lanes = lanes
        at, rows_at = 0, lanes
        for table in group:
            table.settle(arena, at, rows_at)
            at += rounded(table.words[0])
            rows_at += rounded(table.words[1])
        arenas.append(arena)
    return arenas

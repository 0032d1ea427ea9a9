"""An interrupt while hooks are put, or taken back, leaves none of them in torch.

The next trace has all of them again, wherever the interrupt came.
"""

from __future__ import annotations

import linecache
import os
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import fuseopt
from fuseopt.compat.capability import switches
from fuseopt.compat.patches import _ABSENT, Change, Patches, patches
from tests.steps import make_params, set_grads

HOME = os.path.dirname(fuseopt.__file__)


@pytest.fixture(autouse=True)
def ready() -> Iterator[None]:
    """A backend is attached, and no trace of this test's outlives it."""
    import torch

    params = make_params([(3, 4)])
    set_grads(params, params, 1)
    fuseopt.compile(torch.optim.SGD(params, lr=0.1)).step()
    yield
    sys.settrace(None)
    assert _is_open(patches._lock)
    patches.settle(patches.token)
    switches.changed()
    patches.build()


def _is_open(lock: Any) -> bool:
    """May another thread have it?"""
    with ThreadPoolExecutor(1) as other:
        return other.submit(_taken, lock).result()


def _taken(lock: Any) -> bool:
    taken: bool = lock.acquire(blocking=False)
    if taken:
        lock.release()
    return taken


class Lines:
    """Counts the lines of fuseopt's that run, and interrupts what runs at one of them.

    A line that begins with `with` is none: the event of its end comes before the
    context is left, where no signal is handled, and a lock would stay closed.
    """

    def __init__(self, interrupted: int = -1) -> None:
        self.interrupted = interrupted
        self.count = 0

    def _local(self, frame: Any, event: str, _: Any) -> Any:
        if event == "line" and not _begins_with(frame):
            self.count += 1
            if self.count == self.interrupted:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._local

    def _begins(self, frame: Any, event: str, _: Any) -> Any:
        inside = frame.f_code.co_filename.startswith(HOME)
        return self._local if inside else None

    def run(self, function: Callable[[], object]) -> bool:
        """Was it cut off?"""
        sys.settrace(self._begins)
        try:
            function()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False


def _begins_with(frame: Any) -> bool:
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return line.lstrip().startswith("with ")


def cut(run: Callable[[], object], k: int) -> bool:
    """Run something, and interrupt it at the k-th line of fuseopt's; was it cut off?"""
    return Lines(k).run(run)


def lines_of(run: Callable[[], object]) -> int:
    """How many lines of fuseopt's it takes."""
    lines = Lines()
    lines.run(run)
    return lines.count


def value_at(change: Change) -> Any:
    """What torch has now where a hook is put."""
    if not change.item:
        return vars(change.owner).get(change.key, _ABSENT)
    table = change.owner
    if isinstance(table, dict):
        return table.get(change.key, _ABSENT)
    return table[change.key]


def left(changes: list[Change]) -> list[str]:
    """The places in which torch is another than it was."""
    return [
        f"{x.owner!r}.{x.key!r}"[:100]
        for x in changes
        if value_at(x) is not x.before and value_at(x) != x.before
    ]


def anew(watched: Patches) -> list[Change]:
    """All changes, found out once more."""
    switches.changed()
    watched.build()
    return watched._changes


def places(changes: list[Change]) -> list[tuple[int, Any]]:
    return [(id(x.owner), x.key) for x in changes]


def build() -> None:
    switches.changed()
    patches.build()


def trace() -> None:
    token = object()
    patches.enter(token)
    patches.settle(token)


@pytest.mark.parametrize("run", [build, trace], ids=lambda f: f.__name__)
def test_nothing_is_left(run: Callable[[], None]) -> None:
    known = anew(patches)
    assert len(known) > 100
    assert not left(known)
    n = lines_of(run)
    assert n > 100
    chance = random.Random(1)
    for k in (1, 2, 3, n, *(chance.randint(1, n) for _ in range(25))):
        assert cut(run, k)
        if chance.random() < 0.3:
            cut(run, chance.randint(1, n))  # and once more
        token = object()
        patches.enter(token)
        assert [value_at(x) is x.after for x in patches._changes].count(False) == 0
        patches.settle(token)
        assert not left(known), f"line {k} of {n}"
        assert places(patches._changes) == places(known)


@pytest.mark.slow
def test_a_first_step_after_an_interrupt_is_compiled() -> None:
    """The hooks that were half put are all there in the next trace."""
    import torch

    for k in (50, 500, 2000, 4000):
        switches.changed()
        assert cut(patches.build, k)
        params = make_params([(3, 4), (5,)])
        set_grads(params, params, 1)
        opt = fuseopt.compile(torch.optim.AdamW(params, lr=0.1))
        opt.step()
        assert not fuseopt.reports()[-1].fallback

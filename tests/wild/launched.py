"""How many kernels were launched while a training ran, whoever asked for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from fuseopt.runtime.binding import Binding
from fuseopt.runtime.executor import DirectExecutor


class Launched:
    """`count`: kernels that were launched since this was made."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, bound: Binding) -> None:
        """Count the kernels of a plan, which is run once."""
        self.count += len(bound.plan.schedule.kernels)


@contextmanager
def launched() -> Iterator[Launched]:
    """Counts from here on. Launches that are put off are counted when they are done."""
    made = Launched()
    put_off, run = Binding.launches, DirectExecutor.run

    def launches(self: Binding, threads: int) -> list[Callable[[], object]]:
        return [functools.partial(made.add, self), *put_off(self, threads)]

    def at_once(self: DirectExecutor, bound: Binding, *args: Any) -> Any:
        made.add(bound)
        return run(self, bound, *args)

    with (
        mock.patch.object(Binding, "launches", launches),
        mock.patch.object(DirectExecutor, "run", at_once),
    ):
        yield made

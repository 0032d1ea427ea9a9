"""What each step of a training takes: time, calls of ATen, launches."""

from __future__ import annotations

import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from bench.counting import _Calls
from tests.wild.launched import Launched
from tests.wild.trained import Compile


@dataclass(frozen=True)
class Call:
    """One call of a step or of a tail: when it began, which one's it was, the seconds
    of what is not its closure, and how many calls of ATen and launches it made.
    """

    begun: float
    owner: int
    seconds: float
    aten: int
    launches: int


@dataclass
class Watch:
    """A `Compile` that watches what it was given, after it has been changed.

    `counting`: calls of ATen are counted, which takes time.
    """

    change: Compile
    launched: Launched
    counting: bool = False
    calls: list[Call] = field(default_factory=list)
    owners: int = 0
    outside: float = 0.0
    outside_aten: int = 0

    def __call__(self, given: Any) -> Any:
        changed = self.change(given)
        name = "step" if isinstance(given, Optimizer) else "tail"
        inner, owner = getattr(given, name), self.owners
        self.owners += 1

        def watched(_: Any, *args: Any, **kwargs: Any) -> Any:
            return self.take(owner, inner, args, kwargs)

        setattr(given, name, types.MethodType(watched, given))
        return changed

    def take(
        self, owner: int, inner: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Call a step, and write down what it did."""
        counter = _Calls()
        args = [self.apart(x, counter) for x in args]
        kwargs = {name: self.apart(x, counter) for name, x in kwargs.items()}
        self.outside, self.outside_aten, before = 0.0, 0, self.launched.count
        begun = time.perf_counter()
        if self.counting:
            with counter:
                result = inner(*args, **kwargs)
        else:
            result = inner(*args, **kwargs)
        seconds = time.perf_counter() - begun - self.outside
        aten, launches = counter.count - self.outside_aten, self.launched.count - before
        self.calls.append(Call(begun, owner, seconds, aten, launches))
        return result

    def apart(self, given: Any, counter: _Calls) -> Any:
        """A closure, forward and backward say, which is no part of the step."""
        if not callable(given):
            return given

        def closure(*args: Any, **kwargs: Any) -> Any:
            begun, known = time.perf_counter(), counter.count
            try:
                return given(*args, **kwargs)
            finally:
                self.outside += time.perf_counter() - begun
                self.outside_aten += counter.count - known

        return closure

    def settled(self) -> list[Call]:
        """The second half of all calls, where nothing is compiled any more."""
        return self.calls[len(self.calls) // 2 :]

    def iterations(self) -> float:
        """So many iterations are in these; each steps every optimizer once."""
        return len(self.settled()) / self.owners

    def step_seconds(self) -> float:
        """The least seconds of each owner's calls, added up."""
        taken: dict[int, list[float]] = {}
        for call in self.settled():
            taken.setdefault(call.owner, []).append(call.seconds)
        return sum(map(min, taken.values()))

    def share(self) -> float:
        """The share of the time of an iteration that is spent in steps."""
        calls = self.settled()
        whole = calls[-1].begun - calls[0].begun
        return sum(call.seconds for call in calls[:-1]) / whole

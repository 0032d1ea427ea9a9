"""In: functions that do the same work. Out: seconds of each call, taken in turns.

Machines drift: a clock that falls or a neighbour that wakes changes every figure
taken after it. Turns spread the drift over all contenders alike, and the order
rotates so that nobody always runs after the same one, on the cache that one left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

Seconds = dict[str, list[float]]

#: a contender so slow that its rounds would take all the time has at least these
LEAST_ROUNDS = 3


class Turns:
    """Calls each contender once a round, in another order each round.

    `every`: a contender named here has its turn in each so-manieth round only.
    """

    def __init__(
        self,
        contenders: Mapping[str, Callable[[], object]],
        every: Mapping[str, int] | None = None,
    ) -> None:
        self.contenders = dict(contenders)
        self.every = dict(every or {})
        self.rounds = 0
        self.seconds: Seconds = {name: [] for name in contenders}

    def round(self, but: str | None = None) -> None:
        """Let all have their turn, save `but`, which is called elsewhere."""
        names = list(self.contenders)
        start = self.rounds % len(names)
        for name in names[start:] + names[:start]:
            if name != but and self.rounds % self.every.get(name, 1) == 0:
                self.take(name)
        self.rounds += 1

    def take(self, name: str) -> None:
        """Call one contender and keep its seconds."""
        self.seconds[name].append(seconds_of(self.contenders[name]))

    def figures(self) -> dict[str, dict[str, float]]:
        """Of each contender its median, its fastest tenth and its rounds."""
        return {
            name: {"p50": median(taken), "p10": p10(taken), "rounds": len(taken)}
            for name, taken in self.seconds.items()
        }


def interleave(
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    every: Mapping[str, int] | None = None,
    after_round: Callable[[], object] = lambda: None,
) -> Seconds:
    """Call each contender once a round; return its seconds, one figure a round.

    `every` as in Turns. `after_round` runs unmeasured, to move a progress bar say.
    """
    turns = Turns(contenders, every)
    for _ in range(rounds):
        turns.round()
        after_round()
    return turns.seconds


def plan_rounds(
    once: Mapping[str, float], budget: float, most: int
) -> tuple[int, dict[str, int]]:
    """Return how many rounds fit into `budget` seconds, and `every` for the slow.

    `once`: seconds of one call of each. Whoever would take more than an equal share
    has fewer turns, LEAST_ROUNDS at least; these are made even where they take longer
    than the budget.
    """
    share = budget / len(once)
    fits = [share / max(seconds, 1e-9) for seconds in once.values()]
    rounds = int(min(most, max(LEAST_ROUNDS, *fits)))
    every = {}
    for name, fit in zip(once, fits, strict=True):
        turns = max(LEAST_ROUNDS, int(fit))
        if rounds // turns > 1:
            every[name] = rounds // turns
    return rounds, every


def seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds that one call takes, with all it queues on a GPU."""
    finish_gpu()
    begin = time.perf_counter()
    call()
    finish_gpu()
    return time.perf_counter() - begin


def host_seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds until a call returns: on a GPU its work may still run."""
    finish_gpu()
    begin = time.perf_counter()
    call()
    taken = time.perf_counter() - begin
    finish_gpu()
    return taken


def finish_gpu() -> None:
    """Wait for the work queued on the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def p10(taken: list[float]) -> float:
    """Return the value that a tenth of these lies below: what a quiet machine gives."""
    ordered = sorted(taken)
    return ordered[int(0.1 * (len(ordered) - 1))]

"""In: functions that do the same work. Out: seconds of each call, taken in turns.

Machines drift: a clock that falls or a neighbour that wakes changes every figure
taken after it. Turns spread the drift over all contenders alike, and the order
rotates so that nobody always runs after the same one, on the cache that one left.
"""

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Seconds = dict[str, list[float]]


def interleave(
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    after_round: Callable[[], object] = lambda: None,
) -> Seconds:
    """Call each contender once a round; return its seconds, one figure a round.

    `after_round` runs unmeasured after each round, to move a progress bar say.
    """
    names = list(contenders)
    seconds: Seconds = {name: [] for name in names}
    for turn in range(rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            seconds[name].append(seconds_of(contenders[name]))
        after_round()
    return seconds


def seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds that one call takes, with all it queues on a GPU."""
    finish_gpu()
    begin = time.perf_counter()
    call()
    finish_gpu()
    return time.perf_counter() - begin


def finish_gpu() -> None:
    """Wait for the work queued on the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def medians(seconds: Seconds) -> dict[str, float]:
    """Return the median of each contender's seconds."""
    return {name: statistics.median(taken) for name, taken in seconds.items()}

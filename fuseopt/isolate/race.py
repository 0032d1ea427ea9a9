"""Time the compiled step of an optimizer and eager's in turns, and keep the faster.

Both give the same bits on a CPU, so either may do a few of the user's own steps. A
large step races as well. Its compiled form loses if its arithmetic takes longer than
its memory traffic, or if Dynamo cuts it into many graphs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from ..compiler.report import Report
from ..config import Config
from ..inputs.keys import KINDS

#: Calls at the beginning, and after each compilation, that are not timed.
WARM = 3
#: The number of times to time each way: two calls, of which the second counts.
ROUNDS = 8
#: After CLEAR_ROUNDS the compiled step has won if eager takes CLEAR times as long. One
#: round is not enough, since any single call may happen to be slow.
CLEAR_ROUNDS, CLEAR = 2, 1.5


def is_requested(config: Config) -> bool:
    """Do the options allow steps in eager, which have the same bits?"""
    exact = config.numerics == "eager" and not config.verify
    meant = config.fallback == "error" or config.target != "auto"
    return config.eager_if_faster and exact and not meant


def may_race(optimizer: Optimizer, config: Config, reports: Sequence[Report]) -> bool:
    """Can eager do a compiled step with the same bits, perhaps in less time?

    `reports`: those of the optimizer's compiled graphs.
    """
    if not is_requested(config):
        return False
    if all(r.fallback for r in reports):
        return False
    for group in optimizer.param_groups:
        # torch's own kernels have other bits; on a CPU eager refuses a capturable step
        if group.get("fused") or group.get("capturable"):
            return False
        # processes that share a DTensor must go the same way
        if any(type(p) not in KINDS or not p.is_cpu for p in group["params"]):
            return False
    return True


class Race:
    """Calls of one optimizer's step, some compiled and some in eager.

    `seconds`: those of the fastest call, compiled and in eager. `over`: True once the
    race is decided. `lost`: True if eager has won.
    """

    def __init__(self) -> None:
        self._begin(0)

    def _begin(self, graphs: int) -> None:
        """Start again, after Dynamo has compiled `graphs` graphs."""
        self._calls = 0
        self._graphs = graphs
        self.seconds = {"compiled": math.inf, "eager": math.inf}
        self.over = self.lost = False

    def step(
        self,
        compiled: Callable[[], Any],
        eager: Callable[[], Any],
        reports: Sequence[Report],
        may_race: Callable[[], bool],
    ) -> Any:
        """Do one step in the way whose turn it is; return its result.

        `reports`: those of all compiled graphs of the optimizer, also from this call.
        """
        turn = self._calls - WARM
        self._calls += 1
        if turn < 0:
            result = compiled()
        else:
            if turn == 0 and not may_race():
                self.over = True
            way = "eager" if turn % 4 >= 2 else "compiled"
            begun = time.perf_counter()
            result = eager() if way == "eager" else compiled()
            if turn % 2:
                taken = time.perf_counter() - begun
                self.seconds[way] = min(self.seconds[way], taken)
            if turn % 4 == 3:
                self._judge((turn + 1) // 4)
        if len(reports) != self._graphs:
            # Dynamo compiled a graph: no time so far counts
            self._begin(len(reports))
        return result

    def _judge(self, rounds: int) -> None:
        compiled, eager = self.seconds["compiled"], self.seconds["eager"]
        clear = rounds >= CLEAR_ROUNDS and eager > CLEAR * compiled
        self.over = clear or rounds >= ROUNDS
        self.lost = self.over and eager < compiled

    def __str__(self) -> str:
        return (
            f"{1e3 * self.seconds['compiled']:.2f} ms compiled, "
            f"{1e3 * self.seconds['eager']:.2f} in eager"
        )

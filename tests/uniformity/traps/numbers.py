"""Numbers that are alike when a step is tried, and visible later; counts of lanes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from tests.uniformity.traps.base import Momentum, Trap

SEEN = [0]
TICKS = itertools.count(1)


class Warmup(Trap):
    """The user raises the rate of all lanes, from nothing."""

    rates = (0.0, 1e-4, 1e-3, 0.05, 0.5)
    turns = 5

    def before(self, turn, ps):
        for group in self.param_groups:
            group["lr"] = self.rates[turn]

    def rate(self, i, lr):
        return lr * (i + 1)

    def lane(self, i, p, group):
        p.sub_(p.grad, alpha=self.rate(i, group["lr"]))


class Capped(Warmup):
    def rate(self, i, lr):
        return min(lr, 0.1 / (i + 1))


class Floored(Warmup):
    rates = (0.5, 0.4, 0.3, 0.001, 0.0)

    def rate(self, i, lr):
        return max(lr, i / 1000)


class Raised(Warmup):
    rates = (1.0, 1.0, 1.0, 0.5, 2.0)

    def rate(self, i, lr):
        return lr**i


class Truncated(Warmup):
    def rate(self, i, lr):
        return int(lr * i * 10) / 10


class Rounded(Warmup):
    rates = (0.0, 0.5, 1.0, 0.125, 0.0625)

    def rate(self, i, lr):
        return round(lr, i // 4)


class Written(Warmup):
    """Through text, and back."""

    rates = (0.0, 0.5, 1.0, 0.123456789, 1 / 3)

    def rate(self, i, lr):
        return float(f"{lr:.{1 + i // 2}f}")


class Masked(Warmup):
    """`and`, `or`: what stands behind them shows when the rate is not zero."""

    def rate(self, i, lr):
        return lr and lr / (1 + i)


class Compared(Warmup):
    def rate(self, i, lr):
        return lr * (1 + (lr > 0.01 * i))


class Bits(Warmup):
    rates = (0, 0, 8, 3, 9)

    def rate(self, i, lr):
        return (lr >> (i % 4)) / 16


class Modulo(Warmup):
    rates = (0, 16, 32, 5, 7)

    def rate(self, i, lr):
        return (lr % (i + 1)) / 16


class InfinitelyFar(Warmup):
    def rate(self, i, lr):
        return min(lr, math.inf if i < 9 else 0.25)


class NotANumber(Warmup):
    """No comparison with NaN holds, until it is a number."""

    def ready(self, ps):
        self.limit = [math.nan] * 16

    def rate(self, i, lr):
        return 0.0 if lr > self.limit[i] else lr

    def before(self, turn, ps):
        super().before(turn, ps)
        if turn == 3:
            self.limit[9] = 0.001


class Cancelled(Warmup):
    """i - i: nothing, as long as the number is small enough to be exact."""

    rates = (0.25, 0.5, 0.25, 1e17, 0.1)

    def rate(self, i, lr):
        return ((lr + i) - i) * 1e-3 if lr < 1 else ((lr + i) - lr) * 1e-3


class NegativeZero(Warmup):
    rates = (0.0, 0.0, 1e-3, 0.0, -1e-3)

    def rate(self, i, lr):
        return math.copysign(0.1, lr * (1 if i < 9 else -1)) if lr else lr


class Norms(Trap):
    """The bound is out of reach, until gradients grow."""

    def ready(self, ps):
        self.clip = [100.0 + n for n in range(16)]

    def lane(self, i, p, group):
        norm = p.grad.norm()
        p.sub_(p.grad * (self.clip[i] / norm.clamp(min=self.clip[i])))

    def before(self, turn, ps):
        if turn > 1:
            for p in ps:
                p.grad.mul_(1000)


class NormsAsNumbers(Norms):
    def lane(self, i, p, group):
        p.sub_(p.grad / max(1.0, p.grad.norm().item() / self.clip[i]))


class Weighed(Trap):
    """A sum across lanes in which the weight of each is nothing."""

    def ready(self, ps):
        self.weights = [0.0] * 16

    @torch.no_grad()
    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        total = sum(w * p.grad.sum() for w, p in zip(self.weights, params, strict=True))
        for p in params:
            p.sub_(p.grad + total)

    def before(self, turn, ps):
        if turn == 2:
            self.weights[9] = 1.0


class WeighedByTheRate(Trap):
    """As above; the weight of all is the rate, which begins as nothing."""

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        before: Any = 0.0
        for p in group["params"]:
            p.sub_(p.grad + before * group["lr"])
            before = p.grad.sum()

    def before(self, turn, ps):
        self.param_groups[0]["lr"] = (0.0, 0.0, 0.1, 0.2, 0.3)[turn]


class CountsLanes(Trap):
    def ready(self, ps):
        self.seen = 0

    def scale(self, i, p, group):
        self.seen += 1
        return 2.0 if self.seen == 30 else 1.0


class CountsLanesOfTheClass(Trap):
    seen = 0

    def scale(self, i, p, group):
        type(self).seen += 1
        return 2.0 if type(self).seen == 30 else 1.0


class CountsLanesOfTheModule(Trap):
    def scale(self, i, p, group):
        SEEN[0] += 1
        return 2.0 if SEEN[0] == 30 else 1.0


class CountsWithItertools(Trap):
    def scale(self, i, p, group):
        return 2.0 if next(TICKS) == 30 else 1.0


class CountsBackwards(Trap):
    """A generator that is kept across steps."""

    def ready(self, ps):
        self.rates = (1.0 / (1 + n) for n in range(1000))

    def scale(self, i, p, group):
        return next(self.rates)


class Cycles(Trap):
    """A cycle whose length is that of two lanes; one more item, and it turns."""

    def ready(self, ps):
        self.rates = itertools.cycle((1.0, 1.0))

    def scale(self, i, p, group):
        return next(self.rates)

    def before(self, turn, ps):
        if turn == 2:
            self.rates = itertools.cycle((1.0, 2.0, 1.0))


class UsedUp(Trap):
    def ready(self, ps):
        self.queue = [1.0] * 40

    def scale(self, i, p, group):
        return self.queue.pop() if self.queue else 2.0


class CountsSteps(Trap):
    """An attribute that each step writes."""

    def ready(self, ps):
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        super().step()

    def scale(self, i, p, group):
        return 1.0 / self.count


class CountsStepsOfTheGroup(Trap):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step()

    def scale(self, i, p, group):
        return 1.0 / group["count"]


class CountsStepsByAMethod(Trap):
    def ready(self, ps):
        self.count = 0

    def tick(self):
        self.count += 1
        return self.count

    @torch.no_grad()
    def step(self, closure=None):
        now = self.tick()
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1 / now)


class EveryThird(CountsSteps):
    def scale(self, i, p, group):
        return 2.0 if self.count % 3 == i % 3 else 1.0


class LastRateKept(Trap):
    """The rate of the step before, written into the group."""

    def scale(self, i, p, group):
        before = group.get("before", group["lr"])
        if i == len(group["params"]) - 1:
            group["before"] = group["lr"]
        return before

    def before(self, turn, ps):
        self.param_groups[0]["lr"] = 0.1 * (turn + 1)


class RunningRate(Trap):
    """A Python number that goes from lane to lane."""

    @torch.no_grad()
    def step(self, closure=None):
        rate = self.param_groups[0]["lr"]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=rate)
            rate *= self.decay

    decay = 1.0

    def before(self, turn, ps):
        if turn == 2:
            type(self).decay = 0.5


class NumberOfTheState(Momentum):
    def scale(self, i, p, group):
        return 1.0 / self.state[p]["n"]

    def before(self, turn, ps):
        if turn == 3:
            self.state[ps[9]]["n"] = 40


class BranchOnTheState(Momentum):
    def scale(self, i, p, group):
        return 2.0 if self.state[p]["n"] > 5 else 1.0

    def before(self, turn, ps):
        if turn == 3:
            self.state[ps[9]]["n"] = 7


class KindOfTheNumber(Momentum):
    """An int becomes a float, a bool, a tensor in one lane."""

    def scale(self, i, p, group):
        return 1.0 / self.state[p]["n"]

    def before(self, turn, ps):
        if turn == 2:
            self.state[ps[9]]["n"] = 2.0
        if turn == 3:
            self.state[ps[8]]["n"] = True
        if turn == 4:
            self.state[ps[7]]["n"] = torch.tensor(4.0)

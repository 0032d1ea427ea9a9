"""Arithmetic of a count and a rate that depends on its order, for float64."""

from __future__ import annotations

import torch

from tests.cases.base import Scenario


class InOrder(Scenario):
    """`of` is computed as it is written."""

    abstract = True
    turns = 5
    start = 0

    @classmethod
    def params(cls, lanes):
        return [
            torch.nn.Parameter(torch.linspace(-1, k + 1, 5, dtype=torch.float64))
            for k in range(lanes)
        ]

    def before(self, turn, ps):
        self.param_groups[0]["lr"] = (0.1, 0.07, 0.013, 0.31, 0.0501)[turn]

    def lane(self, p, group):
        state = self.state[p]
        if not state:
            state["n"] = self.start
        state["n"] += 1
        p.add_(p.grad, alpha=self.of(state["n"], group["lr"]))


class HalfOfAHugeCount(InOrder):
    start = 2**60

    def of(self, n, rate):
        return 0.5 * n - 2.0**59 + 1


class CountTimesMinusPlus(InOrder):
    def of(self, n, rate):
        return n * 0.3 - 0.1 + 0.3


class PlusCountPlus(InOrder):
    def of(self, n, rate):
        return 0.1 + n * 0.7 + 0.2


class RateMinusPlus(InOrder):
    def of(self, n, rate):
        return rate - 0.1 + 0.3


class ThreeRates(InOrder):
    def of(self, n, rate):
        return 3 * rate * 0.1


class RateThrice(InOrder):
    def of(self, n, rate):
        return rate * 0.1 * 7 * 1.1


class CountOverTimes(InOrder):
    def of(self, n, rate):
        return n / 3 * 7


class CountTimesRate(InOrder):
    def of(self, n, rate):
        return 0.1 * n * rate * 3


class FloatAbsorbed(InOrder):
    def of(self, n, rate):
        return float(n) - 1e16 + 1e16


class CountAbsorbed(InOrder):
    def of(self, n, rate):
        return n + 1e16 - 1e16


class RateAbsorbed(InOrder):
    def of(self, n, rate):
        return rate + 1e16 - 1e16

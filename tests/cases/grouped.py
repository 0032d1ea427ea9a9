"""Groups, lists and rates of other classes."""

from __future__ import annotations

import fractions
import typing

import numpy as np
import torch

from tests.cases.base import Scenario


class NT(typing.NamedTuple):
    k: float
    n: int


class LrDict(dict):
    def __getitem__(self, k):
        v = dict.__getitem__(self, k)
        return v * 0.5 if k == "lr" else v


class GroupSubclass(Scenario):
    def ready(self, ps):
        self.param_groups[0] = LrDict(self.param_groups[0])


class CountingDict(dict):
    def __init__(self, *a):
        super().__init__(*a)
        self.reads = 0

    def __getitem__(self, k):
        if k == "lr":
            self.reads += 1
            return 1.0 / self.reads
        return dict.__getitem__(self, k)


class GroupCounts(Scenario):
    def ready(self, ps):
        self.param_groups[0] = CountingDict(self.param_groups[0])


class MissingDict(dict):
    def __missing__(self, k):
        return 0.5


class GroupMissing(Scenario):
    def ready(self, ps):
        self.param_groups[0] = MissingDict(self.param_groups[0])

    def scale(self, p, group):
        return group["k"]

    def before(self, turn, ps):
        if turn == 3:
            self.param_groups[0]["k"] = 0.25


class RevList(list):
    def __iter__(self):
        return reversed(list(list.__iter__(self)))


class ParamsReversed(Scenario):
    def ready(self, ps):
        self.param_groups[0]["params"] = RevList(self.param_groups[0]["params"])

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])


class SkipList(list):
    def __iter__(self):
        return (p for k, p in enumerate(list.__iter__(self)) if k % 3)


class ParamsSkip(Scenario):
    def ready(self, ps):
        self.param_groups[0]["params"] = SkipList(self.param_groups[0]["params"])


class ParamsTuple(Scenario):
    def ready(self, ps):
        self.param_groups[0]["params"] = tuple(self.param_groups[0]["params"])


class FloatLr(float):
    n = 0

    def __neg__(self):
        return -0.5 * float(self)


class LrFloatSubclass(Scenario):
    def ready(self, ps):
        self.param_groups[0]["lr"] = FloatLr(0.1)


class LrFraction(Scenario):
    def ready(self, ps):
        self.param_groups[0]["lr"] = fractions.Fraction(1, 3)

    def lane(self, p, group):
        p.add_(p.grad, alpha=-float(group["lr"] * group["lr"]))


class LrBool(Scenario):
    def ready(self, ps):
        self.param_groups[0]["lr"] = True

    def before(self, turn, ps):
        if turn == 2:
            self.param_groups[0]["lr"] = 1
        if turn == 3:
            self.param_groups[0]["lr"] = 1.0
        if turn == 4:
            self.param_groups[0]["lr"] = False

    def scale(self, p, group):
        return 0.5 if group["lr"] is True else 0.25


class LrNp32(Scenario):
    def ready(self, ps):
        self.param_groups[0]["lr"] = np.float32(0.1)

    def scale(self, p, group):
        return float(group["lr"] * 3)


class BetasNamed(Scenario):
    def ready(self, ps):
        self.param_groups[0]["betas"] = NT(0.9, 3)

    def scale(self, p, group):
        b = group["betas"]
        return b.k**b.n

    def before(self, turn, ps):
        self.param_groups[0]["betas"] = NT(0.9, 3 + turn)

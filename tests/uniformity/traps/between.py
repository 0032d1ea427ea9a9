"""Steps with one odd lane of many, where no lane of the rehearsal's sample stands.

The sample has the first, the last and the middle lane of a kind: of these 40 it has 0,
19 and 39. What is odd about lane 7, or shows with more lanes than the sample has, the
proof alone can see.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from tests.uniformity.traps.base import Momentum, Trap, fill

ODD = 7


class Between(Trap):
    lanes = 40
    shapes: Any = ((3, 4),)
    turns = 4


class ByItsPlace(Between):
    def scale(self, i, p, group):
        return 2.0 if i == ODD else 1.0


class ByHowManyThereAre(Between):
    def scale(self, i, p, group):
        return 2.0 if len(group["params"]) > 20 else 1.0


class ByHowManyHaveState(Between, Momentum):
    def scale(self, i, p, group):
        return 2.0 if len(self.state) > 20 else 1.0


class ByIdentity(Between):
    def ready(self, ps):
        self.odd = ps[ODD]

    def scale(self, i, p, group):
        return 2.0 if p is self.odd else 1.0


class BySlice(Between):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])
            for p in group["params"][ODD : ODD + 1]:
                p.mul_(0.5)


class ByAnIterator(Between):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])
            for p in itertools.islice(group["params"], ODD, ODD + 1):
                p.mul_(0.5)


class MeetsOneFarAway(Between):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            ps = group["params"]
            for p, far in zip(ps, ps[20:], strict=False):
                p.sub_(far.grad, alpha=group["lr"])


class MeetsTheOneBefore(Between):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            last = None
            for n, p in enumerate(group["params"]):
                if last is not None and n > 20:
                    p.sub_(last.grad, alpha=group["lr"])
                p.sub_(p.grad, alpha=group["lr"])
                last = p


class KeepsATensorOfOne(Between, Momentum):
    """The state of one lane is another's too."""

    def before(self, turn, ps):
        if turn == 2:
            self.state[ps[ODD]]["m"] = self.state[ps[ODD + 1]]["m"]


class CountsWithAnother(Between, Momentum):
    def before(self, turn, ps):
        if turn == 2:
            self.state[ps[ODD]]["n"] = 100

    def scale(self, i, p, group):
        return 2.0 if self.state[p]["n"] > 50 else 1.0


class HasAnotherKey(Between, Momentum):
    def before(self, turn, ps):
        if turn == 2:
            self.state[ps[ODD]]["odd"] = fill(ps[ODD], 2.0)

    def scale(self, i, p, group):
        return 2.0 if "odd" in self.state[p] else 1.0


class IsMarked(Between):
    def ready(self, ps):
        ps[ODD].odd = True

    def scale(self, i, p, group):
        return 2.0 if getattr(p, "odd", False) else 1.0


class ByATable(Between):
    def ready(self, ps):
        self.table = dict.fromkeys(ps, 1.0)
        self.table[ps[ODD]] = 2.0

    def scale(self, i, p, group):
        return self.table[p]


class SharesMemory(Between):
    """One lane is another's memory."""

    @classmethod
    def params(cls):
        made = super().params()
        made[ODD].data = made[ODD + 1].data
        return made

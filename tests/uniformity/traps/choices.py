# ruff: noqa: SIM108
"""One of two values, each the same for all lanes, chosen by what is a lane's own."""

from __future__ import annotations

from typing import Any

import torch

from tests.uniformity.traps.base import Trap


class Chosen(Trap):
    """Two rates of the group; the last lane is of the kind that comes first."""

    shapes = ((3, 4), (5,), (3, 4))

    def groups(self, ps: Any) -> Any:
        return [{"params": ps, "wide": 0.5, "narrow": 0.25, "lr": 0.1}]

    def ready(self, ps: Any) -> None:
        self.last = 1.0

    def rate(self, p: Any, group: Any) -> float:
        return group["wide"] if p.dim() > 1 else group["narrow"]

    def lane(self, i, p, group):
        rate = self.rate(p, group)
        p.sub_(p.grad, alpha=rate)
        self.keep(rate)

    def keep(self, rate: Any) -> None:
        """What becomes of it."""


class KeptOfTheLast(Chosen):
    """An attribute has what the last lane chose."""

    def lane(self, i, p, group):
        rate = self.rate(p, group)
        p.sub_(p.grad, alpha=rate * self.last)
        self.last = rate


class KeptByIf(KeptOfTheLast):
    def rate(self, p, group):
        if p.dim() > 1:
            rate = group["wide"]
        else:
            rate = group["narrow"]
        return rate


class KeptByReturn(KeptOfTheLast):
    def rate(self, p, group):
        if p.dim() > 1:
            return group["wide"]
        return group["narrow"]


class KeptByOr(KeptOfTheLast):
    def groups(self, ps):
        return [{"params": ps, "wide": 0.5, "narrow": 0.25, "zero": 0.0, "lr": 0.1}]

    def rate(self, p, group):
        return (p.dim() > 1) * group["wide"] or group["narrow"]


class KeptInGroup(Chosen):
    def groups(self, ps):
        return [{"params": ps, "wide": 0.5, "narrow": 0.25, "last": 1.0}]

    def lane(self, i, p, group):
        rate = self.rate(p, group)
        p.sub_(p.grad, alpha=rate * group["last"])
        group["last"] = rate


class AskedOf(Chosen):
    """What contents chose is asked for."""

    def rate(self, p, group):
        return group["wide"] if p.grad.sum().item() > 0 else group["narrow"]

    def lane(self, i, p, group):
        rate = self.rate(p, group)
        if rate == group["wide"]:
            p.mul_(0.9)
        p.sub_(p.grad, alpha=rate)


class AskedOfIf(AskedOf):
    def rate(self, p, group):
        if p.grad.sum().item() > 0:
            rate = group["wide"]
        else:
            rate = group["narrow"]
        return rate


class AskedOfReturn(AskedOf):
    def rate(self, p, group):
        if p.grad.sum().item() > 0:
            return group["wide"]
        return group["narrow"]


class AskedOfMin(AskedOf):
    def rate(self, p, group):
        return min(group["wide"], max(group["narrow"], p.grad.sum().item()))


class Unpacked(KeptOfTheLast):
    def rate(self, p, group):
        pair = (group["wide"], 1.0) if p.dim() > 1 else (group["narrow"], 1.0)
        rate, _ = pair
        return rate


class OutOfAList(KeptOfTheLast):
    def rate(self, p, group):
        rates = [group["wide"]] if p.dim() > 1 else [group["narrow"]]
        return rates[0]


class OutOfADict(KeptOfTheLast):
    def rate(self, p, group):
        rates = {"rate": group["wide"]}
        if p.dim() < 2:
            rates["rate"] = group["narrow"]
        return rates["rate"]


class Carried(Chosen):
    """A variable of the loop has what the lane before chose."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            rate = group["lr"]
            for p in group["params"]:
                p.sub_(p.grad, alpha=rate)
                rate = group["wide"] if p.dim() > 1 else group["narrow"]


class AfterTheLoop(Chosen):
    """What the last lane chose is used for all when the loop is done."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            rate = group["lr"]
            for p in group["params"]:
                rate = group["wide"] if p.dim() > 1 else group["narrow"]
                p.sub_(p.grad, alpha=rate)
            for p in group["params"]:
                p.mul_(1 - rate)


class AfterTheLoopByIf(Chosen):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            rate = group["lr"]
            for p in group["params"]:
                if p.dim() > 1:
                    rate = group["wide"]
                else:
                    rate = group["narrow"]
                p.sub_(p.grad, alpha=rate)
            self.last = rate
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - self.last / 10)


class AfterTheLoopLater(AfterTheLoop):
    """Both rates are one, until the user changes one of them."""

    def groups(self, ps):
        return [{"params": ps, "wide": 0.25, "narrow": 0.25, "lr": 0.1}]

    def before(self, turn, ps):
        if turn > 1:
            self.param_groups[0]["wide"] = 0.25 + turn / 16


class AfterTheLoopZero(AfterTheLoopLater):
    def groups(self, ps):
        return [{"params": ps, "wide": 0.0, "narrow": 0.0, "lr": 0.1}]

    def before(self, turn, ps):
        self.param_groups[0]["wide"] = (turn > 1) * turn / 16


class AfterTheLoopByOr(AfterTheLoopLater):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            rate = group["lr"]
            for p in group["params"]:
                rate = (p.dim() > 1 and group["wide"]) or group["narrow"]
                p.sub_(p.grad, alpha=rate)
            for p in group["params"]:
                p.mul_(1 - rate)


class AfterTheLoopByCall(AfterTheLoopLater):
    """Returned by a function, one way or the other."""

    def rate(self, p, group):
        if p.dim() > 1:
            return group["wide"]
        return group["narrow"]

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            rate = group["lr"]
            for p in group["params"]:
                rate = self.rate(p, group)
                p.sub_(p.grad, alpha=rate)
            for p in group["params"]:
                p.mul_(1 - rate)


class AfterTheLoopInADict(AfterTheLoopLater):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            rate = group["lr"]
            for p in group["params"]:
                rates = {True: group["wide"], False: group["narrow"]}
                rate = rates[p.dim() > 1]
                p.sub_(p.grad, alpha=rate)
            for p in group["params"]:
                p.mul_(1 - rate)


class AfterTheLoopInAList(AfterTheLoopLater):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            rate = group["lr"]
            for p in group["params"]:
                rates = [group["narrow"]]
                if p.dim() > 1:
                    rates = [group["wide"]]
                rate = rates[0]
                p.sub_(p.grad, alpha=rate)
            for p in group["params"]:
                p.mul_(1 - rate)


class AfterTheLoopInATuple(AfterTheLoopLater):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            rate = group["lr"]
            for p in group["params"]:
                pair = (group["narrow"], group["wide"])
                rate = pair[p.dim() > 1]
                p.sub_(p.grad, alpha=rate)
            for p in group["params"]:
                p.mul_(1 - rate)

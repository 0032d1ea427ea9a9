"""Tensors that lanes share, attributes that are not what they seem, draws."""

from __future__ import annotations

import collections
import itertools

import torch

from tests.cases.base import Scenario


class SharedCount(Scenario):
    def ready(self, ps):
        self.count = torch.zeros(())

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.count.add_(1)
                p.add_(p.grad, alpha=-group["lr"])


class SharedCountUsed(Scenario):
    def ready(self, ps):
        self.count = torch.zeros(())

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.count += 1
                p.sub_(p.grad * self.count, alpha=group["lr"])


class SharedTotal(Scenario):
    def ready(self, ps):
        self.total = torch.zeros(())

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.total.add_(p.grad.sum())
                p.sub_(p.grad, alpha=group["lr"])


class SharedScratch(Scenario):
    def ready(self, ps):
        self.scratch = torch.zeros(5)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim == 1:
                    self.scratch.copy_(p.grad)
                    p.sub_(self.scratch, alpha=group["lr"])


class SharedOut(Scenario):
    def ready(self, ps):
        self.scratch = torch.zeros(5)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim == 1:
                    torch.mul(p.grad, 2, out=self.scratch)
                    p.sub_(self.scratch, alpha=group["lr"])


class LrTensorMul(Scenario):
    def ready(self, ps):
        self.param_groups[0]["lr"] = torch.tensor(0.1)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                group["lr"].mul_(0.99)
                p.sub_(p.grad * group["lr"])


class LrTensorMulOnce(Scenario):
    def ready(self, ps):
        self.param_groups[0]["lr"] = torch.tensor(0.1)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"].mul_(0.99)
            for p in group["params"]:
                p.sub_(p.grad * group["lr"])


class StateProperty(Scenario):
    @property
    def lanes(self):
        return list(reversed(self.param_groups[0]["params"]))

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.lanes:
            p.add_(p.grad, alpha=-0.1)


class GroupsProperty(Scenario):
    """Groups are made anew at each look, of three parameters each."""

    def ready(self, ps):
        self._all = [{"params": list(ps), "lr": 0.1}]

    @property
    def param_groups(self):
        return [dict(g, params=g["params"][:3]) for g in self._all]

    @param_groups.setter
    def param_groups(self, v):
        self._all = v


class Meta(type):
    n = 0

    @property
    def rate(cls):
        Meta.n += 1
        return 1.0 / Meta.n


class MetaRate(Scenario, metaclass=Meta):
    rate = 1.0

    def ready(self, ps):
        Meta.n = 0

    def scale(self, p, group):
        return type(self).rate


class MetaIs(type):
    def __instancecheck__(cls, p):
        return getattr(p, "marked", False)


class Marked(metaclass=MetaIs):
    __module__ = "torch.mine"


class IsInstanceMeta(Scenario):
    def ready(self, ps):
        for k, p in enumerate(self.param_groups[0]["params"]):
            p.marked = k % 5 == 0

    def scale(self, p, group):
        return 2 if isinstance(p, Marked) else 1


class Retains(Scenario):
    def scale(self, p, group):
        return 2.0 if p.retains_grad else 1.0


class Version(Scenario):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p._version % 2:
                    p.mul_(0.5)
                p.add_(p.grad, alpha=-group["lr"])

    def before(self, turn, ps):
        with torch.no_grad():
            ps[3].add_(0)
            ps[8].add_(0)
            ps[8].add_(0)


class DimShadow(Scenario):
    def ready(self, ps):
        ps[6].dim = lambda: 7

    def scale(self, p, group):
        return p.dim()


class AddShadow(Scenario):
    def ready(self, ps):
        p = ps[6]
        p.add_ = lambda g, alpha: p.mul_(0.5)


class IsLeaf(Scenario):
    def scale(self, p, group):
        return 2.0 if p.grad.is_leaf else 1.0


class Contig(Scenario):
    def scale(self, p, group):
        return 2.0 if p.grad.is_contiguous() else 1.0

    def before(self, turn, ps):
        for k in (1, 7, 9):
            if turn >= 1:
                ps[k].grad = ps[k].grad.t().contiguous().t()


class Offset(Scenario):
    def scale(self, p, group):
        return 1 + p.grad.storage_offset()

    def before(self, turn, ps):
        for k in (0, 4, 8):
            ps[k].grad = torch.cat([torch.zeros(k), ps[k].grad])[k:]


class CountsWrites(Scenario):
    def ready(self, ps):
        self.calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            group["t"] = group.get("t", 0) + 1
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / (self.calls + group["t"]))


class DefaultDict(Scenario):
    def ready(self, ps):
        self.rates = collections.defaultdict(itertools.count(1).__next__)

    def scale(self, p, group):
        return self.rates[p.ndim]


class DefaultDictAll(Scenario):
    def ready(self, ps):
        self.c = itertools.count(1)
        self.rates = collections.defaultdict(lambda: next(self.c))

    def scale(self, p, group):
        return self.rates[p.ndim]


class RandLike(Scenario):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(torch.nn.functional.dropout(p.grad, 0.5), alpha=group["lr"])

    def before(self, turn, ps):
        torch.manual_seed(turn)


class RReLU(Scenario):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(
                    torch.nn.functional.rrelu(p.grad, training=True), alpha=group["lr"]
                )

    def before(self, turn, ps):
        torch.manual_seed(turn)


class Gumbel(Scenario):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(torch.poisson(p.grad.abs()), alpha=group["lr"])

    def before(self, turn, ps):
        torch.manual_seed(turn)

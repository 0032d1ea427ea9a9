"""What a proof that lanes are alike may take for such."""
# ruff: noqa: B023, C419

from __future__ import annotations

import torch

from tests.cases.base import FirstLacking, Scenario, SecondsLacking


class Frozen:
    n = 0

    def __class_getitem__(cls, i):
        return None if i == 2 else True


class ClassGetitem(Scenario):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if Frozen[p.ndim] is None:
                    continue
                p.add_(p.grad, alpha=-group["lr"])


class FrozenN:
    n = 0

    def __class_getitem__(cls, i):
        cls.n += 1
        return None if cls.n % 7 == 0 else True


class ClassGetitemCounts(Scenario):
    def ready(self, ps):
        FrozenN.n = 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if FrozenN[p.ndim] is None:
                    continue
                p.add_(p.grad, alpha=-group["lr"])


class Toggle:
    def __init__(self):
        self.n = 0

    def __call__(self):
        return 1

    def __bool__(self):
        self.n += 1
        return self.n % 10 != 0

    def __len__(self):
        self.n += 1
        return self.n

    def __getitem__(self, k):
        self.n += 1
        return 1.0 if self.n % 10 else 0.5

    def __contains__(self, k):
        self.n += 1
        return self.n % 10 != 0

    def __float__(self):
        return 0.25


class CallableBool(Scenario):
    def ready(self, ps):
        self.toggle = Toggle()

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if self.toggle:
                    p.add_(p.grad, alpha=-group["lr"])
                else:
                    p.add_(p.grad, alpha=group["lr"])


class CallableLen(Scenario):
    def ready(self, ps):
        self.toggle = Toggle()

    def scale(self, p, group):
        return 1.0 / len(self.toggle)


class CallableItem(Scenario):
    def ready(self, ps):
        self.toggle = Toggle()

    def scale(self, p, group):
        return self.toggle[p.ndim]


class CallableIn(Scenario):
    def ready(self, ps):
        self.toggle = Toggle()

    def scale(self, p, group):
        return 1.0 if p.ndim in self.toggle else 0.5


class FirstNdim(FirstLacking):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            ps = [p for p in group["params"] if p.grad is not None]
            if not ps:
                continue
            scale = 1.0 if ps[0].ndim == 1 else 0.5
            for p in ps:
                p.add_(p.grad, alpha=-group["lr"] * scale)


class FirstNdimDropAll1(FirstNdim):
    def before(self, turn, ps):
        if turn in (2, 4):
            for p in ps[::2]:
                p.grad = None


class FirstNext(FirstLacking):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first = next(p for p in group["params"] if p.grad is not None)
            scale = 1.0 if first.ndim == 1 else 0.5
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.add_(p.grad, alpha=-group["lr"] * scale)


class FirstSets(FirstLacking):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            nd = None
            for p in group["params"]:
                if p.grad is None:
                    continue
                if nd is None:
                    nd = p.ndim
                p.add_(p.grad, alpha=-group["lr"] * nd)


class FirstShape(FirstLacking):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            ps = [p for p in group["params"] if p.grad is not None]
            if not ps:
                continue
            n = ps[0].shape[0]
            for p in ps:
                p.add_(p.grad, alpha=-group["lr"] / n)


class FirstState(FirstLacking):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            k = None
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "k" not in state:
                    state["k"] = float(p.ndim)
                if k is None:
                    k = state["k"]
                p.add_(p.grad, alpha=-group["lr"] * k)


class AnyUpdate(Scenario):
    def upd(self, p, lr):
        p.add_(p.grad, alpha=-lr)
        return p.dim() == 2

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            any(self.upd(p, group["lr"]) for p in group["params"])


class AllUpdate(Scenario):
    def upd(self, p, lr):
        p.add_(p.grad, alpha=-lr)
        return p.dim() == 1

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            all([self.upd(p, group["lr"]) for p in group["params"]])
            all(self.upd(p, group["lr"]) for p in group["params"])


class AnyDim(SecondsLacking):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            two = any(p.dim() == 2 for p in group["params"] if p.grad is not None)
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * (2 if two else 1))


class AnyDimOnly1DThenOne(AnyDim):
    def before(self, turn, ps):
        super().before(turn, ps)
        if turn == 3:
            ps[5].grad = torch.ones_like(ps[5])


class Gather(SecondsLacking):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            found = False
            for p in group["params"]:
                if p.grad is None:
                    continue
                found |= p.dim() == 2
                p.add_(p.grad, alpha=-group["lr"])
            if found:
                for p in group["params"]:
                    p.mul_(0.9)


class GatherOnly1DThenOne(Gather):
    def before(self, turn, ps):
        super().before(turn, ps)
        if turn == 3:
            ps[5].grad = torch.ones_like(ps[5])


class LateClosure(Scenario):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            fs = [lambda: p.add_(p.grad, alpha=-group["lr"]) for p in group["params"]]
            for f in fs:
                f()


class LateClosure2(Scenario):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            fs = []
            for p in group["params"]:
                fs.append(lambda: p.add_(p.grad, alpha=-group["lr"]))
            for f in fs:
                f()


class BoundClosure(Scenario):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:

                def go(q=p):
                    q.add_(q.grad, alpha=-group["lr"])

                go()

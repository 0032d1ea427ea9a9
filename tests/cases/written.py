"""Gradients, groups and memory that a step writes, or that are laid out oddly."""

from __future__ import annotations

import torch

from tests.cases.base import Lacking, Scenario


class DropsGrads(Scenario):
    def lane(self, p, group):
        p.add_(p.grad, alpha=-group["lr"])
        p.grad = None


class ZeroesGrads(Scenario):
    def lane(self, p, group):
        p.add_(p.grad, alpha=-group["lr"])
        p.grad.zero_()


class HalvesGrads(Scenario):
    def lane(self, p, group):
        p.grad.mul_(0.5)
        p.add_(p.grad, alpha=-group["lr"])


class SetsGrads(Scenario):
    def lane(self, p, group):
        p.grad = p.grad * 0.5
        p.add_(p.grad, alpha=-group["lr"])


class NextGrad(Scenario):
    @torch.no_grad()
    def step(self, closure=None):
        ps = self.param_groups[0]["params"]
        for a, b in zip(ps, ps[2:], strict=False):
            a.add_(b.grad, alpha=-0.1)


class PopsGroup(Scenario):
    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        for p in group["params"]:
            p.add_(p.grad, alpha=-group["lr"])
        if len(group["params"]) > 28:
            group["params"].pop()


class RotatesParams(Scenario):
    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        for p in group["params"]:
            p.add_(p.grad, alpha=-group["lr"])
        group["params"] = group["params"][1:] + group["params"][:1]


class RoundRobin(Scenario):
    def ready(self, ps):
        self.k = 0

    @torch.no_grad()
    def step(self, closure=None):
        ps = self.param_groups[0]["params"]
        p = ps[self.k % len(ps)]
        self.k += 1
        p.add_(p.grad, alpha=-0.1)


class HalfAndHalf(Scenario):
    def ready(self, ps):
        self.k = 0

    @torch.no_grad()
    def step(self, closure=None):
        ps = self.param_groups[0]["params"]
        self.k += 1
        for p in ps[::2] if self.k % 2 else ps[1::2]:
            p.add_(p.grad, alpha=-0.1)


class DecaysRate(Scenario):
    def lane(self, p, group):
        p.add_(p.grad, alpha=-group["lr"])
        group["lr"] *= 0.99


class DecaysRateOnce(Scenario):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] *= 0.9
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])


class KeepsInGroup(Scenario):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["seen"] = [p.ndim for p in group["params"]]
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])


class TwoGroups(Scenario):
    def groups(self, ps):
        return [{"params": ps[::2]}, {"params": ps[1::2], "lr": 0.05}]

    @torch.no_grad()
    def step(self, closure=None):
        for k, group in enumerate(self.param_groups):
            for p in group["params"]:
                p.add_(
                    p.grad,
                    alpha=-group["lr"] * (k + 1)
                    if group is self.param_groups[0]
                    else -1.0,
                )


class GroupsEqual(Scenario):
    def groups(self, ps):
        return [{"params": ps[:16]}, {"params": ps[16:]}]

    @torch.no_grad()
    def step(self, closure=None):
        prev = None
        for group in self.param_groups:
            rate = 0.5 if prev == group["lr"] else 1.0
            prev = group["lr"]
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] * rate)

    def before(self, turn, ps):
        if turn == 3:
            self.param_groups[1]["lr"] = 0.2


class GroupSecondMissing(Lacking):
    lacking = ((), (), range(16), range(16, 32), range(15))

    def groups(self, ps):
        return [{"params": ps[:16]}, {"params": ps[16:]}]

    @torch.no_grad()
    def step(self, closure=None):
        total = 0
        for group in self.param_groups:
            n = 0
            for p in group["params"]:
                if p.grad is None:
                    continue
                n = 1
                p.add_(p.grad, alpha=-group["lr"] * (1 + total))
            total += n


class FlatViews(Scenario):
    @classmethod
    def params(cls, lanes):
        flat = torch.linspace(-1, 1, 6 * lanes)
        ps = [
            torch.nn.Parameter(
                flat[6 * k : 6 * k + 6].view(*((2, 3) if k % 2 else (6,)))
            )
            for k in range(lanes)
        ]
        cls.flat = flat
        return ps

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=-0.1)


class FlatViewsDecay(FlatViews):
    def ready(self, ps):
        self.flat_ = type(self).flat

    @torch.no_grad()
    def step(self, closure=None):
        self.flat_.mul_(0.9)
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=-0.1)


class FlatGrads(Scenario):
    """Gradients are views of one tensor, which the step scales."""

    def before(self, turn, ps):
        flat = torch.cat([p.grad.flatten() for p in ps])
        k = 0
        for p in ps:
            p.grad = flat[k : k + p.numel()].view_as(p)
            k += p.numel()
        self.flat = flat

    @torch.no_grad()
    def step(self, closure=None):
        self.flat.mul_(0.5)
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=-0.1)


class ExpandedGrads(Scenario):
    """Without `alpha`: docs/numerics.md says what that does to the last elements."""

    def lane(self, p, group):
        p.sub_(p.grad.mul(group["lr"]))

    def before(self, turn, ps):
        for k in (2, 5, 9):
            ps[k].grad = torch.full((), 0.5 + turn).expand(ps[k].shape)


class NegGrads(Scenario):
    def before(self, turn, ps):
        if turn >= 1:
            for k in (2, 5):
                ps[k].grad = torch._neg_view(ps[k].grad)


class ConjGrads(Scenario):
    @classmethod
    def params(cls, lanes):
        return [
            torch.nn.Parameter(
                torch.randn(
                    4, generator=torch.Generator().manual_seed(k), dtype=torch.complex64
                )
            )
            for k in range(lanes)
        ]

    def before(self, turn, ps):
        if turn >= 1:
            for k in (2, 5):
                ps[k].grad = torch.conj(ps[k].grad)


class IsNeg(Scenario):
    def scale(self, p, group):
        return 2.0 if p.grad.is_neg() else 1.0

    before = NegGrads.before


class MixedDtypes(Scenario):
    @classmethod
    def params(cls, lanes):
        return [
            torch.nn.Parameter(
                torch.randn(5, generator=torch.Generator().manual_seed(k)).to(
                    [torch.float32, torch.bfloat16, torch.float64, torch.float16][k % 4]
                )
            )
            for k in range(lanes)
        ]

    def scale(self, p, group):
        return 1 / 3


class ChannelsLast(Scenario):
    @classmethod
    def params(cls, lanes):
        return [
            torch.nn.Parameter(
                torch.randn(2, 3, 2, 2, generator=torch.Generator().manual_seed(k)).to(
                    memory_format=torch.channels_last
                    if k % 3
                    else torch.contiguous_format
                )
            )
            for k in range(lanes)
        ]

    def lane(self, p, group):
        state = self.state[p]
        if not state:
            state["m"] = torch.zeros_like(p)
        state["m"].add_(p.grad)
        p.add_(
            state["m"].flatten().view_as(p)
            if p.is_contiguous(memory_format=torch.channels_last)
            else state["m"],
            alpha=-group["lr"],
        )


class Empties(Scenario):
    @classmethod
    def params(cls, lanes):
        return [
            torch.nn.Parameter(
                torch.randn(
                    [(0,), (), (1,), (3, 0), (2, 3)][k % 5],
                    generator=torch.Generator().manual_seed(k),
                )
            )
            for k in range(lanes)
        ]

    def scale(self, p, group):
        return 1.0 / max(1, p.numel())

"""Ways through the code: lists side by side, matches, loops, early ends, errors."""

from __future__ import annotations

import collections
import itertools

import torch

from tests.cases.base import Lacking, Scenario


class MisalignedZip(Lacking):
    lacking = ((), (), (2, 3), (2,), (4, 6))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            gs = [p.grad for p in group["params"] if p.grad is not None]
            for p, d in zip(group["params"], gs, strict=False):
                if p.shape == d.shape:
                    p.add_(d, alpha=-group["lr"])


class MisalignedSameShape(Lacking):
    lacking = ((), (), (2, 3), (2,), (4, 6))

    @classmethod
    def params(cls, lanes):
        torch.manual_seed(5)
        return [torch.nn.Parameter(torch.randn(5)) for _ in range(lanes)]

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            gs = [p.grad for p in group["params"] if p.grad is not None]
            for p, d in zip(group["params"], gs, strict=False):
                p.add_(d, alpha=-group["lr"])


class ForeachMisaligned(MisalignedSameShape):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            gs = [p.grad for p in group["params"] if p.grad is not None]
            torch._foreach_add_(group["params"][: len(gs)], gs, alpha=-group["lr"])


class TwoFilters(MisalignedSameShape):
    """Two lists by filters that agree at first."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            a = [p for p in group["params"] if p.grad is not None]
            b = [
                p.grad
                for p in group["params"]
                if p.requires_grad and p.grad is not None
            ]
            torch._foreach_add_(a, b, alpha=-group["lr"]) if len(a) == len(b) else [
                p.add_(d, alpha=-group["lr"]) for p, d in zip(a, b, strict=False)
            ]

    def before(self, turn, ps):
        if turn == 2:
            ps[3].requires_grad_(False)


class FilterByState(MisalignedSameShape):
    lacking = ((), (), (2, 3), (2,), (4, 6))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("m", torch.zeros_like(p)).add_(p.grad)
            a = [p for p in group["params"] if p.grad is not None]
            ms = [self.state[p]["m"] for p in group["params"] if "m" in self.state[p]]
            for p, m in zip(a, ms, strict=False):
                p.add_(m, alpha=-group["lr"])


class GroupedBy(Scenario):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for _, ps in itertools.groupby(group["params"], key=lambda p: p.ndim):
                alike = list(ps)
                for p in alike:
                    p.add_(p.grad, alpha=-group["lr"] / len(alike))


class SortedByNdim(Scenario):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            ps = sorted(group["params"], key=lambda p: p.ndim)
            for k, p in enumerate(ps):
                p.add_(p.grad, alpha=-group["lr"] * (1 if k < len(ps) // 2 else 0.5))


class DictByNdim(Scenario):
    @torch.no_grad()
    def step(self, closure=None):
        by = {}
        for group in self.param_groups:
            for p in group["params"]:
                by.setdefault(p.ndim, []).append(p)
            for nd, ps in by.items():
                for p in ps:
                    p.add_(p.grad, alpha=-group["lr"] * nd)


class DictByNdimCounts(Lacking):
    lacking = ((), (), (2, 3), (2,), (4, 6))

    @torch.no_grad()
    def step(self, closure=None):
        by = collections.defaultdict(list)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    by[p.ndim].append(p)
            for ps in by.values():
                for p in ps:
                    p.add_(p.grad, alpha=-group["lr"] * len(ps) / 16)


class DictKeyedBySize(Lacking):
    lacking = ((), (), (0, 1), (2,))

    @torch.no_grad()
    def step(self, closure=None):
        first = {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                f = first.setdefault(tuple(p.shape), p.grad)
                p.add_(f, alpha=-group["lr"])


class MatchNdim(Scenario):
    def scale(self, p, group):
        match p.ndim:
            case 1:
                return 0.5
            case 2 | 3:
                return 0.25
            case _:
                return 1.0


class MatchShape(Scenario):
    def scale(self, p, group):
        match tuple(p.shape):
            case [a]:
                return 1.0 / a
            case [a, b] if a < b:
                return a / b
            case _:
                return 1.0


class MatchState(Scenario):
    def lane(self, p, group):
        match self.state[p]:
            case {"n": n}:
                pass
            case _:
                n = 0
        self.state[p]["n"] = n + 1
        p.add_(p.grad, alpha=-group["lr"] / (n + 1))


class MatchGroup(Scenario):
    def scale(self, p, group):
        match group:
            case {"lr": lr} if lr < 0.05:
                return 2.0
            case {"lr": float(lr)}:
                return lr

    def before(self, turn, ps):
        self.param_groups[0]["lr"] = (
            [0.1, 0.2, 0.01, 0.3, 1, 0.1][turn] if turn != 4 else 0.04
        )


class WalrusLeak(Scenario):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            [(last := p).add_(p.grad, alpha=-group["lr"]) for p in group["params"]]
            last.mul_(0.5)


class WalrusCount(Scenario):
    @torch.no_grad()
    def step(self, closure=None):
        n = 0
        for group in self.param_groups:
            for p in group["params"]:
                if (n := (n + 1)) > 3:
                    p.add_(p.grad, alpha=-group["lr"])


class WalrusWhile(Scenario):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            todo = list(group["params"])
            while (p := (todo.pop() if todo else None)) is not None:
                p.add_(p.grad, alpha=-group["lr"])


class ForElse(Lacking):
    lacking = ((), (), (9,), (), (31,))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    break
                p.add_(p.grad, alpha=-group["lr"])
            else:
                for p in group["params"]:
                    p.mul_(0.9)


class EarlyReturn(Lacking):
    lacking = ((), (), (9,), (), (31,))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    return
                p.add_(p.grad, alpha=-group["lr"])


class ReturnsCount(Scenario):
    @torch.no_grad()
    def step(self, closure=None):
        n = 0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                n += 1
                p.add_(p.grad, alpha=-group["lr"])
        return n


class RaisesForOne(Scenario):
    def lane(self, p, group):
        state = self.state[p]
        state["n"] = state.get("n", 0) + 1
        if state["n"] == 3 and p.ndim == 2:
            raise RuntimeError("now")
        p.add_(p.grad, alpha=-group["lr"])


class RaisesKeyError(Scenario):
    def lane(self, p, group):
        state = self.state[p]
        if "m" not in state and (not getattr(self, "begun", False)):
            state["m"] = torch.zeros_like(p)
        state["m"].add_(p.grad)
        p.add_(state["m"], alpha=-group["lr"])

    def before(self, turn, ps):
        if turn:
            self.begun = True
        if turn == 2:
            del self.state[ps[6]]["m"]
        if turn == 3:
            self.state[ps[6]]["m"] = torch.zeros_like(ps[6])


class RaisesCaught(Lacking):
    lacking = ((3,), (), (5,))

    def lane(self, p, group):
        try:
            w = self.state[p]["w"]
        except KeyError:
            w = 1.0
        finally:
            self.state[p]["w"] = 0.5
        p.add_(p.grad, alpha=-group["lr"] * w)


class RaisesAssert(Scenario):
    def lane(self, p, group):
        assert p.grad.shape == p.shape
        assert group["lr"] > 0, "rate"
        p.add_(p.grad, alpha=-group["lr"])

    def before(self, turn, ps):
        if turn == 3:
            self.param_groups[0]["lr"] = 0.0
        if turn == 4:
            self.param_groups[0]["lr"] = 0.1


class RaisesShape(Scenario):
    """One gradient has another shape (by .data)."""

    def before(self, turn, ps):
        if turn == 2:
            ps[4].grad.data = torch.ones(1)


class SkipFirstNone(Scenario):
    @torch.no_grad()
    def step(self, closure=None):
        it = iter(self.param_groups[0]["params"])
        next(it)
        for p in it:
            p.add_(p.grad, alpha=-0.1)


class IterTwice(Scenario):
    @torch.no_grad()
    def step(self, closure=None):
        it = iter(self.param_groups[0]["params"])
        for p in it:
            p.add_(p.grad, alpha=-0.1)
        for p in it:
            p.mul_(0.5)


class GenOnce(Scenario):
    @torch.no_grad()
    def step(self, closure=None):
        live = (
            p
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        )
        for p in live:
            p.add_(p.grad, alpha=-0.1)
        for p in live:
            p.mul_(0.5)


class GenLazy(Scenario):
    """The filter asks late: gradients are dropped by the body."""

    @torch.no_grad()
    def step(self, closure=None):
        ps = self.param_groups[0]["params"]
        live = (p for p in ps if p.grad is not None)
        for p in live:
            p.add_(p.grad, alpha=-0.1)
            p.grad = None

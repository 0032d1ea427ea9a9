"""Hooks, logs, draws and modes around a step, and what was fixed before it."""

from __future__ import annotations

import contextlib
import logging as pylog
import random

import numpy as np
import torch

from tests.cases.base import Once, Scenario


class DirtyByHook(Scenario):
    def ready(self, ps):
        self.dirty = []
        for p in ps:
            p.register_hook(lambda g, p=p: self.dirty.append(p))

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.dirty:
            p.add_(p.grad, alpha=-0.1)
        self.dirty.clear()

    def before(self, turn, ps):
        for p in ps:
            p.grad = None
        sum((p * p).sum() for p in ps[turn % 4 :][:20]).backward()


class LogsEachLane(Scenario):
    def ready(self, ps):
        self._seen = seen = []

        class H(pylog.Handler):
            def emit(s, r):
                seen.append(r.getMessage())

        self._log = pylog.getLogger(f"trap{id(self)}")
        self._log.propagate = False
        self._log.setLevel(20)
        self._log.addHandler(H())

    @contextlib.contextmanager
    def around(self, turn):
        """Where the tests are quiet, logs are said all the same."""
        kept = pylog.root.manager.disable
        pylog.disable(pylog.NOTSET)
        try:
            yield
        finally:
            pylog.disable(kept)

    def lane(self, p, group):
        self._log.info("lane %d", p.ndim)
        p.add_(p.grad, alpha=-group["lr"])

    def after(self):
        return list(self._seen)


class LogsOnce(LogsEachLane):
    @torch.no_grad()
    def step(self, closure=None):
        self._log.info("step of %d", len(self.param_groups))
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])


class AppendsOnce(Scenario):
    def ready(self, ps):
        self.seen = []

    @torch.no_grad()
    def step(self, closure=None):
        self.seen.append(self.param_groups[0]["lr"])
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / len(self.seen))


class CallsCallback(Scenario):
    """The user's callback, given by the group."""

    def ready(self, ps):
        self._n = n = [0]

        def cb(lr):
            n[0] += 1
            return lr / n[0]

        self.param_groups[0]["cb"] = cb

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            lr = group["cb"](group["lr"])
            for p in group["params"]:
                p.add_(p.grad, alpha=-lr)

    def after(self):
        return self._n[0]


class SkipsEven(Scenario):
    def ready(self, ps):
        self.t = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.t += 1
        if self.t % 2 == 0:
            return
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])


class OncePerStepRandom(Once):
    def once(self):
        return random.random()

    def after(self):
        return random.getstate()[1][-1]


class OncePerStepNp(Once):
    def once(self):
        return float(np.random.rand())

    def after(self):
        return int(np.random.get_state()[2])


class OncePerStepTorch(Scenario):
    @torch.no_grad()
    def step(self, closure=None):
        r = torch.rand(())
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * r, alpha=group["lr"])

    def after(self):
        return torch.get_rng_state()[-8:]


class LaneRandn(Scenario):
    def lane(self, p, group):
        p.add_(p.grad + 0.01 * torch.randn_like(p), alpha=-group["lr"])

    def after(self):
        return torch.get_rng_state()


class LaneBernoulli(Scenario):
    def lane(self, p, group):
        p.add_(p.grad * torch.bernoulli(torch.full_like(p, 0.5)), alpha=-group["lr"])


class Reseeds(Scenario):
    @torch.no_grad()
    def step(self, closure=None):
        torch.manual_seed(7)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad * torch.rand_like(p), alpha=-group["lr"])


class Denormals(Scenario):
    def lane(self, p, group):
        p.mul_(0.001).add_(p.grad * 1e-38, alpha=group["lr"]).div_(3.0)

    def before(self, turn, ps):
        torch.set_flush_denormal(turn >= 3)

    @classmethod
    def undo(cls):
        torch.set_flush_denormal(False)


class DenormalsFirst(Denormals):
    def before(self, turn, ps):
        torch.set_flush_denormal(turn < 3)


class Inference(Scenario):
    def around(self, turn):
        return torch.inference_mode(turn in (2, 3))


class AutocastAround(Scenario):
    def around(self, turn):
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=turn in (2, 3))

    def lane(self, p, group):
        if p.ndim == 2:
            p.sub_(p @ p.T @ p.grad, alpha=group["lr"] * 0.01)
        else:
            p.sub_(p.grad, alpha=group["lr"])


class DeviceMode(Scenario):
    def around(self, turn):
        return torch.device("cpu") if turn >= 2 else contextlib.nullcontext()

    def lane(self, p, group):
        p.sub_(p.grad * torch.ones(()), alpha=group["lr"])


class GradEnabledStep(Scenario):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"])


class FixedAtInit(Scenario):
    """Tensors made by index in __init__."""

    def ready(self, ps):
        self._masks = [torch.full(p.shape, float(k % 3 > 0)) for k, p in enumerate(ps)]

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p, m in zip(group["params"], self._masks, strict=False):
                p.add_(p.grad * m, alpha=-group["lr"])


class FixedAtInitDict(Scenario):
    def ready(self, ps):
        self._masks = {
            p: torch.full(p.shape, float(k % 3 > 0)) for k, p in enumerate(ps)
        }

    def lane(self, p, group):
        p.add_(p.grad * self._masks[p], alpha=-group["lr"])


class BackupSwap(Scenario):
    """Lookahead-like: slow weights by place, sync every second step."""

    def ready(self, ps):
        self._slow = [p.detach().clone() for p in ps]
        self.t = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.t += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])
        if self.t % 2 == 0:
            for s, p in zip(self._slow, self.param_groups[0]["params"], strict=True):
                s.lerp_(p, 0.5)
                p.copy_(s)

    def after(self):
        return self._slow


class BackupOrder(BackupSwap):
    def before(self, turn, ps):
        if turn == 3:
            self.param_groups[0]["params"].reverse()
            self._slow.reverse()
        if turn == 4:
            self._slow[0], self._slow[2] = (self._slow[2], self._slow[0])

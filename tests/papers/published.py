"""Optimizers as their authors publish them: a loop, with branches on its numbers."""

from __future__ import annotations

import math

import torch
from torch.optim import Optimizer


class PublishedMARS(Optimizer):
    """Yuan et al., MARS: Unleashing the Power of Variance Reduction (2024), as the
    authors write it: a counter for each parameter, and a clip that is a branch.
    """

    def __init__(
        self,
        params,
        lr=3e-3,
        betas=(0.95, 0.99),
        eps=1e-8,
        weight_decay=0.01,
        gamma=0.025,
        betas_1d=(0.9, 0.95),
        weight_decay_1d=0.1,
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "gamma": gamma}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})
        self.lr_1d_factor = 1e-3 / lr
        self.betas_1d = betas_1d
        self.weight_decay_1d = weight_decay_1d
        self.step_num = 0

    @torch.no_grad()
    def step(self):
        step = self.step_num
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.data
                state = self.state[p]
                if len(state) <= 1:
                    state["step"] = 0
                    for key in ("exp_avg", "last_grad", "exp_avg_sq"):
                        state[key] = torch.zeros_like(p.data)
                state["step"] += 1
                step = state["step"]
                self._update(p, grad, state, group, step)
                state["last_grad"].copy_(grad)
        self.step_num = step

    def _update(self, p, grad, state, group, step):
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        lr, decay = group["lr"], group["weight_decay"]
        if len(grad.shape) == 2:
            beta1, beta2 = group["betas"]
            change = grad - state["last_grad"]
            c_t = change.mul(group["gamma"] * (beta1 / (1.0 - beta1))).add(grad)
            norm = torch.norm(c_t)
            if norm > 1.0:
                c_t = c_t / norm
            factor = 1.0
        else:
            beta1, beta2 = self.betas_1d
            c_t, factor, decay = grad, self.lr_1d_factor, self.weight_decay_1d
        exp_avg.mul_(beta1).add_(c_t, alpha=1.0 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(c_t, c_t, value=1.0 - beta2)
        first, second = 1.0 - beta1**step, 1.0 - beta2**step
        denom = exp_avg_sq.sqrt().mul(1 / math.sqrt(second)).add(group["eps"])
        update = torch.mul(p.data, decay).add(exp_avg.div(denom.mul(first)))
        p.data.add_(-lr * factor * update)


class ScheduleFree(Optimizer):
    """Defazio et al., The Road Less Scheduled (2024): a warm-up of its own, and sums in
    its groups that change with each step.
    """

    def __init__(
        self, params, lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, warmup=4
    ):
        sums = {"k": 0, "weight_sum": 0.0, "lr_max": -1.0, "scheduled_lr": 0.0}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "warmup": warmup}
        super().__init__(params, {**defaults, "weight_decay": weight_decay, **sums})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            k, warmup = group["k"], group["warmup"]
            part = (k + 1) / warmup if k < warmup else 1.0
            correction = 1 - beta2 ** (k + 1)
            lr = group["lr"] * part * math.sqrt(correction)
            group["scheduled_lr"] = lr
            lr_max = group["lr_max"] = max(lr, group["lr_max"])
            weight = lr_max**2
            weight_sum = group["weight_sum"] = group["weight_sum"] + weight
            ckp1 = weight / weight_sum if weight_sum != 0 else 0.0
            for y in group["params"]:
                state = self.state[y]
                if "z" not in state:
                    state["z"] = y.clone()
                    state["v"] = torch.zeros_like(y)
                z, v = state["z"], state["v"]
                v.mul_(beta2).addcmul_(y.grad, y.grad, value=1 - beta2)
                normed = y.grad / v.sqrt().add_(group["eps"])
                normed.add_(y, alpha=group["weight_decay"])
                y.lerp_(end=z, weight=ckp1)
                y.add_(normed, alpha=lr * (beta1 * (1 - ckp1) - 1))
                z.sub_(normed, alpha=lr)
            group["k"] = k + 1


class Periodic(Optimizer):
    """A counter of the optimizer's own, functions of it, and a branch at each tenth."""

    def __init__(self, params, lr=0.1, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.t = 0

    @torch.no_grad()
    def step(self):
        self.t += 1
        damping = math.exp(-self.t / 100) * math.log1p(self.t) * (1 - 0.9**self.t)
        damping = max(0.1, min(damping, 2.0)) * math.cos(math.pi / self.t) + 2.0
        for group in self.param_groups:
            rate = group["lr"] * damping / math.sqrt(self.t)
            for p in group["params"]:
                if self.t % 10 == 0:
                    p.mul_(1 - rate * group["weight_decay"])
                p.add_(p.grad, alpha=-rate)

"""Optimizers that reduce a tensor to a number: a norm, a mean, a maximum."""

from __future__ import annotations

import math

import torch
from torch.optim import Optimizer


class Gravity(Optimizer):
    """Bahrami and Zadeh, Gravity Optimizer (2021): the largest gradient bounds a step.

    It needs the maximum of each gradient.
    """

    def __init__(self, params, lr=1e-2, alpha=0.01, beta=0.9):
        super().__init__(params, {"lr": lr, "alpha": alpha, "beta": beta, "step": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] += 1
            beta_t = (group["beta"] * group["step"] + 1) / (group["step"] + 2)
            for p in group["params"]:
                if p.grad is None or not p.numel():
                    continue
                state = self.state[p]
                if "v" not in state:
                    state["v"] = torch.full_like(p, group["alpha"] / group["lr"])
                m = 1.0 / p.grad.abs().max()
                zeta = p.grad / (1.0 + (p.grad / m) ** 2)
                state["v"].mul_(beta_t).add_(zeta, alpha=1.0 - beta_t)
                p.add_(state["v"], alpha=-group["lr"])


class LAMB(Optimizer):
    """You et al., Large Batch Optimization for Deep Learning (2019), algorithm 2."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.1):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                m, v = state["m"], state["v"]
                state["step"] += 1
                m.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                m_hat = m / (1 - beta1 ** state["step"])
                v_hat = v / (1 - beta2 ** state["step"])
                r = m_hat / (v_hat.sqrt() + group["eps"])
                r.add_(p, alpha=group["weight_decay"])
                w_norm, r_norm = p.norm(), r.norm()
                one = torch.ones_like(w_norm)
                trust = torch.where(
                    w_norm > 0, torch.where(r_norm > 0, w_norm / r_norm, one), one
                )
                p.sub_(group["lr"] * trust * r)


class LARS(Optimizer):
    """You et al., Large Batch Training of Convolutional Networks (2017)."""

    def __init__(self, params, lr=0.1, momentum=0.9, decay=1e-4, trust=0.001):
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "decay": decay, "trust": trust}
        )

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "v" not in state:
                    state["v"] = torch.zeros_like(p)
                v = state["v"]
                w_norm, g_norm = torch.norm(p), torch.norm(p.grad)
                local = (
                    group["trust"] * w_norm / (g_norm + group["decay"] * w_norm + 1e-9)
                )
                d = p.grad + group["decay"] * p
                v.mul_(group["momentum"]).add_(group["lr"] * local * d)
                p.sub_(v)


class NovoGrad(Optimizer):
    """Ginsburg et al., Stochastic Gradient Methods with Layer-wise Moments (2019).

    The second moment is one number for a parameter, kept as a 0-d tensor.
    """

    def __init__(
        self, params, lr=1e-2, betas=(0.95, 0.98), eps=1e-8, weight_decay=0.01
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                square = p.grad.pow(2).sum()
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), square.clone()
                else:
                    state["v"].mul_(beta2).add_(square, alpha=1 - beta2)
                scaled = p.grad / (state["v"].sqrt() + group["eps"])
                scaled.add_(p, alpha=group["weight_decay"])
                state["m"].mul_(beta1).add_(scaled)
                p.add_(state["m"], alpha=-group["lr"])


class CautiousAdamW(Optimizer):
    """Liang et al., Cautious Optimizers (2024): only where gradient and update agree.

    The mask is scaled by its mean.
    """

    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                m, v, t = state["m"], state["v"], state["step"]
                m.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                denom = v.sqrt().add_(group["eps"])
                size = group["lr"] * math.sqrt(1 - beta2**t) / (1 - beta1**t)
                mask = (m * p.grad > 0).to(p.grad.dtype)
                mask.div_(mask.mean().clamp_(min=1e-3))
                p.addcdiv_(m * mask, denom, value=-size)
                p.add_(p, alpha=-group["lr"] * group["weight_decay"])


class MARS(Optimizer):
    """Yuan et al., MARS: Unleashing the Power of Variance Reduction (2024), AdamW form.

    The corrected gradient is clipped by its norm, without a branch in Python.
    """

    def __init__(self, params, lr=3e-3, betas=(0.95, 0.99), gamma=0.025, eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "gamma": gamma, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    for key in ("m", "v", "last_grad"):
                        state[key] = torch.zeros_like(p)
                state["step"] += 1
                m, v, last = state["m"], state["v"], state["last_grad"]
                c = (p.grad - last).mul(group["gamma"] * (beta1 / (1.0 - beta1)))
                c.add_(p.grad)
                norm = torch.norm(c)
                c = torch.where(norm > 1.0, c / norm, c)
                m.mul_(beta1).add_(c, alpha=1.0 - beta1)
                v.mul_(beta2).addcmul_(c, c, value=1.0 - beta2)
                bias1 = 1.0 - beta1 ** state["step"]
                bias2 = 1.0 - beta2 ** state["step"]
                denom = (v.sqrt() / math.sqrt(bias2)).add_(group["eps"])
                p.sub_(group["lr"] * (m / bias1) / denom)
                last.copy_(p.grad)

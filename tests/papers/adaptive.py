"""Second moments, with a step counter of each parameter's own."""

from __future__ import annotations

import math

import torch
from torch.optim import Optimizer


class AdaBelief(Optimizer):
    """Zhuang et al., AdaBelief Optimizer (2020), algorithm 2, decoupled decay."""

    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-16, weight_decay=1e-2
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["m"] = torch.zeros_like(p)
                    state["s"] = torch.zeros_like(p)
                state["step"] += 1
                m, s = state["m"], state["s"]
                beta1, beta2 = group["betas"]
                bias1 = 1 - beta1 ** state["step"]
                bias2 = 1 - beta2 ** state["step"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                m.mul_(beta1).add_(grad, alpha=1 - beta1)
                diff = grad - m
                s.mul_(beta2).addcmul_(diff, diff, value=1 - beta2).add_(group["eps"])
                denom = (s.sqrt() / math.sqrt(bias2)).add_(group["eps"])
                p.addcdiv_(m, denom, value=-group["lr"] / bias1)


class Yogi(Optimizer):
    """Zaheer et al., Adaptive Methods for Nonconvex Optimization (2018)."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.999), eps=1e-3):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

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
                    state["m"] = torch.full_like(p, 1e-6)
                    state["v"] = torch.full_like(p, 1e-6)
                state["step"] += 1
                m, v, t = state["m"], state["v"], state["step"]
                m.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                square = p.grad.mul(p.grad)
                v.addcmul_(torch.sign(v - square), square, value=-(1 - beta2))
                denom = (v.sqrt() / math.sqrt(1 - beta2**t)).add_(group["eps"])
                p.addcdiv_(m, denom, value=-group["lr"] / (1 - beta1**t))


class AdaBound(Optimizer):
    """Luo et al., Adaptive Gradient Methods with Dynamic Bound (2019)."""

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        final_lr=0.1,
        gamma=1e-3,
        eps=1e-8,
        amsbound=True,
    ):
        defaults = {
            "lr": lr,
            "betas": betas,
            "final_lr": final_lr,
            "gamma": gamma,
            "eps": eps,
        }
        super().__init__(params, {**defaults, "amsbound": amsbound})
        self.base_lrs = [group["lr"] for group in self.param_groups]

    @torch.no_grad()
    def step(self):
        for group, base_lr in zip(self.param_groups, self.base_lrs, strict=False):
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                    if group["amsbound"]:
                        state["max_exp_avg_sq"] = torch.zeros_like(p)
                m, v = state["exp_avg"], state["exp_avg_sq"]
                state["step"] += 1
                m.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                if group["amsbound"]:
                    top = state["max_exp_avg_sq"]
                    torch.max(top, v, out=top)
                    denom = top.sqrt().add_(group["eps"])
                else:
                    denom = v.sqrt().add_(group["eps"])
                bias1 = 1 - beta1 ** state["step"]
                bias2 = 1 - beta2 ** state["step"]
                step_size = group["lr"] * math.sqrt(bias2) / bias1
                final_lr = group["final_lr"] * group["lr"] / base_lr
                lower = final_lr * (1 - 1 / (group["gamma"] * state["step"] + 1))
                upper = final_lr * (1 + 1 / (group["gamma"] * state["step"]))
                size = torch.full_like(denom, step_size)
                size.div_(denom).clamp_(lower, upper).mul_(m)
                p.add_(-size)


class QHAdam(Optimizer):
    """Ma and Yarats, Quasi-hyperbolic momentum and Adam (2018), algorithm 2.

    The weight of each average follows from the average itself, not from the step.
    """

    def __init__(self, params, lr=1e-3, betas=(0.995, 0.999), nus=(0.7, 1.0), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "nus": nus, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            lr, (nu1, nu2), (beta1, beta2) = group["lr"], group["nus"], group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["weight1"] = state["weight2"] = 0.0
                    state["exp_avg"] = torch.zeros_like(p.data)
                    state["exp_avg_sq"] = torch.zeros_like(p.data)
                state["weight1"] = 1.0 + beta1 * state["weight1"]
                state["weight2"] = 1.0 + beta2 * state["weight2"]
                adj1 = 1.0 - 1.0 / state["weight1"]
                adj2 = 1.0 - 1.0 / state["weight2"]
                square = p.grad.mul(p.grad)
                m, v = state["exp_avg"], state["exp_avg_sq"]
                m.mul_(adj1).add_(p.grad, alpha=1.0 - adj1)
                v.mul_(adj2).add_(square, alpha=1.0 - adj2)
                update = m.mul(nu1)
                if nu1 != 1.0:
                    update.add_(p.grad, alpha=1.0 - nu1)
                denom = v.mul(nu2)
                if nu2 != 1.0:
                    denom.add_(square, alpha=1.0 - nu2)
                denom.sqrt_()
                if group["eps"] != 0.0:
                    denom.add_(group["eps"])
                p.data.addcdiv_(update, denom, value=-lr)


class AdaMod(Optimizer):
    """Ding et al., An Adaptive and Momental Bound Method (2019), algorithm 1."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), beta3=0.999, eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "beta3": beta3, "eps": eps})

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
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                    state["exp_avg_lr"] = torch.zeros_like(p)
                m, v = state["exp_avg"], state["exp_avg_sq"]
                state["step"] += 1
                m.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                denom = v.sqrt().add_(group["eps"])
                bias1 = 1 - beta1 ** state["step"]
                bias2 = 1 - beta2 ** state["step"]
                size = torch.full_like(
                    denom, group["lr"] * math.sqrt(bias2) / bias1
                ).div_(denom)
                bound = state["exp_avg_lr"]
                bound.mul_(group["beta3"]).add_(size, alpha=1 - group["beta3"])
                size = torch.min(size, bound)
                p.sub_(size.mul_(m))


class ADOPT(Optimizer):
    """Taniguchi et al., ADOPT (2024), algorithm 2: the second moment lags one step."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.9999), eps=1e-6):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

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
                    state["m"] = torch.zeros_like(p)
                    state["v"] = torch.zeros_like(p)
                m, v = state["m"], state["v"]
                if state["step"] == 0:
                    v.addcmul_(p.grad, p.grad)
                    state["step"] += 1
                    continue
                normed = p.grad.div(torch.clamp(v.sqrt(), group["eps"]))
                clip = state["step"] ** 0.25
                normed.clamp_(-clip, clip)
                m.lerp_(normed, 1 - beta1)
                p.add_(m, alpha=-group["lr"])
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                state["step"] += 1


class Grams(Optimizer):
    """Cao et al., Grams: Gradient Descent with Adaptive Momentum Scaling (2024)."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0):
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
                if "step" not in state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                state["step"] += 1
                m, v = state["exp_avg"], state["exp_avg_sq"]
                m.mul_(beta1).add_(p.grad, alpha=1.0 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1.0 - beta2)
                denom = v.sqrt().add_(group["eps"])
                step_size = group["lr"] * math.sqrt(1.0 - beta2 ** state["step"])
                step_size = step_size / (1.0 - beta1 ** state["step"])
                update = (m / denom).abs_().mul_(p.grad.sign())
                p.add_(update, alpha=-step_size)
                if group["weight_decay"] > 0.0:
                    p.add_(p, alpha=-group["lr"] * group["weight_decay"])


class DiffGrad(Optimizer):
    """Dubey et al., diffGrad (2019): a sigmoid of how much the gradient changed."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

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
                m, v = state["m"], state["v"]
                m.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                denom = v.sqrt().add_(group["eps"])
                bias1 = 1 - beta1 ** state["step"]
                bias2 = 1 - beta2 ** state["step"]
                friction = 1.0 / (1.0 + torch.exp(-(state["last_grad"] - p.grad).abs()))
                state["last_grad"] = p.grad.clone()
                size = group["lr"] * math.sqrt(bias2) / bias1
                p.addcdiv_(m * friction, denom, value=-size)

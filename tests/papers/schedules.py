"""Second moments, with a step counter of the group, or one that is a tensor."""

from __future__ import annotations

import math

import torch
from torch.optim import Optimizer


class AdEMAMix(Optimizer):
    """Pagliardini et al., The AdEMAMix Optimizer (2024), with warm-up of alpha, beta3.

    The schedule of beta3 is linear in its half life, so it needs logarithms of numbers.
    """

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999, 0.9999),
        alpha=5.0,
        warmup=100,
        eps=1e-8,
        weight_decay=0.1,
    ):
        defaults = {
            "lr": lr,
            "betas": betas,
            "alpha": alpha,
            "warmup": warmup,
            "eps": eps,
        }
        super().__init__(params, {**defaults, "weight_decay": weight_decay, "step": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2, beta3_end = group["betas"]
            group["step"] += 1
            t = group["step"]
            part = min(t / group["warmup"], 1.0)
            alpha = part * group["alpha"]
            low, high = math.log(beta1), math.log(beta3_end)
            beta3 = min(
                math.e ** (low * high / ((1 - part) * high + part * low)), beta3_end
            )
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    for key in ("m1", "m2", "v"):
                        state[key] = torch.zeros_like(p)
                m1, m2, v = state["m1"], state["m2"], state["v"]
                m1.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                m2.mul_(beta3).add_(p.grad, alpha=1 - beta3)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                denom = (v.sqrt() / math.sqrt(1 - beta2**t)).add_(group["eps"])
                update = (m1 / (1 - beta1**t) + alpha * m2) / denom
                update.add_(p, alpha=group["weight_decay"])
                p.add_(update, alpha=-group["lr"])


class Adan(Optimizer):
    """Xie et al., Adan: Adaptive Nesterov Momentum Algorithm (2022), algorithm 1."""

    def __init__(
        self, params, lr=1e-3, betas=(0.98, 0.92, 0.99), eps=1e-8, weight_decay=0.02
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2, beta3 = group["betas"]
            if "step" in group:
                group["step"] += 1
            else:
                group["step"] = 1
            bias1 = 1.0 - beta1 ** group["step"]
            bias2 = 1.0 - beta2 ** group["step"]
            bias3 = 1.0 - beta3 ** group["step"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_diff"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                if "previous_grad" not in state:
                    state["previous_grad"] = p.grad.clone()
                diff = p.grad - state["previous_grad"]
                m, d, n = state["exp_avg"], state["exp_avg_diff"], state["exp_avg_sq"]
                m.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                d.mul_(beta2).add_(diff, alpha=1 - beta2)
                full = p.grad + beta2 * diff
                n.mul_(beta3).addcmul_(full, full, value=1 - beta3)
                denom = (n.sqrt() / math.sqrt(bias3)).add_(group["eps"])
                update = (m / bias1 + beta2 * d / bias2).div_(denom)
                p.add_(update, alpha=-group["lr"])
                p.div_(1 + group["lr"] * group["weight_decay"])
                state["previous_grad"].copy_(p.grad)


class RectifiedAdam(Optimizer):
    """Liu et al., On the Variance of the Adaptive Learning Rate (2019), algorithm 2.

    Which form a step takes is a branch on a number of the step counter.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.9), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "t": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            group["t"] += 1
            t = group["t"]
            longest = 2 / (1 - beta2) - 1
            length = longest - 2 * t * beta2**t / (1 - beta2**t)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                m, v = state["m"], state["v"]
                m.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                if length > 4:
                    r = (length - 4) * (length - 2) * longest
                    r /= (longest - 4) * (longest - 2) * length
                    adapt = math.sqrt((1 - beta2**t) * r)
                    denom = v.sqrt().add_(group["eps"])
                    p.addcdiv_(m, denom, value=-group["lr"] * adapt / (1 - beta1**t))
                else:
                    p.add_(m, alpha=-group["lr"] / (1 - beta1**t))


class TensorSteps(Optimizer):
    """Kingma and Ba, Adam (2014), algorithm 1 in its efficient form (end of section 2).

    Step counters are 0-d tensors, as in torch's own optimizers.
    """

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
                    state["step"] = torch.tensor(0.0)
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                t, m, v = state["step"], state["m"], state["v"]
                t += 1
                m.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad.conj(), value=1 - beta2)
                size = group["lr"] * (1 - beta2**t).sqrt() / (1 - beta1**t)
                p.sub_(size * m / (v.sqrt() + group["eps"]))

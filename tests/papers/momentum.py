"""Signs, momentum, averages: no second moment of the gradient, or one that is given."""

from __future__ import annotations

import math

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """Chen et al., Symbolic Discovery of Optimization Algorithms (2023)."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(
            params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                m = state["exp_avg"]
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                update = m * beta1 + p.grad * (1 - beta1)
                p.add_(torch.sign(update), alpha=-group["lr"])
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


class Signum(Optimizer):
    """Bernstein et al., signSGD (2018), algorithm 2 with momentum and weight decay."""

    def __init__(self, params, lr=1e-3, momentum=0.9, weight_decay=1e-2):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                d_p = p.grad.data.add(p.data, alpha=group["weight_decay"])
                state = self.state[p]
                if "momentum_buffer" not in state:
                    buf = state["momentum_buffer"] = torch.zeros_like(p.data)
                else:
                    buf = state["momentum_buffer"]
                buf.mul_(group["momentum"]).add_(d_p, alpha=1 - group["momentum"])
                p.data.add_(torch.sign(buf), alpha=-group["lr"])


class Tiger(Optimizer):
    """Su, Tiger: a tight-fisted optimizer (2023): one state tensor, one beta."""

    def __init__(self, params, lr=1e-3, beta=0.965, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.lerp_(p.grad, 1 - group["beta"])
                u = m.sign().add_(p, alpha=group["weight_decay"])
                p -= group["lr"] * u


class AggMo(Optimizer):
    """Lucas et al., Aggregated Momentum (2018): a velocity for each damping."""

    def __init__(self, params, lr=0.1, betas=(0.0, 0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "velocity" not in state:
                    state["velocity"] = {b: torch.zeros_like(p) for b in group["betas"]}
                for beta in group["betas"]:
                    velocity = state["velocity"][beta]
                    velocity.mul_(beta).add_(p.grad)
                    p.sub_(velocity, alpha=group["lr"] / len(group["betas"]))


class PNM(Optimizer):
    """Xie et al., Positive-Negative Momentum (2021): two buffers that take turns."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 1.0)):
        super().__init__(params, {"lr": lr, "betas": betas})

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
                    state["pos"] = torch.zeros_like(p)
                    state["neg"] = torch.zeros_like(p)
                state["step"] += 1
                if state["step"] % 2 == 1:
                    pos, neg = state["pos"], state["neg"]
                else:
                    neg, pos = state["pos"], state["neg"]
                pos.mul_(beta1**2).add_(p.grad, alpha=1 - beta1**2)
                noise = 1 / math.sqrt((1 + beta2) ** 2 + beta2**2)
                delta = pos.mul(1 + beta2).add(neg, alpha=-beta2).mul(noise)
                p.add_(delta, alpha=-group["lr"])


class NesterovDecay(Optimizer):
    """Loshchilov and Hutter, Decoupled Weight Decay (2019), SGDW with Nesterov's form.

    The learning rate is a tensor; the schedule's multiplier is a field of the group.
    """

    def __init__(self, params, lr=0.1, momentum=0.9, weight_decay=1e-2):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "eta": 1.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            eta, lr, decay = group["eta"], group["lr"], group["weight_decay"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "buffer" not in state:
                    state["buffer"] = torch.clone(p.grad).detach()
                else:
                    state["buffer"].mul_(group["momentum"]).add_(p.grad)
                d = p.grad.add(state["buffer"], alpha=group["momentum"])
                old = torch.clone(p).detach()
                p.sub_(eta * lr * d)
                p.sub_(old.mul_(eta * decay))


class ScheduleFreeSGD(Optimizer):
    """Defazio et al., The Road Less Scheduled (2024), in the variable y.

    The weight of the average is a number of Python's that the step itself changes.
    """

    def __init__(self, params, lr=0.5, beta=0.9, warmup=3):
        defaults = {"lr": lr, "beta": beta, "warmup": warmup, "k": 0, "weight_sum": 0.0}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            k, beta = group["k"], group["beta"]
            lr = group["lr"] * min(1.0, (k + 1) / group["warmup"])
            weight = lr**2
            group["weight_sum"] += weight
            c = weight / group["weight_sum"]
            for y in group["params"]:
                if y.grad is None:
                    continue
                state = self.state[y]
                if "z" not in state:
                    state["z"] = torch.clone(y)
                z = state["z"]
                y.lerp_(end=z, weight=c)
                y.add_(y.grad, alpha=lr * (beta * (1 - c) - 1))
                z.sub_(y.grad, alpha=lr)
            group["k"] = k + 1


class FTRL(Optimizer):
    """McMahan et al., Ad Click Prediction (2013), algorithm 1: FTRL-Proximal."""

    def __init__(self, params, lr=0.05, beta=1.0, l1=0.02, l2=0.1):
        super().__init__(params, {"lr": lr, "beta": beta, "l1": l1, "l2": l2})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            lr, beta, l1, l2 = (group[k] for k in ("lr", "beta", "l1", "l2"))
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["z"], state["n"] = torch.zeros_like(p), torch.zeros_like(p)
                z, n = state["z"], state["n"]
                more = n + p.grad**2
                sigma = (more.sqrt() - n.sqrt()) / lr
                z += p.grad - sigma * p
                n.copy_(more)
                w = -(z - torch.sign(z) * l1) / ((beta + n.sqrt()) / lr + l2)
                p.copy_(torch.where(z.abs() <= l1, torch.zeros_like(p), w))


class Sophia(Optimizer):
    """Liu et al., Sophia (2023), algorithm 3; the Hessian's diagonal is given.

    `set_hessian` stores an estimate; between estimates the step runs on the old one.
    """

    def __init__(self, params, lr=1e-3, betas=(0.965, 0.99), rho=0.04, decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "rho": rho, "decay": decay})

    @torch.no_grad()
    def set_hessian(self, diagonals):
        params = [p for group in self.param_groups for p in group["params"]]
        for p, h in zip(params, diagonals, strict=False):
            state = self.state[p]
            state.setdefault("hessian", torch.zeros_like(p))
            state["hessian"].mul_(0.99).add_(h, alpha=0.01)

    @torch.no_grad()
    def step(self, batch_size=16):
        for group in self.param_groups:
            beta1, _ = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(p)
                    state.setdefault("hessian", torch.zeros_like(p))
                m, h = state["exp_avg"], state["hessian"]
                p.mul_(1 - group["lr"] * group["decay"])
                m.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                ratio = (m.abs() / (group["rho"] * batch_size * h + 1e-15)).clamp(
                    None, 1
                )
                p.addcmul_(m.sign(), ratio, value=-group["lr"])

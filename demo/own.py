"""An optimizer that no one wrote a kernel for, and the tail of a training step.

`TwoSpeeds` is a loop over parameters, as a paper would print it. `Tail` is what stands
around a step in most trainings: clip, step, average of the weights, `zero_grad`.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

import fuseopt

#: What it is called beside others.
OWN = "an optimizer without a kernel"
CLIP = 1.0
DECAY = 0.999


class TwoSpeeds(torch.optim.Optimizer):
    """Two averages of the gradient; where a fast and a slow one disagree, it waits."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.99, 0.999),
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Do one step."""
        for group in self.param_groups:
            lr, (quick, slow, size) = group["lr"], group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    for name in ("quick", "slow", "size"):
                        state[name] = torch.zeros_like(p)
                state["quick"].lerp_(p.grad, 1 - quick)
                state["slow"].lerp_(p.grad, 1 - slow)
                state["size"].mul_(size).addcmul_(p.grad, p.grad, value=1 - size)
                agree = state["quick"] * state["slow"] > 0
                both = torch.where(agree, state["quick"] + state["slow"], 0.0)
                p.mul_(1 - lr * group["weight_decay"])
                p.addcdiv_(both, state["size"].sqrt().add_(1e-8), value=-lr)


class Stepped:
    """Copies of a model's parameters, with gradients and an optimizer of their own."""

    def __init__(self, like: Sequence[nn.Parameter]) -> None:
        self.params = [nn.Parameter(p.detach().clone()) for p in like]
        self.grads = [torch.zeros_like(p) for p in like]
        self.averages = [p.detach().clone() for p in like]
        self.optimizer = TwoSpeeds(self.params)

    def give(self) -> None:
        """Give the parameters their gradients, which a tail takes away."""
        for p, grad in zip(self.params, self.grads, strict=True):
            p.grad = grad

    def draw(self, seed: int) -> None:
        """Make gradients that are the same for each who draws by this number."""
        drawn = torch.Generator(self.grads[0].device).manual_seed(seed)
        for grad in self.grads:
            grad.normal_(generator=drawn)
        self.give()

    def held(self) -> list[Tensor]:
        """All that a step or a tail changes."""
        state = [self.optimizer.state[p] for p in self.params]
        return [*self.params, *self.averages, *(x for of in state for x in of.values())]

    def tail_in_eager(self) -> None:
        """Clip, step, average, clear: each for itself."""
        nn.utils.clip_grad_norm_(self.params, CLIP, foreach=True)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.averages, self.params, 1 - DECAY)
        self.optimizer.zero_grad()

    def tail_in_one(self, **options: str) -> Callable[[], object]:
        """The same as one object."""
        return fuseopt.tail(
            self.optimizer,
            clip_grad_norm=CLIP,
            ema=[(self.averages, DECAY)],
            zero_grad=True,
            **options,
        )

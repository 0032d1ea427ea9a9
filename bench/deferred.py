"""In: a model's shapes. Out: what clip and step take, where a trainer owns the clip.

    python -m bench.deferred [MODEL] [ROUNDS]

AdamW in float32: torch's foreach clip and fused step, fuseopt's clip and compiled step,
and the same with the clip left to the step (`defer="unsafe"`). Each works on tensors of
its own, in turns; printed are the least and the median of a turn in milliseconds.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

import fuseopt
from bench.interleave import seconds_of
from bench.models import make_params, model_shapes

CLIP = 1.0


class Way:
    """A clip and a step over parameters of its own, which get new gradients before."""

    def __init__(self, clip: Callable[..., Any], model: str, **flags: Any) -> None:
        self.clip = clip
        self.params = make_params(model_shapes(model), torch.float32, "cpu")
        self.grads = [p.grad for p in self.params]
        self.optimizer: Any = torch.optim.AdamW(self.params, lr=1e-4, **flags)
        if not flags:
            fuseopt.compile(self.optimizer, fallback="error")
        for _ in range(4):
            self.give()
            self.call()

    def give(self) -> None:
        """Give parameters other gradients, as a backward does; in the same memory."""
        for p, grad in zip(self.params, self.grads, strict=True):
            assert grad is not None
            p.grad = grad.detach()

    def call(self) -> None:
        """Clip and step."""
        self.clip(self.params, CLIP)
        self.optimizer.step()


def deferred(params: Any, limit: float) -> Any:
    """Leave the clip to the step."""
    return fuseopt.clip_grad_norm_(params, limit, defer="unsafe")


def main(model: str = "resnet50", rounds: str = "40") -> None:
    """Measure one model and print a line for each way."""
    torch.manual_seed(0)
    ways = {
        "foreach clip, fused step": Way(
            torch.nn.utils.clip_grad_norm_, model, fused=True
        ),
        "fuseopt's clip, then its step": Way(fuseopt.clip_grad_norm_, model),
        "the clip left to the step": Way(deferred, model),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(int(rounds)):
        for name, way in ways.items():
            way.give()
            seconds[name].append(seconds_of(way.call))
    for name, taken in seconds.items():
        least, median = 1e3 * min(taken), 1e3 * statistics.median(taken)
        print(f"{model}: {name}: {least:.2f}, {median:.2f} ms")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""torchtitan's containers of optimizers and of schedules, and its clip, in one loop."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)
from torchtitan.distributed.utils import clip_grad_norm_

from tests.wild.trained import STEPS, Compile, Trained, seed_all, tensors_of

#: Biases do not decay.
GROUPS = [
    ParamGroupConfig(
        pattern=pattern,
        optimizer_name="AdamW",
        optimizer_kwargs={"lr": 0.01, "weight_decay": decay},
    )
    for pattern, decay in ((r"\.bias$", 0.0), (".*", 0.1))
]


class Loop:
    """What a config builds."""

    def __init__(self, compile: Compile) -> None:
        seed_all()
        self.model = nn.Sequential(
            nn.Linear(8, 32), nn.LayerNorm(32), nn.SiLU(), nn.Linear(32, 4)
        )
        config = OptimizersContainer.Config(
            param_groups=GROUPS, implementation="foreach"
        )
        self.optimizers = config.build(model_parts=[self.model])
        for optimizer in self.optimizers:
            compile(optimizer)
        self.schedules = LRSchedulersContainer.Config(warmup_steps=5).build(
            optimizers=self.optimizers, training_steps=STEPS
        )
        self.batches = torch.randn(STEPS, 6, 8)

    def train(self, first: int, last: int) -> None:
        """Take the steps from one number to another."""
        for x in self.batches[first:last]:
            self.optimizers.zero_grad()
            (self.model(x) - x[:, :4].sin()).square().mean().backward()
            clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
            self.optimizers.step()
            self.schedules.step()

    def trained(self) -> Trained:
        return Trained(tensors_of(self.model), [*self.optimizers])


def train(compile: Compile) -> Trained:
    """Train from the first step to the last."""
    loop = Loop(compile)
    loop.train(0, STEPS)
    return loop.trained()


def resume(compile: Compile, folder: Path) -> Trained:
    """The same in two loops, with the names that torchtitan's checkpoints have."""
    first = Loop(compile)
    first.train(0, STEPS // 2)
    saved = {
        "model": first.model.state_dict(),
        "optimizer": first.optimizers.state_dict(),
        "lr_scheduler": first.schedules.state_dict(),
    }
    torch.save(saved, folder / "checkpoint.pt")
    second = Loop(compile)
    known = torch.load(folder / "checkpoint.pt")
    second.model.load_state_dict(known["model"])
    second.optimizers.load_state_dict(known["optimizer"])
    second.schedules.load_state_dict(known["lr_scheduler"])
    second.train(STEPS // 2, STEPS)
    return second.trained()

"""Lightning's Fabric: a loop of one's own, with `setup`, `backward`, `save`, `load`."""

from __future__ import annotations

from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import nn

from tests.wild.trained import STEPS, Compile, Trained, seed_all, tensors_of


class Loop:
    """A model and an optimizer that Fabric has set up."""

    def __init__(self, compile: Compile) -> None:
        seed_all()
        self.fabric = Fabric(accelerator="cpu", devices=1)
        self.fabric.launch()
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
        optimizer = torch.optim.RAdam(model.parameters(), lr=1e-2, weight_decay=0.1)
        compile(optimizer)
        self.model, self.optimizer = self.fabric.setup(model, optimizer)

    def train(self, first: int, last: int) -> None:
        """Take the steps from one number to another."""
        for number in range(first, last):
            random = torch.Generator().manual_seed(number)
            x = torch.randn(16, 8, generator=random)
            loss = (self.model(x) - x[:, :4].sin()).square().mean()
            self.fabric.backward(loss)
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def trained(self) -> Trained:
        return Trained(tensors_of(self.model), [self.optimizer.optimizer])


def train(compile: Compile) -> Trained:
    """Train from the first step to the last."""
    loop = Loop(compile)
    loop.train(0, STEPS)
    return loop.trained()


def resume(compile: Compile, folder: Path) -> Trained:
    """The same in two loops."""
    first = Loop(compile)
    first.train(0, STEPS // 2)
    held = {"model": first.model, "optimizer": first.optimizer}
    first.fabric.save(folder / "half.ckpt", held)
    second = Loop(compile)
    held = {"model": second.model, "optimizer": second.optimizer}
    second.fabric.load(folder / "half.ckpt", held)
    second.train(STEPS // 2, STEPS)
    return second.trained()

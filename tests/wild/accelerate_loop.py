"""A loop of accelerate: `prepare`, `accumulate`, a clip, `save_state`, `load_state`."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from tests.wild.trained import STEPS, Compile, Trained, seed_all, tensors_of

#: Batches whose gradients one step adds up.
ACCUMULATED = 2


class Loop:
    """What `accelerator.prepare` gives back, and how far it is."""

    def __init__(self, compile: Compile) -> None:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        seed_all()
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=ACCUMULATED
        )
        model = nn.Sequential(
            nn.Linear(8, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4)
        )
        inputs = torch.randn(4 * ACCUMULATED * STEPS, 8)
        data = TensorDataset(inputs, inputs[:, :4].sin())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        compile(optimizer)
        schedule = OneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS)
        self.model, self.optimizer, self.batches, self.schedule = (
            self.accelerator.prepare(
                model, optimizer, DataLoader(data, batch_size=4), schedule
            )
        )

    def train(self, first: int, last: int) -> None:
        """Take the steps from one number to another; data is the same in each run."""
        batches = list(self.batches)
        for x, y in batches[ACCUMULATED * first : ACCUMULATED * last]:
            with self.accelerator.accumulate(self.model):
                loss = (self.model(x) - y).square().mean()
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.schedule.step()
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
    first.accelerator.save_state(str(folder))
    second = Loop(compile)
    second.accelerator.load_state(str(folder))
    second.train(STEPS // 2, STEPS)
    return second.trained()

"""Lightning with two optimizers that a module steps itself: a small GAN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.wild.lightning_automatic import batches, trainer_of
from tests.wild.trained import STEPS, Compile, Trained, seed_all, tensors_of

NOISE = 4


class Adversaries(lightning.LightningModule):
    """A generator of rows, and a discriminator of these from the data's."""

    def __init__(self, compile: Compile) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(NOISE, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8)
        )
        self.discriminator = nn.Sequential(
            nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)
        )
        self.compiled = compile

    def training_step(self, batch: Any, number: int) -> None:
        real, _ = batch
        generating, telling = self.optimizers()
        random = torch.Generator().manual_seed(self.global_step)
        made = self.generator(torch.randn(len(real), NOISE, generator=random))
        self.toggle_optimizer(telling)
        loss = self.says(real, 1.0) + self.says(made.detach(), 0.0)
        telling.zero_grad()
        self.manual_backward(loss)
        telling.step()
        self.untoggle_optimizer(telling)
        self.toggle_optimizer(generating)
        loss = self.says(made, 1.0)
        generating.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(generating, 1.0, "norm")
        generating.step()
        self.untoggle_optimizer(generating)

    def says(self, rows: Tensor, wanted: float) -> Tensor:
        """How far the discriminator is from what it ought to say of rows."""
        said = self.discriminator(rows)
        target = torch.full_like(said, wanted)
        return functional.binary_cross_entropy_with_logits(said, target)

    def configure_optimizers(self) -> Any:
        compile, betas = self.compiled, (0.5, 0.999)
        generating = torch.optim.Adam(self.generator.parameters(), 1e-2, betas)
        telling = torch.optim.Adam(self.discriminator.parameters(), 4e-2, betas)
        compile(generating)
        compile(telling)
        return [generating, telling]


def train(compile: Compile) -> Trained:
    """Train from the first step to the last."""
    seed_all()
    module, data = Adversaries(compile), batches()
    trainer = trainer_of(".", max_epochs=1, enable_checkpointing=False)
    trainer.fit(module, data)
    assert trainer.global_step == 2 * STEPS
    return Trained(tensors_of(module), list(trainer.optimizers))


def resume(compile: Compile, folder: Path) -> Trained:
    """The same with two trainers."""
    seed_all()
    module = Adversaries(compile)
    first = trainer_of(str(folder), max_epochs=1, enable_checkpointing=False)
    first.fit(module, batches(last=STEPS // 2))
    first.save_checkpoint(folder / "half.ckpt")
    other = Adversaries(compile)
    second = trainer_of(str(folder), max_epochs=2, enable_checkpointing=False)
    second.fit(other, batches(STEPS // 2), ckpt_path=folder / "half.ckpt")
    assert second.global_step == 2 * STEPS
    return Trained(tensors_of(other), list(second.optimizers))

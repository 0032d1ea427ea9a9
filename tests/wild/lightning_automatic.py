"""Lightning as most use it: a module with `configure_optimizers`, and its Trainer.

The trainer calls `optimizer.step(closure)`, with forward and backward in the closure.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.wild.trained import STEPS, Compile, Trained, seed_all, tensors_of


class Regression(lightning.LightningModule):
    """A small network, with a batch norm and a schedule that steps with the batches."""

    def __init__(self, compile: Compile) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 4)
        )
        self.compiled = compile

    def training_step(self, batch: Any, number: int) -> Tensor:
        x, y = batch
        return (self.network(x) - y).square().mean()

    def configure_optimizers(self) -> Any:
        compile = self.compiled
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        compile(optimizer)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def batches(first: int = 0, last: int = STEPS) -> DataLoader[Any]:
    """A batch for each step from one number to another, the same ones in each run."""
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(4 * STEPS, 8, generator=random)[4 * first : 4 * last]
    return DataLoader(TensorDataset(inputs, inputs[:, :4].cos()), batch_size=4)


def trainer_of(folder: str, **more: Any) -> lightning.Trainer:
    """A trainer that shows nothing and keeps to the CPU."""
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **more,
    )


def train(compile: Compile) -> Trained:
    """Train from the first step to the last."""
    seed_all()
    module, data = Regression(compile), batches()
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(
            folder, max_steps=STEPS, gradient_clip_val=1.0, enable_checkpointing=False
        )
        trainer.fit(module, data)
    assert trainer.global_step == STEPS
    return Trained(tensors_of(module), list(trainer.optimizers))


def resume(compile: Compile, folder: Path) -> Trained:
    """The same with two trainers: two epochs of half the steps each."""
    seed_all()
    module = Regression(compile)
    more = {"gradient_clip_val": 1.0, "enable_checkpointing": False}
    first = trainer_of(str(folder), max_epochs=1, **more)
    first.fit(module, batches(last=STEPS // 2))
    first.save_checkpoint(folder / "half.ckpt")
    other = Regression(compile)
    second = trainer_of(str(folder), max_epochs=2, **more)
    second.fit(other, batches(STEPS // 2), ckpt_path=folder / "half.ckpt")
    assert second.global_step == STEPS
    return Trained(tensors_of(other), list(second.optimizers))

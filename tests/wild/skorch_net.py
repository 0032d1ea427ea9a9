"""skorch: a network with scikit-learn's `fit`, which makes the optimizer itself.

It calls `optimizer.step(closure)`, with forward and backward in the closure.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from skorch import NeuralNetRegressor
from torch import nn

from tests.wild.trained import STEPS, Compile, Trained, seed_all, tensors_of

#: Epochs, and rows of a batch.
EPOCHS, BATCH = 2, 8


def data() -> tuple[Any, Any]:
    """As many batches for each epoch as make all steps together."""
    x = torch.linspace(-2, 2, 4 * BATCH * STEPS // EPOCHS).reshape(-1, 4)
    return x, x[:, :1].sin()


def net_of(compile: Compile) -> NeuralNetRegressor:
    """A network that is not yet initialized."""
    seed_all()
    network = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
    return NeuralNetRegressor(
        network,
        optimizer=lambda params, **options: compile(
            torch.optim.AdamW(params, **options)
        ),
        optimizer__weight_decay=0.1,
        lr=1e-2,
        max_epochs=EPOCHS,
        batch_size=BATCH,
        train_split=None,
        verbose=0,
    )


def trained_by(net: NeuralNetRegressor) -> Trained:
    return Trained(tensors_of(net.module_), [net.optimizer_])


def train(compile: Compile) -> Trained:
    """Fit all epochs."""
    return trained_by(net_of(compile).fit(*data()))


def resume(compile: Compile, folder: Path) -> Trained:
    """One epoch, then the others in another network that has loaded it."""
    files = {
        "f_params": folder / "params.pt",
        "f_optimizer": folder / "optimizer.pt",
    }
    first = net_of(compile).initialize()
    first.fit_loop(*data(), epochs=EPOCHS // 2)
    first.save_params(**files)
    second = net_of(compile).initialize()
    second.load_params(**files)
    second.fit_loop(*data(), epochs=EPOCHS // 2)
    return trained_by(second)

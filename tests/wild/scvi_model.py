"""scvi-tools: an autoencoder of single cells, trained by lightning within it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import scvi
import torch

from tests.wild.trained import STEPS, Compile, Trained, tensors_of

CELLS, GENES, BATCH = 40, 20, 20
#: Two batches in each.
EPOCHS = STEPS // 2


def cells() -> Any:
    """Counts of genes, made here."""
    return scvi.data.synthetic_iid(CELLS // 2, GENES, n_proteins=0, n_regions=0)


class Fit:
    """A model, and the optimizers that were made for it."""

    def __init__(self, compile: Compile) -> None:
        scvi.settings.seed = 0  # of how it splits the data, too
        self.compile = compile
        self.made: list[torch.optim.Optimizer] = []
        self.data = cells()
        scvi.model.SCVI.setup_anndata(self.data, batch_key="batch")
        self.model = scvi.model.SCVI(self.data, n_hidden=16, n_latent=4)

    def optimizer_of(self, params: Any) -> Any:
        """What scvi is told to make its optimizer with."""
        compile = self.compile
        self.made.append(compile(torch.optim.Adam(params, lr=1e-2, eps=0.01)))
        return self.made[-1]

    def train(self, epochs: int) -> None:
        self.model.train(
            max_epochs=epochs,
            accelerator="cpu",
            train_size=1.0,
            batch_size=BATCH,
            plan_kwargs={
                "optimizer": "Custom",
                "optimizer_creator": self.optimizer_of,
            },
            logger=False,
            enable_progress_bar=False,
        )

    def trained(self) -> Trained:
        return Trained(tensors_of(self.model.module), self.made)


def train(compile: Compile) -> Trained:
    """Train all epochs."""
    fit = Fit(compile)
    fit.train(EPOCHS)
    return fit.trained()


def resume(compile: Compile, folder: Path) -> Trained:
    """Train half of the epochs, save the model, load it and train the others.

    What is saved is the model alone: the optimizer begins anew, as in eager.
    """
    first = Fit(compile)
    first.train(EPOCHS // 2)
    first.model.save(str(folder / "model"))
    second = Fit(compile)
    second.model = scvi.model.SCVI.load(
        str(folder / "model"), second.data, accelerator="cpu"
    )
    second.train(EPOCHS // 2)
    return second.trained()

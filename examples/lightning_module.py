"""A module of lightning: python examples/lightning_module.py"""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import fuseopt


class Regression(lightning.LightningModule):
    """Learns the sine of its first inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.network = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4)
        )

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        """The loss of a batch."""
        x, y = batch
        return (self.network(x) - y).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer, compiled."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        fuseopt.compile(optimizer)  # the one line
        return optimizer


lightning.seed_everything(0)
x = torch.randn(320, 16)
batches = DataLoader(TensorDataset(x, x[:, :4].sin()), batch_size=8)
trainer = lightning.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False,
)  # fmt: skip
trainer.fit(Regression(), batches)

(report,) = fuseopt.reports()
print(f"launches of a step: {report.launches}, for {report.lanes} parameters")

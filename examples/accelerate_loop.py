"""A loop of accelerate, with sums of gradients: python examples/accelerate_loop.py"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import fuseopt

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
x = torch.randn(320, 16)
batches = DataLoader(TensorDataset(x, x[:, :4].sin()), batch_size=8)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
fuseopt.compile(optimizer)  # the one line
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)

for inputs, wanted in batches:
    with accelerator.accumulate(model):
        loss = (model(inputs) - wanted).square().mean()
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

print(f"loss {loss.item():.3f}")
(report,) = fuseopt.reports()
print(f"launches of a step: {report.launches}, for {report.lanes} parameters")

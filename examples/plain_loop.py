"""A plain loop: python examples/plain_loop.py"""

import torch

import fuseopt

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
fuseopt.compile(optimizer)  # the one line

losses = []
for _ in range(50):
    x = torch.randn(32, 16)
    loss = (model(x) - x[:, :4].sin()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.item())

print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
(report,) = fuseopt.reports()
print(f"launches of a step: {report.launches}, for {report.lanes} parameters")

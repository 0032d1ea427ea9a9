"""TorchRL: a learner that a GPU captures: python examples/torchrl_learner.py"""

import torch
from tensordict import TensorDict
from torchrl.modules import MLP, QValueActor
from torchrl.objectives import DQNLoss

import fuseopt
from fuseopt.integrations.torchrl import CapturedLearner

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
network = MLP(in_features=4, out_features=2, num_cells=[32, 32], device=device)
actor = QValueActor(network, in_keys=["observation"], action_space="categorical")
loss_of = DQNLoss(actor, action_space="categorical", delay_value=False)
optimizer = torch.optim.AdamW(loss_of.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def update(batch: TensorDict) -> TensorDict:
    """Forward, backward, step: on a GPU all of it is one replay."""
    optimizer.zero_grad()
    losses = loss_of(batch)
    losses["loss"].backward()
    optimizer.step()
    return losses.detach()


keys = {"in_keys": [], "out_keys": []}
learner = CapturedLearner(update, optimizers=[optimizer], **keys)  # the one line

for _ in range(20):
    seen = torch.randn(2, 16, 4, device=device)
    done = torch.zeros(16, 1, dtype=torch.bool, device=device)
    after = {"observation": seen[1], "reward": seen[0, :, :1], "done": done}
    after["terminated"] = done
    action = (seen[0, :, 0] > 0).long()
    batch = TensorDict({"observation": seen[0], "action": action, "next": after}, [16])
    losses = learner(batch.to(device))
    schedule.step()

print(f"loss {losses['loss'].item():.3f}")
(report,) = fuseopt.reports()
print(f"launches of a step: {report.launches}, for {report.lanes} parameters")

"""TorchRL: PPO on a pendulum, whose update is a learner that a GPU would capture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensordict.nn import CudaGraphModule, TensorDictModule
from tensordict.nn.distributions import NormalParamExtractor
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torchrl.envs.custom.pendulum import PendulumEnv
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from tests.wild.trained import STEPS, Compile, Trained, seed_all, tensors_of

#: Steps of an update's batch, and updates for each rollout.
LONG, EPOCHS = 16, 5
SEEN = ("th", "thdot")
#: What a checkpoint holds, beside the generators of random numbers.
SAVED = ("actor", "critic", "optimizer", "schedule")


class Network(nn.Sequential):
    """Takes an angle and a speed."""

    def __init__(self, *last: nn.Module) -> None:
        super().__init__(nn.Linear(2, 16), nn.Tanh(), *last)

    def forward(self, angle: torch.Tensor, speed: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.stack([angle, speed], -1))


class Loop:
    """Actor, critic, optimizer and learner; `learner`: what an update is wrapped in."""

    def __init__(self, compile: Compile, learner: Any = CudaGraphModule) -> None:
        seed_all()
        self.env = PendulumEnv()
        self.actor = ProbabilisticActor(
            TensorDictModule(
                Network(nn.Linear(16, 2), NormalParamExtractor()),
                in_keys=[*SEEN],
                out_keys=["loc", "scale"],
            ),
            in_keys=["loc", "scale"],
            out_keys=["action"],
            distribution_class=TanhNormal,
            distribution_kwargs={"low": -2.0, "high": 2.0},
            return_log_prob=True,
        )
        self.critic = ValueOperator(Network(nn.Linear(16, 1)), in_keys=[*SEEN])
        self.gains = GAE(gamma=0.9, lmbda=0.95, value_network=self.critic)
        self.loss = ClipPPOLoss(self.actor, self.critic)
        self.optimizer = torch.optim.AdamW(self.loss.parameters(), lr=1e-2)
        compile(self.optimizer)
        self.schedule = LinearLR(self.optimizer, 1.0, 0.1, STEPS)
        self.learner = learner(self.update, in_keys=[], out_keys=[])
        self.done = 0

    def update(self, batch: Any) -> Any:
        """Forward, backward, clip, step."""
        self.optimizer.zero_grad()
        losses = self.loss(batch)
        parts = [x for name, x in losses.items() if name.startswith("loss_")]
        torch.stack(parts).sum().backward()
        nn.utils.clip_grad_norm_(self.loss.parameters(), 1.0)
        self.optimizer.step()
        return losses.detach()

    def train_until(self, last: int) -> None:
        """Take steps until so many are done, from rollouts of several updates each."""
        while self.done < last:
            with torch.no_grad():
                batch = self.env.rollout(LONG, self.actor)
                self.gains(batch)
            for _ in range(EPOCHS):
                self.learner(batch)
                self.schedule.step()
                self.done += 1

    def trained(self) -> Trained:
        return Trained(tensors_of(self.loss), [self.optimizer])


def train(compile: Compile) -> Trained:
    """Train from the first step to the last."""
    loop = Loop(compile)
    loop.train_until(STEPS)
    return loop.trained()


def resume(compile: Compile, folder: Path) -> Trained:
    """The same in two loops, with a file between them."""
    first = Loop(compile)
    first.train_until(STEPS // 2)
    held = {name: getattr(first, name).state_dict() for name in SAVED}
    random = (torch.get_rng_state(), first.env.rng.get_state())
    numbers = {"done": first.done, "random": random}
    torch.save({**held, **numbers}, folder / "loop.pt")
    second = Loop(compile)
    saved = torch.load(folder / "loop.pt", weights_only=True)
    for name in SAVED:
        getattr(second, name).load_state_dict(saved[name])
    second.done = saved["done"]
    torch.set_rng_state(saved["random"][0])
    second.env.rng.set_state(saved["random"][1])
    second.train_until(STEPS)
    return second.trained()

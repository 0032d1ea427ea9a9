"""diffusers: noise of a small U-Net's images, as its training scripts have it.

`train` keeps the average by `EMAModel.step`; `train_with_tail` lets `fuseopt.tail` do
the clip, the step, the average and the clearing of gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from torch.nn import functional

import fuseopt
from tests.wild.trained import STEPS, Compile, Trained, seed_all, tensors_of

SIZE, IMAGES = 8, 2


class Loop:
    """A U-Net, its optimizer, schedule and average, and how far they are."""

    def __init__(self, compile: Compile) -> None:
        seed_all()
        self.unet = UNet2DModel(
            sample_size=SIZE,
            in_channels=1,
            out_channels=1,
            layers_per_block=1,
            block_out_channels=(8, 16),
            norm_num_groups=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=8,
        )
        self.noise = DDPMScheduler(num_train_timesteps=100)
        self.average = EMAModel(
            self.unet.parameters(), decay=0.99, use_ema_warmup=True, power=0.75
        )
        optimizer = torch.optim.AdamW(self.unet.parameters(), lr=1e-3)
        self.optimizer = compile(optimizer)
        self.schedule = get_cosine_schedule_with_warmup(optimizer, 3, STEPS)
        self.step = 0
        self.tail: Callable[[], Any] = self.in_pieces

    def in_pieces(self) -> None:
        """What scripts do once there are gradients."""
        torch.nn.utils.clip_grad_norm_(self.unet.parameters(), 1.0)
        self.optimizer.step()
        self.average.step(self.unet.parameters())
        self.optimizer.zero_grad()

    def train_until(self, last: int) -> None:
        """Take steps until so many are done."""
        while self.step < last:
            random = torch.Generator().manual_seed(self.step)
            shape = (IMAGES, 1, SIZE, SIZE)
            images = torch.randn(IMAGES, 1, 1, 1, generator=random).expand(shape)
            noise = torch.randn(shape, generator=random)
            times = torch.randint(100, (IMAGES,), generator=random)
            noisy = self.noise.add_noise(images, noise, times)
            told = self.unet(noisy, times, return_dict=False)[0]
            functional.mse_loss(told, noise).backward()
            self.tail()
            self.schedule.step()
            self.step += 1

    def trained(self) -> Trained:
        tensors = tensors_of(self.unet)
        for place, shadow in enumerate(self.average.shadow_params):
            tensors[f"average {place}"] = shadow.clone()
        assert self.average.optimization_step == STEPS
        return Trained(tensors, [self.optimizer])


def train(compile: Compile) -> Trained:
    """Train from the first step to the last."""
    loop = Loop(compile)
    loop.train_until(STEPS)
    return loop.trained()


def train_with_tail(change: Compile) -> Trained:
    """The same; `change` may put a tail in the place of the loop's own."""
    loop = Loop(lambda optimizer: optimizer)
    change(loop)
    loop.train_until(STEPS)
    return loop.trained()


def put_tail(loop: Loop) -> None:
    """What a user changes: four lines become the call of a tail."""
    average = [(loop.average, [*loop.unet.parameters()])]
    loop.tail = fuseopt.tail(
        loop.optimizer, clip_grad_norm=1.0, ema=average, zero_grad=True
    )


def resume(compile: Compile, folder: Path) -> Trained:
    """The same as `train` in two loops."""
    first = Loop(compile)
    first.train_until(STEPS // 2)
    held = {
        "unet": first.unet.state_dict(),
        "optimizer": first.optimizer.state_dict(),
        "schedule": first.schedule.state_dict(),
        "average": first.average.state_dict(),
    }
    torch.save(held, folder / "half.pt")
    second, held = Loop(compile), torch.load(folder / "half.pt")
    second.unet.load_state_dict(held["unet"])
    second.optimizer.load_state_dict(held["optimizer"])
    second.schedule.load_state_dict(held["schedule"])
    second.average.load_state_dict(held["average"])
    second.step = STEPS // 2
    second.train_until(STEPS)
    return second.trained()

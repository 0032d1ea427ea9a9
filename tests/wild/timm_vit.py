"""timm: optimizers of its registry by name, layer decay, and its average of a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import fuseopt
from tests.wild.trained import STEPS, Compile, Trained, seed_all, tensors_of
from tests.wild.without_torchvision import stand_ins

with stand_ins():
    from timm.models.vision_transformer import VisionTransformer
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler
    from timm.utils import ModelEmaV3

CLASSES, SIZE = 4, 8


class Loop:
    """A vision transformer, its optimizer, schedule and average."""

    def __init__(self, compile: Compile, name: str, **options: Any) -> None:
        seed_all()
        self.model = VisionTransformer(
            img_size=SIZE,
            patch_size=4,
            num_classes=CLASSES,
            embed_dim=16,
            depth=2,
            num_heads=2,
        )
        optimizer = create_optimizer_v2(
            self.model, name, lr=1e-2, weight_decay=0.05, layer_decay=0.7, **options
        )
        self.optimizer = compile(optimizer)
        self.schedule = CosineLRScheduler(
            self.optimizer, STEPS, warmup_t=3, warmup_lr_init=1e-4, t_in_epochs=False
        )
        self.average = ModelEmaV3(self.model, decay=0.99, use_warmup=True)
        self.step = 0
        self.clipped = [*self.model.parameters()]
        self.tail: Callable[[], Any] = self.in_pieces

    def in_pieces(self) -> None:
        """What its training script does once there are gradients."""
        torch.nn.utils.clip_grad_norm_(self.clipped, 1.0)
        self.optimizer.step()
        self.average.update(self.model, step=self.step)
        self.optimizer.zero_grad()

    def train_until(self, last: int) -> None:
        """Take steps until so many are done."""
        while self.step < last:
            images, classes = batch_of(self.step)
            functional.cross_entropy(self.model(images), classes).backward()
            self.tail()
            self.step += 1
            self.schedule.step_update(self.step)

    def trained(self) -> Trained:
        return Trained(tensors_of(self.model, self.average.module), [self.optimizer])


def batch_of(number: int) -> tuple[Tensor, Tensor]:
    """Images whose brightness is their class."""
    random = torch.Generator().manual_seed(number)
    classes = torch.randint(CLASSES, (4,), generator=random)
    noise = torch.randn(4, 3, SIZE, SIZE, generator=random)
    return noise + classes[:, None, None, None], classes


def train(compile: Compile, name: str = "adamw", **options: Any) -> Trained:
    """Train from the first step to the last."""
    loop = Loop(compile, name, **options)
    loop.train_until(STEPS)
    return loop.trained()


def train_with_tail(change: Compile) -> Trained:
    """The same; `change` may put a tail in the place of the loop's own.

    A tail adds up the total norm in the order of the groups, which layer decay makes
    another one than the model's; so does eager here.
    """
    loop = Loop(lambda optimizer: optimizer, "adamw")
    loop.clipped = [p for group in loop.optimizer.param_groups for p in group["params"]]
    change(loop)
    loop.train_until(STEPS)
    return loop.trained()


def put_tail(loop: Loop) -> None:
    """What a user changes: four lines become the call of a tail."""
    average = [(loop.average, loop.model)]
    tail = fuseopt.tail(loop.optimizer, clip_grad_norm=1.0, ema=average, zero_grad=True)
    loop.tail = lambda: tail(step=loop.step)


def resume(compile: Compile, folder: Path) -> Trained:
    """The same in two loops."""
    first = Loop(compile, "adamw")
    first.train_until(STEPS // 2)
    held = {
        "model": first.model.state_dict(),
        "average": first.average.module.state_dict(),
        "optimizer": first.optimizer.state_dict(),
    }
    torch.save(held, folder / "half.pt")
    second, held = Loop(compile, "adamw"), torch.load(folder / "half.pt")
    second.model.load_state_dict(held["model"])
    second.average.module.load_state_dict(held["average"])
    second.optimizer.load_state_dict(held["optimizer"])
    second.step = STEPS // 2
    second.train_until(STEPS)
    return second.trained()

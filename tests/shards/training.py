"""Trainings of spread models, with the plain optimizer and with the compiled one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer

import fuseopt
from tests.papers import LAMB, LARS, MARS, Lion, NovoGrad, Yogi
from tests.shards.models import MODELS, PLAIN, model

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda ps: SGD(ps, lr=0.1, momentum=0.9),
    "AdamW": lambda ps: AdamW(ps, lr=0.1),
    "Adam": lambda ps: Adam(ps, lr=0.1, foreach=True),
    "Lion": lambda ps: Lion(ps, lr=0.1),
    "Yogi": lambda ps: Yogi(ps, lr=0.1),
    "Adafactor": lambda ps: Adafactor(ps, lr=0.1),
    "LAMB": lambda ps: LAMB(ps, lr=0.1),
    "LARS": lambda ps: LARS(ps, lr=0.1),
    "MARS": lambda ps: MARS(ps, lr=0.1),
    "NovoGrad": lambda ps: NovoGrad(ps, lr=0.1),
}
#: What these do to a tensor is more than treating each element alike.
OF_WHOLES = ("Adafactor", "LAMB", "LARS", "MARS", "NovoGrad")
#: As in LAMB, it is norms of each.
NORMS = ("LARS", "MARS", "NovoGrad")
#: These have their steps in the form of lists.
LISTS = ("Adam",)
Clip = Callable[..., Any]


def train(
    m: nn.Module,
    optimizer: Optimizer,
    steps: int,
    first: int = 0,
    clip: Clip | None = None,
) -> None:
    """Some steps, with another learning rate each."""
    for k in range(first, first + steps):
        backward(m, k)
        if clip is not None:
            clip(m.parameters(), 0.5 + k)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + k % 3)
        optimizer.step()
        optimizer.zero_grad(set_to_none=k % 2 == 0)


def backward(m: nn.Module, k: int) -> None:
    """The gradients of step k, the same in each process."""
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(k))
    m(x).square().sum().backward()


def built(kind: str, lanes: int = 6) -> nn.Module:
    """A model as its users have it."""
    m = MODELS[kind](model(lanes))
    spread = any(type(p).__name__ == "DTensor" for p in m.parameters())
    assert spread == (kind not in PLAIN)
    return m


def compiled(optimizer: Optimizer, way: str) -> Optimizer:
    """`way`: of the two in which a step is compiled; "" for eager's."""
    if way == "fuseopt.compile":
        fuseopt.compile(optimizer)
    elif way:
        optimizer.step = torch.compile(  # type: ignore[method-assign]
            optimizer.step, backend="fuseopt"
        )
    return optimizer


def trained(
    kind: str, name: str, way: str, clip: Clip | None = None, steps: int = 6
) -> tuple[nn.Module, Optimizer]:
    """A model and its optimizer, after some steps."""
    m = built(kind)
    optimizer = compiled(OPTIMIZERS[name](m.parameters()), way)
    train(m, optimizer, steps, clip=clip)
    return m, optimizer

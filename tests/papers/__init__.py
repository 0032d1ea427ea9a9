"""Optimizers written from their papers: a Python loop over parameters, as people do.

Nothing here knows of fuseopt. Each class says which paper it is from; the styles differ
on purpose (a step counter per parameter or per group, ints or tensors, `.data`, `out=`,
chained methods, operators), since users' do.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from .adaptive import ADOPT, AdaBelief, AdaBound, AdaMod, DiffGrad, Grams, QHAdam, Yogi
from .momentum import (
    FTRL,
    PNM,
    AggMo,
    Lion,
    NesterovDecay,
    ScheduleFreeSGD,
    Signum,
    Sophia,
    Tiger,
)
from .reducing import LAMB, LARS, MARS, CautiousAdamW, Gravity, NovoGrad
from .schedules import Adan, AdEMAMix, RectifiedAdam, TensorSteps

#: (class, options of the second parameter group): elementwise, one launch, all bits.
ELEMENTWISE: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (Lion, {"betas": (0.8, 0.9), "weight_decay": 0.1}),
    (AdaBelief, {"eps": 1e-8, "weight_decay": 0.0}),
    (Yogi, {"betas": (0.8, 0.99)}),
    (AdaBound, {"gamma": 0.5, "final_lr": 0.2}),
    (QHAdam, {"nus": (0.5, 0.9)}),
    (Signum, {"momentum": 0.7}),
    (AdaMod, {"beta3": 0.9}),
    (Tiger, {"beta": 0.8}),
    (AdEMAMix, {"alpha": 2.0, "warmup": 3}),
    (Grams, {"weight_decay": 0.1}),
    (ADOPT, {"betas": (0.8, 0.99)}),
    (Adan, {"weight_decay": 0.1}),
    (Sophia, {"rho": 0.1}),
    (PNM, {"betas": (0.8, 0.5)}),
    (RectifiedAdam, {"lr": 0.01}),
    (AggMo, {"lr": 0.05}),
    (FTRL, {"l1": 0.5}),
    (ScheduleFreeSGD, {"beta": 0.5}),
    (NesterovDecay, {"momentum": 0.5}),
    (TensorSteps, {"betas": (0.8, 0.99)}),
]
#: Those that reduce a tensor to a number.
REDUCING: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (Gravity, {"beta": 0.5}),
    (LAMB, {"weight_decay": 0.0}),
    (LARS, {"momentum": 0.5}),
    (NovoGrad, {"weight_decay": 0.1}),
    (CautiousAdamW, {"weight_decay": 0.0}),
    (MARS, {"gamma": 0.1}),
]
#: Those that use a function named in docs/numerics.md; how many ulp of the largest
#: element of a tensor eight steps may be off.
INEXACT: list[tuple[type[Optimizer], dict[str, Any], float]] = [
    (DiffGrad, {"betas": (0.8, 0.99)}, 2.0)
]

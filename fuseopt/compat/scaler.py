"""GradScaler's private API: the stage and the found_inf flags of each optimizer.

Checked with torch 2.11 and 2.13: a dict by the optimizer's id, with the stage that it
is in and a flag for each device. Where that is missing, an AttributeError tells of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.amp import grad_scaler
from torch.optim import Optimizer

STAGES: Any = grad_scaler.OptState
#: The methods that a tail stands for; a scaler with others is not torch's.
METHODS = ("unscale_", "step", "_unscale_grads_", "_maybe_opt_step")


def is_plain_scaler(scaler: torch.amp.GradScaler) -> bool:
    """Does a scaler unscale and skip as torch's own does?"""
    plain: Any = torch.amp.GradScaler
    return all(
        getattr(getattr(scaler, name, None), "__func__", None) is getattr(plain, name)
        for name in METHODS
    )


def scale_of(scaler: torch.amp.GradScaler) -> torch.Tensor:
    """The scale; an AssertionError of torch's where none was ever used."""
    return scaler._check_scale_growth_tracker("step")[0]


def stage_of(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> Any:
    """One of STAGES."""
    return scaler._per_optimizer_states[id(optimizer)]["stage"]


def founds_of(
    scaler: torch.amp.GradScaler, optimizer: Optimizer
) -> dict[torch.device, torch.Tensor]:
    """By device, what it found in the gradients of an optimizer: 1 for a step that is
    to be skipped.
    """
    flags: dict[torch.device, torch.Tensor] = scaler._per_optimizer_states[
        id(optimizer)
    ]["found_inf_per_device"]
    return flags


def has_stepped(
    scaler: torch.amp.GradScaler,
    optimizer: Optimizer,
    found: torch.Tensor | None = None,
) -> None:
    """Let it know that an optimizer has stepped; `found`: what was in its gradients, if
    it was not the scaler that looked.
    """
    state = scaler._per_optimizer_states[id(optimizer)]
    if found is not None:
        state["found_inf_per_device"] = {found.device: found}
    state["stage"] = STAGES.STEPPED

"""Private API of GradScaler: the stage and the found_inf flags of each optimizer.

Relies on a dict by the optimizer's id, with its stage and a flag for each device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from .capability import probed
from .names import Missing, find

STAGES: Any = find("torch.amp.grad_scaler:OptState", None)


@probed(
    "grad-scaler",
    "what a GradScaler knows of an optimizer is read and set",
    "fuseopt.tail raises an error for a scaler; it steps without one",
)
def SCALER() -> None:
    for name in ("READY", "UNSCALED", "STEPPED"):
        find(f"torch.amp.grad_scaler:OptState.{name}")
    kind = find("torch.amp:GradScaler")
    for name in (*METHODS, "_check_scale_growth_tracker"):
        find(f"torch.amp:GradScaler.{name}")
    if "_per_optimizer_states" not in kind.__init__.__code__.co_names:
        raise Missing("torch.amp.GradScaler has no _per_optimizer_states")


#: The methods that a tail replaces; a scaler with others is not torch's.
METHODS = ("unscale_", "step", "_unscale_grads_", "_maybe_opt_step")


def is_plain_scaler(scaler: torch.amp.GradScaler) -> bool:
    """Does a scaler unscale and skip as torch's own does?"""
    plain: Any = torch.amp.GradScaler
    return SCALER.available() and all(
        getattr(getattr(scaler, name, None), "__func__", None) is getattr(plain, name)
        for name in METHODS
    )


def scale_of(scaler: torch.amp.GradScaler) -> torch.Tensor:
    """Return the scale. Raises torch's AssertionError if none was ever used."""
    return scaler._check_scale_growth_tracker("step")[0]


def stage_of(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> Any:
    """Return the optimizer's stage, one of STAGES."""
    return scaler._per_optimizer_states[id(optimizer)]["stage"]


def founds_of(
    scaler: torch.amp.GradScaler, optimizer: Optimizer
) -> dict[torch.device, torch.Tensor]:
    """Return the found_inf flag of each device: 1 for a step that is to be skipped."""
    flags: dict[torch.device, torch.Tensor] = scaler._per_optimizer_states[
        id(optimizer)
    ]["found_inf_per_device"]
    return flags


def has_unscaled(
    scaler: torch.amp.GradScaler, optimizer: Optimizer, found: torch.Tensor
) -> None:
    """Record in the scaler that gradients were unscaled, with the flag `found`."""
    state = scaler._per_optimizer_states[id(optimizer)]
    state["found_inf_per_device"] = {found.device: found}
    state["stage"] = STAGES.UNSCALED


def has_stepped(
    scaler: torch.amp.GradScaler,
    optimizer: Optimizer,
    found: torch.Tensor | None = None,
) -> None:
    """Record in the scaler that an optimizer has stepped.

    `found`: the flag of its gradients, if the scaler did not check them itself.
    """
    state = scaler._per_optimizer_states[id(optimizer)]
    if found is not None:
        state["found_inf_per_device"] = {found.device: found}
    state["stage"] = STAGES.STEPPED

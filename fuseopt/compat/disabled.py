"""Steps that Dynamo never traces, and Dynamo's preparation of a step."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch


def never_compiled(optimizer: torch.optim.Optimizer) -> str:
    """Return why Dynamo would not pass this step to any backend; "" if it would.

    Relies on what torch disables: the functions behind `fused=True`, and whole steps.
    """
    if any(group.get("fused") for group in optimizer.param_groups):
        return (
            f"{type(optimizer).__name__} was made with fused=True: Dynamo does not "
            "trace torch's fused steps, so torch never calls a backend. Pass "
            "foreach=True (or omit both), or use fuseopt.compile(optimizer)."
        )
    return disabled(optimizer)


def disabled(optimizer: torch.optim.Optimizer) -> str:
    """Return why Dynamo ignores this optimizer's whole step; "" if it does not.

    Relies on the attribute that `torch.compiler.disable` sets. torch marks some of its
    steps with it when a process compiles its first function.
    """
    _compile_once()
    step = type(optimizer).step
    if getattr(step, "_torchdynamo_disable", False) or getattr(
        inspect.unwrap(step), "_torchdynamo_disable", False
    ):
        return (
            f"{type(optimizer).__name__}.step is disabled under Dynamo, so torch never "
            "calls a backend. Leave this optimizer uncompiled."
        )
    return ""


@functools.cache
def _compile_once() -> None:
    torch.compile(disabled, backend="eager")


def initialize(optimizer: Any) -> bool:
    """Make the state of all parameters as Dynamo does before it traces.

    Dynamo calls `_init_group` for real, with empty lists. False if there is none, or
    one with other arguments.
    """
    make = getattr(optimizer, "_init_group", None)
    if make is None:
        return False
    params = list(inspect.signature(make).parameters.values())[1:]
    if any(x.kind not in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD) for x in params):
        return False
    for group in optimizer.param_groups:
        make(group, *([] for x in params if x.default is x.empty))
    return True

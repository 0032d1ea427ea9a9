"""Callbacks for Dynamo's traces; they import the diagnostics only when needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..compat import refusals_pass


def refuse_untraceable(
    backend: Callable[..., Any], optimizer: torch.optim.Optimizer
) -> None:
    """Raise UnsupportedInput for a step that Dynamo would silently run in eager."""
    from . import diagnostics

    with refusals_pass(backend):
        diagnostics.refuse_untraceable(optimizer)


def kept_from_dynamo(optimizer: torch.optim.Optimizer) -> str:
    """Report and return the reason why a step runs in eager; "" if Dynamo traces it."""
    from . import diagnostics

    return diagnostics.kept_from_dynamo(optimizer)


def of_limit(
    function: str, optimizer: torch.optim.Optimizer | None, guard: str
) -> None:
    """Warn that a function runs in eager, because Dynamo hit its recompile limit."""
    from . import diagnostics

    diagnostics.warn_of_limit(function, optimizer, guard)


def of_graph_break(place: str, reason: str, optimizer: torch.optim.Optimizer) -> None:
    """Warn that Dynamo breaks a graph within a step."""
    from . import diagnostics

    diagnostics.warn_of_graph_break(place, reason, optimizer)


def of_failure(
    function: str, reason: str, optimizer: torch.optim.Optimizer | None
) -> None:
    """Warn that Dynamo fails on code, which runs in eager."""
    from . import diagnostics

    diagnostics.warn_of_failure(function, reason, optimizer)


def of_refusal(optimizer: torch.optim.Optimizer, why: str) -> None:
    """Report that a step must run in eager, as a trace has shown."""
    from . import diagnostics

    diagnostics.warn_of_step(optimizer, why)


def of_bound_step(optimizer: torch.optim.Optimizer) -> None:
    """Report a bound step that Dynamo compiles itself, if Dynamo must not trace it."""
    from .. import compat
    from . import diagnostics

    why = compat.unsound(optimizer)
    if why:
        diagnostics.warn_of_step(optimizer, why)

"""Who is told of Dynamo's traces; what tells the user is loaded when it is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..compat import refusals_pass


def refuse_untraceable(
    backend: Callable[..., Any], optimizer: torch.optim.Optimizer
) -> None:
    """Raise UnsupportedInput for a step that Dynamo would run in eager, silently."""
    from . import diagnostics

    with refusals_pass(backend):
        diagnostics.refuse_untraceable(optimizer)


def kept_from_dynamo(optimizer: torch.optim.Optimizer) -> str:
    """The reason why a step runs in eager, which is reported; "" if it is traced."""
    from . import diagnostics

    return diagnostics.kept_from_dynamo(optimizer)


def of_limit(
    function: str, optimizer: torch.optim.Optimizer | None, guard: str
) -> None:
    """Dynamo gives up on a function: warn that it runs in eager."""
    from . import diagnostics

    diagnostics.tell_of_limit(function, optimizer, guard)


def of_graph_break(place: str, reason: str, optimizer: torch.optim.Optimizer) -> None:
    """Dynamo ends a graph within a step: warn of it."""
    from . import diagnostics

    diagnostics.tell_of_graph_break(place, reason, optimizer)


def of_failure(
    function: str, reason: str, optimizer: torch.optim.Optimizer | None
) -> None:
    """Dynamo fails on code, which runs in eager: warn of it."""
    from . import diagnostics

    diagnostics.tell_of_failure(function, reason, optimizer)


def of_refusal(optimizer: torch.optim.Optimizer, why: str) -> None:
    """A trace shows that a step must run in eager: report it."""
    from . import diagnostics

    diagnostics.tell_of_step(optimizer, why)


def left(optimizer: torch.optim.Optimizer) -> None:
    """Dynamo compiles a bound step itself: report it where that must not be traced."""
    from .. import compat
    from . import diagnostics

    why = compat.unsound(optimizer)
    if why:
        diagnostics.tell_of_step(optimizer, why)

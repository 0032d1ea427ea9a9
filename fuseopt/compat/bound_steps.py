"""Take over `torch.compile(optimizer.step, backend=...)` of a bound step."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .dynamo import layers_of


@dataclass(frozen=True)
class Asked:
    """What torch.compile was asked for, besides the function and the backend."""

    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    fullgraph: bool = False
    dynamic: bool | None = None


def on_bound_step(
    backend: Callable[..., Any],
    take: Callable[[Any, torch.optim.Optimizer, Asked], Any],
) -> None:
    """Let `take(function, optimizer, asked)` answer where `torch.compile` is given the
    bound step of an optimizer for `backend`, or what stands in the place of its `step`;
    where it gives None, Dynamo compiles as ever.

    Relies on the class of what `torch._dynamo.optimize` returns, and its attributes
    (torch 2.11.0, 2.13.0); where they are others, Dynamo compiles as ever.
    """
    try:
        from torch._dynamo.eval_frame import OptimizeContext
    except ImportError:
        return
    theirs = OptimizeContext.__call__

    @functools.wraps(theirs)
    def call(self: Any, fn: Any) -> Any:
        owner = owner_of(fn)
        asked = None if owner is None else _asked(self, backend)
        if owner is not None and asked is not None:
            taken = take(fn, owner, asked)
            if taken is not None:
                return taken
        return theirs(self, fn)

    OptimizeContext.__call__ = call  # type: ignore[method-assign]


def owner_of(function: Any) -> torch.optim.Optimizer | None:
    """The optimizer whose `step` a function is: a method bound to it, or what somebody,
    such as a scheduler, has put in the place of its step. None for all else.
    """
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.optim.Optimizer):
        named = getattr(function, "__name__", "") == "step"
        return owner if named or _stands_for(function, owner) else None
    for cell in getattr(function, "__closure__", None) or ():
        try:
            owner = cell.cell_contents
        except ValueError:  # an empty cell
            continue
        owner = owner() if isinstance(owner, weakref.ref) else owner
        if isinstance(owner, torch.optim.Optimizer) and _stands_for(function, owner):
            return owner
    return None


def _stands_for(function: Any, optimizer: torch.optim.Optimizer) -> bool:
    return vars(optimizer).get("step") is function


def _asked(context: Any, backend: Callable[..., Any]) -> Asked | None:
    """What a context that compiles for a backend was asked for; None where that is more
    than a step can follow, or where somebody stands between torch and the backend.
    """
    hooks = getattr(context, "_hooks", None)
    others = (
        getattr(context, "export", True),
        getattr(context, "_package", None),
        getattr(context, "_shapes_spec", None),
        getattr(hooks, "guard_filter_fn", None),
        not getattr(context, "first_ctx", False),
    )
    if any(x not in (None, False) for x in others):
        return None
    keywords: dict[str, Any] = {}
    for layer in layers_of(getattr(context, "callback", None)):
        if layer is backend:
            break
        if type(layer).__module__.split(".")[0] != "torch":
            return None
        keywords = {**getattr(layer, "kwargs", {}), **keywords}
    else:
        return None
    return Asked(
        keywords.get("mode"),
        dict(keywords.get("options") or {}),
        bool(getattr(context, "fullgraph", False)),
        getattr(context, "_dynamic", None),
    )

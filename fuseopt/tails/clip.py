"""`fuseopt.clip_grad_norm_`: torch's function, in two launches.

Of DTensors the parts are clipped that this process has (`spread_clip.py`). Torch's own
function runs whatever cannot be compiled, and a Report says why.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import compat
from ..compiler.entry import BACKEND, attach
from ..compiler.report import Report
from ..compiler.session import session
from ..isolate.compilations import Compilations
from ..isolate.decorators import copied
from ..isolate.isolated import TRACES
from ..shadow.whole import NotTraced
from .spread_clip import SpreadClip, check_memory

Tensors = list[torch.Tensor]
#: Sets of parameters that begin with the same one and are compiled for, at most.
PATIENCE = 8
MANY = "too many sets of parameters begin with the same one"
_lock = threading.RLock()


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Do what `torch.nn.utils.clip_grad_norm_` does, with its bits: scale gradients in
    place so that their total norm is `max_norm` at most, and return what it was.

    Nothing is deferred: the gradients are clipped when it returns, and nothing waits
    for the device, but where `error_if_nonfinite` asks for the norm.
    """
    if isinstance(parameters, torch.Tensor):
        every: Any = [parameters]
    else:
        every = [*parameters]
        if not every and isinstance(parameters, types.GeneratorType):
            every = parameters  # of which torch warns
    numbers = max_norm, norm_type, error_if_nonfinite, foreach
    if torch.compiler.is_dynamo_compiling():
        return torch.nn.utils.clip_grad_norm_(every, *numbers)
    held = [p for p in every if p.grad is not None]
    grads: list[Any] = [p.grad for p in held]
    spread = bool(grads) and compat.are_spread(grads[:1])
    why = _why_not(grads, spread)
    if not why and not spread:
        order = compat.dtypes_in_order(grads)
        if order is None:
            why = "nobody knows in which order torch goes over dtypes"
        elif order:
            held.sort(key=lambda p: order.index(p.grad.dtype))
    if not why:
        floats = float(max_norm), float(norm_type)
        given = _Given(held, *floats, bool(error_if_nonfinite), foreach)
        norm = None
        with _lock:
            clip = _clip_of(held, spread)
            if isinstance(clip, Clip):
                norm = clip.call(given)
        if isinstance(clip, SpreadClip):
            # not under the lock: the processes it waits for may be threads of this one
            norm = clip.call(grads, *floats, given.raises, foreach)
        if norm is not None:
            return norm
        why = MANY if clip is None else clip.why
    if why != "begin":
        _tell(why)
    return torch.nn.utils.clip_grad_norm_(every, *numbers)


class Clip:
    """What clips the gradients of some parameters. `why`: why it no longer does."""

    def __init__(self) -> None:
        attach()
        self.why = ""
        self.compilations = Compilations()
        traced = copied(_clipped, ())
        made = self.compilations.compile(BACKEND, traced, fullgraph=True)
        self.compiled: Callable[[Any], torch.Tensor] = compat.Traced(made, traced)

    def call(self, given: _Given) -> torch.Tensor | None:
        """Clip; or None, with `why`, if nothing was done."""
        if self.why:
            return None
        try:
            with torch.no_grad():
                norm = self.compiled(given)
        except Exception as error:
            if not isinstance(error, (NotTraced, *compat.dynamo_errors())):
                raise
            check_memory([p.grad for p in given.params if p.grad is not None])
            self.why = str(error).strip().partition("\n")[0] or type(error).__name__
            self.compilations.forget()
            return None
        if given.raises and not bool(torch.isfinite(norm)):
            grads = [p.grad for p in given.params if p.grad is not None]
            more = given.norm_type, True, given.foreach
            return torch.nn.utils.get_total_norm(grads, *more)
        return norm


@dataclass(eq=False)
class _Given:
    """What a call is given, as Dynamo sees it."""

    params: Tensors
    max_norm: float
    norm_type: float
    raises: bool
    foreach: bool | None


def _clipped(self: _Given) -> torch.Tensor:
    """What torch's function does, of which nothing is written where it raises."""
    if not torch.compiler.is_dynamo_compiling():
        raise NotTraced("Dynamo leaves it to eager")
    norm_type, foreach = self.norm_type, self.foreach
    if not self.raises:
        return torch.nn.utils.clip_grad_norm_(
            self.params, self.max_norm, norm_type, False, foreach
        )
    grads = [p.grad for p in self.params if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads, norm_type, False, foreach)
    factor = torch.clamp(self.max_norm / (norm + 1e-6), max=1.0)
    factor = torch.where(torch.isfinite(norm), factor, torch.ones_like(factor))
    if foreach is False:
        for g in grads:
            g.mul_(factor)
        return norm
    torch._foreach_mul_(grads, factor)
    return norm


def _why_not(grads: Sequence[torch.Tensor], spread: bool) -> str:
    """Why torch's function is called; "begin" where there is nothing to tell.

    `spread`: is the first gradient a DTensor?
    """
    if not grads or compat.stance() not in TRACES or not compat.without_modes():
        return "begin"
    kind = compat.dtensor_type() if spread else torch.Tensor
    if any(type(g) is not kind for g in grads):
        return "gradients are tensors of another class"
    if any(g.layout != torch.strided for g in grads):
        return "gradients are sparse"
    if len({g.device for g in grads}) > 1:
        return "gradients lie on several devices"
    if any(g.requires_grad for g in grads):
        return "gradients are differentiated"
    if len({*map(id, grads)}) < len(grads):
        return "parameters share a gradient, which is scaled twice"
    return ""


def _clip_of(held: Sequence[torch.Tensor], spread: bool) -> Clip | SpreadClip | None:
    known: dict[Any, Clip | SpreadClip] = session.clips.setdefault(held[0], {})
    key = spread, *map(id, held)
    if key not in known:
        if len(known) >= PATIENCE:
            return None
        known[key] = SpreadClip() if spread else Clip()
    return known[key]


def _tell(why: str) -> None:
    text = f"Gradients are clipped by torch's function: {why}"
    if all(report.fallback != text for report in session.reports):
        session.reports.append(Report(fallback=text))

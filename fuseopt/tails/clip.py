"""`fuseopt.clip_grad_norm_`: torch's function, in two launches, or in one of which the
factor is left to the step (`deferred.py`).

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
from ..compiler.session import session
from ..isolate.compilations import Compilations
from ..isolate.decorators import copied
from ..isolate.isolated import TRACES
from ..shadow.whole import NotTraced
from .arguments import gradients_of
from .deferred import Owner, deferred_of, owners_of, report_once
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
    *,
    defer: str | None = None,
) -> torch.Tensor:
    """Do what `torch.nn.utils.clip_grad_norm_` does, with its bits: scale gradients in
    place so that their total norm is `max_norm` at most, and return what it was.

    The gradients are clipped when it returns, and nothing waits for the device, but
    where `error_if_nonfinite` asks for the norm. With `defer="unsafe"` they are left as
    they are, and the next `step()` of their optimizers, which fuseopt.compile was
    given, scales what it reads. Whoever reads `p.grad` sees gradients that are not
    clipped: before the step, and after it until they are replaced. Where the step
    cannot do it, gradients are clipped at once or before it, and a Report says why.

    Raises ValueError for another `defer`, and RuntimeError if gradients that wait for a
    step were written since.
    """
    if defer not in (None, "unsafe"):
        raise ValueError(f'defer is {defer!r}; it is None or "unsafe"')
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
    for waiting in [*session.deferring]:
        waiting.settle(grads)
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
        owners = _owners(held, grads, spread) if defer else []
        with _lock:
            clip = _clip_of(held, spread, bool(owners))
            if isinstance(clip, Clip):
                norm = clip.call(given)
                if norm is not None and owners:
                    clip.leave(owners, foreach)
        if isinstance(clip, SpreadClip):
            # not under the lock: the processes it waits for may be threads of this one
            norm = clip.call(grads, *floats, given.raises, foreach)
        if norm is not None:
            return norm
        why = MANY if clip is None else clip.why
    if why != "begin":
        report_once(f"Gradients are clipped by torch's function: {why}")
    return torch.nn.utils.clip_grad_norm_(every, *numbers)


class Clip:
    """What clips the gradients of some parameters. `why`: why it no longer does.

    `factor`: where to put what gradients are to be scaled by, if they are not clipped.
    """

    def __init__(self, factor: torch.Tensor | None = None) -> None:
        attach()
        self.why = ""
        self.factor = factor
        self.compilations = Compilations()
        traced = copied(_clipped if factor is None else _measured, ())
        made = self.compilations.compile(BACKEND, traced, fullgraph=True)
        self.compiled: Callable[[Any], torch.Tensor] = compat.Traced(made, traced)

    def call(self, given: _Given) -> torch.Tensor | None:
        """Clip; or None, with `why`, if nothing was done."""
        if self.why:
            return None
        given.factor = self.factor
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

    def leave(self, owners: Sequence[Owner], foreach: bool | None) -> None:
        """Leave the gradients that were measured to the steps of their optimizers."""
        assert self.factor is not None
        for isolated, params in owners:
            grads = gradients_of(params)
            deferred_of(isolated).leave(self.factor, grads, foreach)


@dataclass(eq=False)
class _Given:
    """What a call is given, as Dynamo sees it."""

    params: Tensors
    max_norm: float
    norm_type: float
    raises: bool
    foreach: bool | None
    factor: torch.Tensor | None = None


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


def _measured(self: _Given) -> torch.Tensor:
    """The total norm; what gradients are to be scaled by goes to `factor`."""
    if not torch.compiler.is_dynamo_compiling():
        raise NotTraced("Dynamo leaves it to eager")
    grads = [p.grad for p in self.params if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads, self.norm_type, False, self.foreach)
    factor = torch.clamp(self.max_norm / (norm + 1e-6), max=1.0)
    assert self.factor is not None
    self.factor.copy_(factor)
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


def _clip_of(
    held: Sequence[torch.Tensor], spread: bool, defers: bool
) -> Clip | SpreadClip | None:
    known: dict[Any, Clip | SpreadClip] = session.clips.setdefault(held[0], {})
    key = spread, defers, *map(id, held)
    if key not in known:
        if len(known) >= PATIENCE:
            return None
        factor = torch.empty_like(_norm_like(held)) if defers else None
        known[key] = SpreadClip() if spread else Clip(factor)
    return known[key]


def _norm_like(held: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor like the total norm of gradients; of as many as it takes to tell."""
    one_of = {p.grad.dtype: p.grad for p in held if p.grad is not None}
    few = [g.detach().new_empty(1) for g in one_of.values()]
    return torch.nn.utils.get_total_norm(few)


def _owners(
    held: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], spread: bool
) -> list[Owner]:
    """Those to whose steps a clip is left; [] with a Report if it cannot be."""
    owners, why = owners_of(held)
    if spread:
        why = "gradients are DTensors"
    elif torch.is_inference_mode_enabled() or any(
        map(torch.Tensor.is_inference, grads)
    ):
        why = "gradients of inference mode do not say whether they were written"
    if why:
        report_once(f"A clip is not left to the step: {why}")
        return []
    return owners

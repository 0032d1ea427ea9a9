"""`fuseopt.clip_grad_norm_`: torch's function, in two launches.

With `defer` it is one launch, which leaves the scaling to the step (`deferred.py`).
`spread_clip.py` clips the local parts of DTensors. Calls that cannot be compiled go to
torch's function, and a Report gives the reason.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import compat
from ..compiler.session import session
from ..errors import UnsupportedInput
from ..isolate.quick import TRACES
from ..locks import new_rlock
from ..shadow.whole import NotTraced
from .compiling import OneGraph
from .deferred import leave, report_once, settle, settle_by, why_not_left
from .norm_groups import NormGroup, clip_groups
from .spread_clip import SpreadClip, check_memory

Tensors = list[torch.Tensor]
#: Most compiled sets of parameters that have the same first parameter.
PATIENCE = 8
MANY = "too many sets of parameters begin with the same one"
_lock = new_rlock()


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    defer: str | None = None,
    norm_groups: Iterable[NormGroup] | None = None,
) -> torch.Tensor:
    """Do the work of `torch.nn.utils.clip_grad_norm_`, with its bits: scale gradients
    in place so that their total norm is `max_norm` at most.

    Returns the total norm before the clip, a tensor without dimensions. Only
    `error_if_nonfinite` waits for the device.

    With `defer="unsafe"`, gradients are left as they are. The next step of their
    optimizers, which were given to fuseopt.compile, scales the gradients that it reads.
    Until they are replaced, all readers of `p.grad` get gradients that are not clipped.
    If a step cannot scale its gradients, they are clipped at once, or in memory before
    it, and a Report gives the reason.

    `norm_groups` declares which processes have other parts of the gradients; see
    `NormGroup`.

    Raises the errors of torch's function, ValueError for another `defer`, and
    RuntimeError if gradients were written since their clip was deferred. All come
    before any write.
    """
    if defer not in (None, "unsafe"):
        raise ValueError(f'defer is {defer!r}; it is None or "unsafe"')
    if isinstance(parameters, torch.Tensor):
        params: Any = [parameters]
    else:
        params = [*parameters]
        if not params and isinstance(parameters, types.GeneratorType):
            params = parameters  # torch warns of an empty generator
    if norm_groups is not None:
        if defer:
            raise ValueError("defer and norm_groups exclude each other")
        if torch.compiler.is_dynamo_compiling():
            what = "norm_groups measure by themselves: clip outside of torch.compile"
            raise UnsupportedInput(what)
        settle([p.grad for p in params if p.grad is not None], "the next clip")
        raises = bool(error_if_nonfinite)
        return clip_groups([*params], max_norm, norm_type, raises, norm_groups)
    torch_args = max_norm, norm_type, error_if_nonfinite, foreach
    if torch.compiler.is_dynamo_compiling():
        return torch.nn.utils.clip_grad_norm_(params, *torch_args)
    params_with_grad = [p for p in params if p.grad is not None]
    grads: list[Any] = [p.grad for p in params_with_grad]
    settle(grads, "the next clip")
    are_dtensors = bool(grads) and compat.are_spread(grads[:1])
    refusal = _why_not(grads, are_dtensors)
    if not refusal and not are_dtensors:
        order = compat.dtypes_in_order(grads)
        if order is None:
            refusal = "the order in which torch adds up dtypes is unknown"
        elif order:
            params_with_grad.sort(key=lambda p: order.index(p.grad.dtype))
    if not refusal:
        floats = float(max_norm), float(norm_type)
        given = [p.grad for p in params_with_grad if p.grad is not None]
        arguments = _ClipArguments(given, *floats, bool(error_if_nonfinite), foreach)
        norm = None
        defers = bool(defer) and _may_defer(params_with_grad, grads, are_dtensors)
        with _lock:
            clip = _clip_of(params_with_grad, are_dtensors, defers)
            if isinstance(clip, Clip):
                norm = clip.call(arguments)
                if norm is not None and clip.factor is not None:
                    leave(clip.factor, grads, foreach)
        if isinstance(clip, SpreadClip):
            # without the lock: other processes may be threads of this one, and wait too
            norm = clip.call(grads, *floats, arguments.raises, foreach)
        if norm is not None:
            return norm
        refusal = MANY if clip is None else clip.refusal
    if refusal != "begin":
        report_once(f"torch's function clips the gradients: {refusal}")
    return torch.nn.utils.clip_grad_norm_(params, *torch_args)


class Clip(OneGraph[torch.Tensor]):
    """Clip of the gradients of some parameters. If there is a `factor`, the factor of
    the clip is written to it and the gradients are left as they are.
    """

    def __init__(self, factor: torch.Tensor | None = None) -> None:
        self.factor = factor
        super().__init__(_clipped if factor is None else _measured)

    def call(self, arguments: _ClipArguments) -> torch.Tensor | None:
        """Clip and return the total norm; None, with `refusal`, if it wrote nothing."""
        if self.refusal:
            return None
        arguments.factor = self.factor
        if self.factor is not None:
            settle_by(self.factor)
        with torch.no_grad():
            done = self(arguments, functools.partial(check_memory, arguments.grads))
        if done is None:
            return None
        (norm,) = done
        if arguments.raises and not bool(torch.isfinite(norm)):
            options = arguments.norm_type, True, arguments.foreach
            return torch.nn.utils.get_total_norm(arguments.grads, *options)
        return norm


@dataclass(eq=False)
class _ClipArguments:
    """Arguments of a call, in the form that Dynamo traces. `raises` is
    `error_if_nonfinite`.

    The parameters are hidden from Dynamo: it would keep weak references to them.
    """

    grads: Tensors
    max_norm: float
    norm_type: float
    raises: bool
    foreach: bool | None
    factor: torch.Tensor | None = None


class _Holder:
    """Holder of a gradient, as a parameter is."""

    def __init__(self, grad: torch.Tensor) -> None:
        self.grad = grad


def _clipped(self: _ClipArguments) -> torch.Tensor:
    """Do the work of torch's function. With `raises`, leave gradients as they are where
    the norm is not finite.
    """
    if not torch.compiler.is_dynamo_compiling():
        raise NotTraced("Dynamo leaves it to eager")
    norm_type, foreach, grads = self.norm_type, self.foreach, self.grads
    if not self.raises:
        holders: Any = [_Holder(g) for g in grads]
        return torch.nn.utils.clip_grad_norm_(
            holders, self.max_norm, norm_type, False, foreach
        )
    norm = torch.nn.utils.get_total_norm(grads, norm_type, False, foreach)
    factor = torch.clamp(self.max_norm / (norm + 1e-6), max=1.0)
    factor = torch.where(torch.isfinite(norm), factor, torch.ones_like(factor))
    if foreach is False:
        for g in grads:
            g.mul_(factor)
        return norm
    torch._foreach_mul_(grads, factor)
    return norm


def _measured(self: _ClipArguments) -> torch.Tensor:
    """Write the factor of the clip to `factor`, and return the total norm."""
    if not torch.compiler.is_dynamo_compiling():
        raise NotTraced("Dynamo leaves it to eager")
    options = self.norm_type, False, self.foreach
    norm = torch.nn.utils.get_total_norm(self.grads, *options)
    assert self.factor is not None
    self.factor.copy_(torch.clamp(self.max_norm / (norm + 1e-6), max=1.0))
    return norm


def _why_not(grads: Sequence[torch.Tensor], are_dtensors: bool) -> str:
    """Return the reason why torch's function is called: "" if it is not, "begin" if no
    Report is needed.

    `are_dtensors` is true if the first gradient is a DTensor.
    """
    if not grads or compat.stance() not in TRACES or not compat.without_modes():
        return "begin"
    kind = compat.dtensor_type() if are_dtensors else torch.Tensor
    if any(type(g) is not kind for g in grads):
        return "gradients are tensors of another class"
    if any(g.layout != torch.strided for g in grads):
        return "gradients are sparse"
    if len({g.device for g in grads}) > 1:
        return "gradients are on several devices"
    if any(g.requires_grad for g in grads):
        return "gradients are differentiated"
    if len({*map(id, grads)}) < len(grads):
        return "parameters share a gradient, which is scaled twice"
    return ""


class _Clips:
    """Compiled clips, each kept while the memory of its first parameter exists.

    A weak reference to a parameter would keep torch from swapping it. Dynamo's guards
    compare the gradients of each call. So other parameters with the same ids do no
    harm.
    """

    def __init__(self, first: torch.Tensor) -> None:
        self.life = compat.WeakMemory(first)
        self.of: dict[Any, Clip | SpreadClip] = {}


def _clip_of(
    params: Sequence[torch.Tensor], are_dtensors: bool, defers: bool
) -> Clip | SpreadClip | None:
    every = session.clips
    clips: _Clips | None = every.get(id(params[0]))
    if clips is None or not clips.life.lasts():
        for i in [i for i, x in every.items() if not x.life.lasts()]:
            del every[i]
        clips = every[id(params[0])] = _Clips(params[0])
    key = are_dtensors, defers, *map(id, params)
    if key not in clips.of:
        if len(clips.of) >= PATIENCE:
            return None
        factor = _norm_like(params) if defers else None
        clips.of[key] = SpreadClip() if are_dtensors else Clip(factor)
    return clips.of[key]


def _norm_like(params: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a new tensor with dtype and device of the gradients' total norm."""
    grad_of_dtype = {p.grad.dtype: p.grad for p in params if p.grad is not None}
    with torch.inference_mode(False):  # it outlives the mode
        samples = [g.detach().new_ones(1) for g in grad_of_dtype.values()]
        return torch.nn.utils.get_total_norm(samples)


def _may_defer(
    params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], are_dtensors: bool
) -> bool:
    """May a clip be left to steps? If not, add a Report with the reason."""
    refusal = why_not_left(params)
    if are_dtensors:
        refusal = "gradients are DTensors"
    elif any(map(torch.Tensor.is_inference, grads)):
        refusal = "gradients of inference mode have no version counters"
    if refusal:
        report_once(f"fuseopt does not defer the clip: {refusal}")
    return not refusal

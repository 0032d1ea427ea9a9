"""Leave a clip by the total norm to compiled steps: `defer="unsafe"`.

`fuseopt.clip_grad_norm_` computes the norm in one launch. The kernel of the step reads
the gradients and scales them. Until that step, and after it, their memory holds the
result of backward. All other readers see gradients that are not clipped, so the user
must choose this option. A gradient that was written between clip and step raises an
error. A gradient that was replaced is not clipped, as in eager. Where the step cannot
scale gradients, they are scaled in memory before it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch.optim import Optimizer

from .. import compat
from ..compiler.report import Report
from ..compiler.session import session
from ..config import resolve
from ..errors import CaptureError
from ..isolate.compile import compiler_of
from ..isolate.isolated import OptimizerCompiler
from ..isolate.quick import TRACES
from ..locks import new_rlock
from .arguments import gradients_of, parameters_of
from .single_graph import SingleGraph
from .steps import has_state

Tensors = list[torch.Tensor]
WRITTEN = (
    'gradients were written between fuseopt.clip_grad_norm_(defer="unsafe") and {}, so '
    "that nobody knows what of them is still to be clipped; leave `defer` out, or set "
    "gradients to None where a step is skipped"
)
_VERSION = attrgetter("_version")
_LIVING = weakref.ref.__call__


#: Record of a gradient at the clip: a weak reference, its version and its address. The
#: reference is weak so that replaced gradients, or those of a skipped step, free their
#: memory.
_Seen = tuple[weakref.ref[torch.Tensor], int, int]


def _seen(grads: Sequence[torch.Tensor]) -> dict[int, _Seen]:
    """Return records of the present gradients, by their identities."""
    addresses = map(torch.Tensor.data_ptr, grads)
    every = zip(map(weakref.ref, grads), map(_VERSION, grads), addresses, strict=True)
    return dict(zip(map(id, grads), every, strict=True))


class DeferredClip:
    """Clip that is left to steps. They must multiply the gradients `left` by `factor`,
    a tensor without dimensions, as torch does with this `foreach`. The kernel of a step
    has multiplied those of `stepped`, but not in memory.
    """

    def __init__(
        self, factor: torch.Tensor, grads: Sequence[torch.Tensor], foreach: bool | None
    ) -> None:
        self.factor = factor
        self.foreach = foreach
        self.left = _seen(grads)
        self.stepped: set[int] = set()

    def alive(self) -> Iterator[torch.Tensor]:
        """Yield the gradients that exist."""
        references = (gradient() for gradient, _, _ in self.left.values())
        return (g for g in references if g is not None)

    def is_all_of(self, grads: Tensors) -> bool:
        """Are `grads` all that is left, in its order, and unwritten? Compared in C."""
        if not grads or [*map(id, grads)] != [*self.left]:
            return False
        references, versions, addresses = zip(*self.left.values(), strict=True)
        return (
            all(map(is_, map(_LIVING, references), grads))
            and versions == tuple(map(_VERSION, grads))
            and addresses == tuple(map(torch.Tensor.data_ptr, grads))
        )

    def is_unwritten(self, grad: torch.Tensor) -> bool:
        """Is a gradient that is left unwritten, and in the same memory?"""
        _, version, address = self.left[id(grad)]
        return grad._version == version and grad.data_ptr() == address

    def of(self, grads: Tensors, until: str) -> Tensors:
        """Return the `grads` that are to be scaled, each once. `until` names the call,
        for errors. Raises RuntimeError if one of them was written.

        A write after a gradient's step begins anew: zeros, or the next backward.
        """
        if self.is_all_of(grads):
            return grads
        found: dict[int, torch.Tensor] = {}
        for g in grads:
            seen = self.left.get(id(g))
            if seen is None or seen[0]() is not g:
                continue
            if self.is_unwritten(g):
                found[id(g)] = g
            elif id(g) not in self.stepped:
                raise RuntimeError(WRITTEN.format(until))
        return [*found.values()]

    def scale(self, grads: Tensors) -> None:
        """Scale gradients in memory, as torch's function does."""
        with torch.no_grad():
            if self.foreach is False:
                for g in grads:
                    g.mul_(self.factor)
            else:
                torch._foreach_mul_(grads, self.factor)
        for g in grads:
            del self.left[id(g)]


class Deferred:
    """Clips of this process that are left to steps. `session.deferred` is this object
    while it has a clip, else None.
    """

    def __init__(self) -> None:
        self.clips: list[DeferredClip] = []
        self._lock = new_rlock()

    def add(self, clip: DeferredClip) -> None:
        """Leave a clip to the next steps of its gradients."""
        with self._lock:
            self.clips.append(clip)
            self._sweep()

    def settle(self, grads: Sequence[torch.Tensor], until: str) -> None:
        """Scale in memory the `grads` that are to be scaled. `until` names the call,
        for errors. Raises RuntimeError, before any write, if a gradient was written.
        """
        with self._lock:
            self._sweep()
            self._scale([(clip, clip.of([*grads], until)) for clip in self.clips])

    def settle_by(self, factor: torch.Tensor) -> None:
        """Scale in memory the gradients that wait for `factor`, which the next clip
        overwrites. Raises RuntimeError as `settle` does.
        """
        with self._lock:
            self._scale(
                [
                    (clip, clip.of([*clip.alive()], "the next clip"))
                    for clip in self.clips
                    if clip.factor is factor
                ]
            )
            self.clips = [clip for clip in self.clips if clip.factor is not factor]

    def step(self, isolated: OptimizerCompiler, alone: bool) -> bool:
        """Scale gradients and step. Return False if it scaled them at most, in memory.
        `alone` is true if the call of the step has no arguments.

        Raises RuntimeError, before any write, if a gradient was written after its clip.
        """
        optimizer = isolated.owner()
        assert optimizer is not None
        params = parameters_of([optimizer])
        grads = gradients_of(params)
        with self._lock:
            found = [(clip, clip.of(grads, "the step")) for clip in self.clips]
            found = [(clip, waiting) for clip, waiting in found if waiting]
        if not found:
            return False
        ((clip, waiting), *others) = found
        if alone and not others and len(waiting) == len(grads):
            step = isolated.clipped
            if not isinstance(step, ClippedStep):
                step = isolated.clipped = ClippedStep(isolated, optimizer)
            with isolated.lock:
                done = step(optimizer, clip.factor, params, grads)
            if done:
                with self._lock:
                    clip.stepped.update(map(id, grads))
                return True
        with self._lock:
            self._scale(found)
        return False

    def _scale(self, found: Sequence[tuple[DeferredClip, Tensors]]) -> None:
        """Scale gradients in memory, each by the factor of its clip."""
        if not any(waiting for _, waiting in found):
            return
        # all views of one tensor have one version, which changes here without another
        # writer
        unwritten = [
            (clip, [*filter(clip.is_unwritten, clip.alive())]) for clip in self.clips
        ]
        for clip, waiting in found:
            if waiting:
                clip.scale(waiting)
        for clip, grads in unwritten:
            clip.left.update(_seen([g for g in grads if id(g) in clip.left]))
        self._sweep()

    def _sweep(self) -> None:
        """Drop clips whose gradients no longer exist."""
        self.clips = [x for x in self.clips if next(x.alive(), None) is not None]
        session.deferred = self if self.clips else None


class ClippedStep:
    """Step of one optimizer, in a kernel that scales gradients."""

    def __init__(self, isolated: OptimizerCompiler, optimizer: Optimizer) -> None:
        options = isolated.options
        self._config = resolve(None, options)
        self.single_graph = SingleGraph(
            [optimizer], [isolated.function], self._config, options
        )
        # true if the optimizer has stepped before, so that its state exists
        self._begun = False
        self._content: dict[str, Any] = {}

    def __call__(
        self,
        optimizer: Optimizer,
        factor: torch.Tensor,
        params: Tensors,
        grads: Tensors,
    ) -> bool:
        """Step with gradients times `factor`. Return False if nothing was done."""
        one = self.single_graph
        if compat.stance() not in TRACES or not compat.without_modes():
            return False
        begun, self._begun = self._begun or has_state(optimizer), True
        if not begun or one.refusal or optimizer.defaults.get("differentiable"):
            return False
        if one.packed and one.begins():
            return False
        with torch.no_grad():
            if one.repeats and self._content["factor"] is factor:
                if one.again() is not None:
                    return True
            tail_inputs = self._content = content_of(factor)
            result = one.step(tail_inputs, True, params, grads)
        if isinstance(result, str):
            said = f"The step of {type(optimizer).__name__} cannot clip: {result}"
            if self._config.fallback == "error":
                raise CaptureError(
                    f"{said} (options={{'fallback': 'error'}} was given)"
                )
            report_once(f"{said}; fuseopt scales the gradients in memory first")
        return isinstance(result, tuple)


def settle(grads: Sequence[torch.Tensor], until: str) -> None:
    """Scale in memory the `grads` that are to be scaled; see `Deferred.settle`."""
    if session.deferred is not None:
        session.deferred.settle(grads, until)


def settle_of(optimizers: Sequence[Optimizer], until: str) -> None:
    """Scale in memory the gradients of optimizers that are to be scaled."""
    if session.deferred is not None:
        session.deferred.settle(gradients_of(parameters_of(optimizers)), until)


def settle_by(factor: torch.Tensor) -> None:
    """Scale in memory the gradients that wait for `factor`."""
    if session.deferred is not None:
        session.deferred.settle_by(factor)


def leave(factor: torch.Tensor, grads: Tensors, foreach: bool | None) -> None:
    """Leave the product of `grads` and `factor` to steps; see `DeferredClip`."""
    deferred = session.deferred or Deferred()
    deferred.add(DeferredClip(factor, grads, foreach))


def content_of(factor: torch.Tensor | None) -> dict[str, Any]:
    """Return the content of a tail that scales gradients and steps: `TailInputs`."""
    numbers = ("divisor", "scale", "max_norm", "max_value", "adaptive")
    lists = ("places", "averages", "decays", "models", "objects", "copies")
    flags = ("judged", "zeroed", "measured")
    return {
        **dict.fromkeys(numbers),
        **{name: [] for name in lists},
        **dict.fromkeys(flags, False),
        "founds": [None],
        "norm_type": 2.0,
        "factor": factor,
    }


def why_not_left(params: Sequence[torch.Tensor]) -> str:
    """Return the reason why a clip of `params` cannot be left to steps, or ""."""
    every = {*map(id, params)}
    places = {*every}
    # all at once, since other threads may compile meanwhile
    compiled = [reference() for reference in session.compiled.valuerefs()]
    for optimizer in filter(None, compiled):
        clipped = {id(p) for p in parameters_of([optimizer])} & every
        if not clipped:
            continue
        name = type(optimizer).__name__
        isolated = compiler_of(optimizer.step)
        owner: Any = isolated and isolated.owner()
        if owner is not optimizer:
            return f"{name}.step is not the one that fuseopt.compile made"
        if not compat.unhooked(optimizer):
            return f"hooks of {name} may read gradients"
        if optimizer in session.tails:
            return f"{name} has a tail, which clips too"
        if not places >= clipped:
            return "a parameter is in two optimizers"
        places -= clipped
    if places:
        return "a parameter is in no optimizer that fuseopt.compile was given"
    return ""


def report_once(text: str) -> None:
    """Add a Report of a fallback, unless one with the same text exists."""
    if all(report.fallback != text for report in session.reports):
        session.reports.append(Report(fallback=text))

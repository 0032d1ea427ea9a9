"""Run a tail in as few launches as possible: led by few lanes, or traced whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from .. import compat
from ..config import Config
from ..inputs.change import SAME
from ..inputs.keys import LanesDiffer
from ..inputs.structure_guard import StructureGuard
from ..isolate.compile import packs
from .fused import FusedTail
from .led import LedTail
from .led_packed import LedPacked
from .led_parts import ClipAlone, LedPartsTail
from .led_several import LedSeveral
from .masters import HasMasters
from .order import dtypes_in_order

#: Number of sets of gradients with a graph each; with more a tail runs in pieces.
SETS = 4
MANY_SETS = f"other gradients are None than in {SETS} calls before"


def unfit(tail_inputs: dict[str, Any], grads: Sequence[torch.Tensor]) -> str:
    """Return the reason why one graph cannot have these gradients, or "". In the second
    case add the order of their dtypes to `tail_inputs`.
    """
    try:
        tail_inputs["order"] = dtypes_in_order(grads, tail_inputs["places"])
    except LanesDiffer as error:
        return str(error)
    scale = tail_inputs["scale"]
    if scale is not None and scale.device != grads[0].device:
        return "the scaler's scale is on a different device"
    return ""


class SingleGraph:
    """Tail of some optimizers. `refusal` is the reason why it runs in pieces, or "".

    `functions` are those of their steps, without the layers around them. A tail of
    several optimizers is led only if one of them has packed state or masters. `held`
    has for each the optimizer that keeps its masters, or None.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        functions: Sequence[Callable[..., Any]],
        config: Config,
        options: Mapping[str, Any],
        held: Sequence[HasMasters | None] = (),
    ) -> None:
        self.optimizers = optimizers
        self.whole = FusedTail(optimizers, functions, config, options)
        self.led: LedTail | None = None
        self.parts: LedPartsTail | None = None
        #: why nothing but a led tail may step the optimizers, or ""
        self.packed = ""
        packing = [x for x in optimizers if packs(x) is not None]
        if packing:
            self.packed = f"the state of {type(packing[0]).__name__} is kept packed"
        #: what leads several optimizers, or masters
        self.several: LedSeveral | None = None
        #: true if nothing else can step the optimizers in few launches
        self.must_lead = bool(any(held) or self.packed)
        if any(held) or len(optimizers) > 1:
            of_each = [*held] or [None for _ in optimizers]
            rest = of_each, config, options
            self.several = LedSeveral(optimizers, functions, *rest)
        elif len(optimizers) == 1:
            common = optimizers[0], functions[0], config, options
            compiler = packs(optimizers[0])
            if compiler is None:
                self.led = LedTail(*common)
                self.parts = LedPartsTail(*common)
            else:
                self.led = LedPacked(*common, compiler)
        #: classes, state and groups of each in the last call
        self.structures = [StructureGuard() for _ in optimizers]
        #: true if `again` can repeat the last call
        self.repeats = False
        #: a byte for each parameter, 1 if it had a gradient: of calls in one graph
        self._sets: set[bytes] = set()

    @property
    def refusal(self) -> str:
        """Reason why the tail runs in pieces, or ""."""
        return self.whole.refusal

    def step(
        self,
        tail_inputs: dict[str, Any],
        drops: bool,
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...] | ClipAlone | str:
        """Do one tail. Return the result of `sequence.whole`; or the reason why nothing
        was written; or a `ClipAlone` if only the clip was done.

        `tail_inputs` has the attributes of a `TailInputs` without the optimizers and
        the order of dtypes. With `drops`, nothing reads gradients after the call.
        `params` and `grads` are those of all optimizers; there is at least one
        gradient.
        """
        self._follow_changes()
        self.repeats = False
        if len({*map(id, grads)}) < len(grads):
            return "parameters share a gradient, which is scaled twice"
        parts = self.parts
        if parts is not None and compat.are_spread(params[:1]):
            refusal = parts.why_not(tail_inputs)
            if refusal:
                return refusal
            of_parts = parts.step(tail_inputs, drops, params, grads)
            self.repeats = parts.last is not None
            return of_parts
        several = self.several
        must = several is not None and self.must_lead
        if not must:
            there = bytes(p.grad is not None for p in params)
            may_be_eager = self.whole.config.fallback != "error"
            if may_be_eager and len(self._sets) >= SETS and there not in self._sets:
                # a layout of a graph for a set takes longer than some tails in pieces
                return MANY_SETS
            self._sets.add(there)
        if several is not None and (must or several.pays):
            of_several = several.step(tail_inputs, drops, params)
            if not isinstance(of_several, str):
                return of_several
            if must:
                return f"{self.packed}; {of_several}" if self.packed else of_several
            self.whole.since = of_several
        led = self.led
        if led is not None and led.wants(tail_inputs):
            result = led.step(tail_inputs, drops, params, grads)
            if result is not None:
                self.repeats = True
                return result
            self.whole.since = led.refusal
        if self.packed:
            since = "" if led is None else led.refusal
            return f"{self.packed}; {since}" if since else self.packed
        refusal = unfit(tail_inputs, grads)
        if refusal:
            return refusal
        result = self.whole.step(tail_inputs, drops)
        return self.refusal if result is None else result

    def begins(self) -> bool:
        """Must packed state be made in eager first?"""
        if self.several is not None:
            return self.several.begins()
        return isinstance(self.led, LedPacked) and self.led.begins()

    def again(self) -> tuple[torch.Tensor, ...] | ClipAlone | None:
        """Repeat the last call, which had the same options, with the present gradients.
        Return None if something else may have changed; then nothing was written. See
        `step` for a `ClipAlone`.
        """
        self._follow_changes()
        if self.parts is not None and self.parts.last is not None:
            return self.parts.again()
        if self.led is None or self.led.last is None:
            return None
        return self.led.again()

    def _follow_changes(self) -> None:
        """Release what was compiled if an optimizer's methods, or the objects of its
        state and groups, changed since the last call.
        """
        structures, optimizers = self.structures, self.optimizers
        helper = None if self.led is None else self.led.helper
        for structure, optimizer in zip(structures, optimizers, strict=True):
            if structure.compare(optimizer, helper) is not SAME:
                break
        else:
            return
        if any(structure.known for structure in structures):
            self._release()
        for structure, optimizer in zip(structures, optimizers, strict=True):
            structure.take(optimizer)

    def _release(self) -> None:
        self._sets.clear()
        self.whole.release()
        if self.led is not None:
            self.led.release()
            self.led.refusal = ""
        if self.several is not None:
            self.several.release()
        if self.parts is not None:
            self.parts.release()
            self.parts.refusal = ""

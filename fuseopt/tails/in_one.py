"""A tail in as few launches as there can be: led by a few lanes, or traced whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch.optim import Optimizer

from .. import compat
from ..config import Config
from ..isolate.class_guard import Methods
from ..shadow.lanes import Unlike
from .fused import Fused
from .led import Led
from .led_parts import Clipped, LedParts
from .order import dtypes_in_order


def unfit(content: dict[str, Any], grads: Sequence[torch.Tensor]) -> str:
    """Why one graph cannot have some gradients; "" if it can, and `content` then has
    the order of their dtypes.
    """
    try:
        content["order"] = dtypes_in_order(grads, content["places"])
    except Unlike as error:
        return str(error)
    scale = content["scale"]
    if scale is not None and scale.device != grads[0].device:
        return "the scaler's scale lies on another device"
    return ""


class InOne:
    """The tail of some optimizers. `why`: why it is done in pieces, "" while it is not.

    `functions`: those of their steps, without what is around them. Of several
    optimizers all lanes are traced: what one of them is to know is of all gradients.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        functions: Sequence[Callable[..., Any]],
        config: Config,
        options: Mapping[str, Any],
    ) -> None:
        self.optimizers = optimizers
        self.whole = Fused(optimizers, functions, config, options)
        self.led: Led | None = None
        self.parts: LedParts | None = None
        if len(optimizers) == 1:
            self.led = Led(optimizers[0], functions[0], config, options)
            self.parts = LedParts(optimizers[0], functions[0], config, options)
        self.methods = [Methods() for _ in optimizers]
        #: states and groups in the last call, and how many groups there were
        self._seen: list[Any] = []
        self._sizes: list[int] = []
        #: can the last call be done again?
        self.repeats = False

    @property
    def why(self) -> str:
        """Why it no longer is done in one."""
        return self.whole.why

    def step(
        self,
        content: dict[str, Any],
        drops: bool,
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...] | Clipped | str:
        """Do one tail. Returns what `sequence.whole` returns; or the reason why nothing
        was written; or a `Clipped` if only the clip was done.

        `content`: the attributes of a `TailInputs` without the optimizers and the order
        of dtypes. `drops`: nobody reads gradients after the call. `params`, `grads`: of
        all optimizers; there is at least one gradient.
        """
        self._follow_changes()
        self.repeats = False
        if len({*map(id, grads)}) < len(grads):
            return "parameters share a gradient, which is scaled twice"
        spread = self.parts
        if spread is not None and compat.are_spread(params[:1]):
            why = spread.why_not(content)
            return why or spread.step(content, drops, params, grads)
        led = self.led
        if led is not None and led.wants(content):
            result = led.step(content, drops, params, grads)
            if result is not None:
                self.repeats = True
                return result
            self.whole.since = led.why
        why = unfit(content, grads)
        if why:
            return why
        result = self.whole.step(content, drops)
        return self.why if result is None else result

    def again(self) -> tuple[torch.Tensor, ...] | None:
        """Do what the last call did, for what it was asked for, with the gradients that
        there are now; None if it is not known to be the same, and nothing was done.
        """
        self._follow_changes()
        if self.led is None or self.led.last is None:
            return None
        return self.led.again()

    def _follow_changes(self) -> None:
        """Let nothing that was compiled count where an optimizer got other state."""
        every = self.optimizers
        changed = [m.changed(o) for m, o in zip(self.methods, every, strict=True)]
        sizes = [len(o.param_groups) for o in every]
        seen = [x for o in every for x in (o.state, o.param_groups)]
        same = sizes == self._sizes and all(map(is_, seen, self._seen))
        if self._seen and (True in changed or not same):
            self.whole.release()
            if self.led is not None:
                self.led.release()
                self.led.why = ""
            if self.parts is not None:
                self.parts.release()
                self.parts.why = ""
        self._seen, self._sizes = seen, sizes

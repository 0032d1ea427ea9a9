"""The clip of DTensors' gradients: launches on parts, and torch's own collectives.

Processes tell one another what they tell with torch's function, in the same calls, so
that one process may run that while another runs this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from operator import is_
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from .. import compat
from ..capture.fx.inputs import check_freed
from ..compiler.dispatch import compile_graph
from ..shards.parts import parts_of

#: Ways in which the same gradients are spread, or clipped, that are kept.
KEPT = 4


def check_memory(grads: Sequence[torch.Tensor]) -> None:
    """Raise UnsupportedInput for gradients that torch's function would crash at."""
    for i, g in enumerate(grads):
        check_freed(f"gradient {i}", g)


class _Compiled(NamedTuple):
    """For gradients of these specs, clipped in one way. `spec`: of the norm."""

    specs: list[Any]
    way: tuple[float, bool | None]
    run: Callable[..., Any]
    spec: Any


class SpreadClip:
    """What clips the gradients of some parameters. `why`: why it does not."""

    def __init__(self) -> None:
        self.why = ""
        self.for_ever = False
        self.known: list[_Compiled] = []
        self.lock = threading.Lock()

    def call(
        self,
        grads: Sequence[Any],
        max_norm: float,
        norm_type: float,
        raises: bool,
        foreach: bool | None,
    ) -> torch.Tensor | None:
        """Clip; or None, with `why`, if nothing was done."""
        if self.for_ever:
            return None
        parts = [compat.arrived(compat.local_part(g)) for g in grads]
        if raises:
            self.why = "error_if_nonfinite asks all processes before the clip"
            return None
        if any(type(x) is not torch.Tensor for x in parts):
            self.why = "the parts of gradients are tensors of another class"
            return None
        try:
            with self.lock:
                compiled = self._compiled(grads, parts, max_norm, (norm_type, foreach))
        except Exception as error:
            check_memory(parts)
            # if the user did something wrong, torch's function says so
            self.why = str(error).strip().partition("\n")[0] or type(error).__name__
            self.for_ever = True
            return None
        (part,) = compiled.run(*parts, max_norm)
        compat.bump_versions(grads)
        norm: torch.Tensor = compat.spread(part, compiled.spec)
        return norm

    def _compiled(
        self,
        grads: Sequence[Any],
        parts: Sequence[torch.Tensor],
        max_norm: float,
        way: tuple[float, bool | None],
    ) -> _Compiled:
        specs = [*map(compat.spec_of, grads)]
        for known in self.known:
            if known.way == way and (
                all(map(is_, known.specs, specs))
                or all(map(compat.alike, known.specs, specs))
            ):
                return known
        norm_type, foreach = way

        def clip(stand_ins: list[Any], numbers: list[float]) -> torch.Tensor:
            holders: list[Any] = [SimpleNamespace(grad=g) for g in stand_ins]
            return torch.nn.utils.clip_grad_norm_(
                holders, numbers[0], norm_type, False, foreach
            )

        done = parts_of(clip, grads, 1)
        run = compile_graph(done.gm, [*parts, max_norm])
        made = _Compiled(specs, way, run, done.spec)
        self.known = [*self.known[1 - KEPT :], made]
        return made

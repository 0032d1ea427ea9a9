"""Clip DTensors' gradients: launches on local parts, and torch's collectives.

The collectives are those of torch's function, in the same order, so that one process
may run torch's function while another runs this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from .. import compat
from ..capture.fx.inputs import check_freed
from ..compiler.dispatch import compile_graph
from ..locks import new_lock
from ..shards.parts import parts_of

#: Most compiled clips of the same gradients, for different specs or arguments.
MAX_COMPILED = 4


def check_memory(grads: Sequence[torch.Tensor]) -> None:
    """Raise UnsupportedInput for gradients that would crash torch's function."""
    for i, g in enumerate(grads):
        check_freed(f"gradient {i}", g)


class _Compiled(NamedTuple):
    """Compiled clip for gradients with `specs`. `way` is (`norm_type`, `foreach`).
    `run` takes the local parts and `max_norm`. `spec` is that of the norm.
    """

    specs: list[Any]
    way: tuple[float, bool | None]
    run: Callable[..., Any]
    spec: Any


class SpreadClip:
    """Clip of the gradients of some parameters. `refusal` is the reason why it failed,
    or "". `for_ever` is true if all later calls fail too.
    """

    def __init__(self) -> None:
        self.refusal = ""
        self.for_ever = False
        self.clips: list[_Compiled] = []
        self.lock = new_lock()

    def call(
        self,
        grads: Sequence[Any],
        max_norm: float,
        norm_type: float,
        raises: bool,
        foreach: bool | None,
    ) -> torch.Tensor | None:
        """Clip and return the total norm; None, with `refusal`, if it wrote nothing."""
        if self.for_ever:
            return None
        parts = [compat.arrived(compat.local_part(g)) for g in grads]
        if raises:
            self.refusal = "error_if_nonfinite waits for all processes before the clip"
            return None
        if any(type(x) is not torch.Tensor for x in parts):
            self.refusal = "the parts of gradients are tensors of another class"
            return None
        try:
            with self.lock:
                compiled = self._compiled(grads, parts, max_norm, (norm_type, foreach))
        except Exception as error:
            check_memory(parts)
            # if it is an error of the user, torch's function raises it again
            self.refusal = compat.reason_of(error)
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
        for compiled in self.clips:
            if compiled.way == way and (
                all(map(is_, compiled.specs, specs))
                or all(map(compat.alike, compiled.specs, specs))
            ):
                return compiled
        norm_type, foreach = way

        def clip(stand_ins: list[Any], numbers: list[float]) -> torch.Tensor:
            holders: list[Any] = [SimpleNamespace(grad=g) for g in stand_ins]
            return torch.nn.utils.clip_grad_norm_(
                holders, numbers[0], norm_type, False, foreach
            )

        traced = parts_of(clip, grads, 1)
        run = compile_graph(traced.gm, [*parts, max_norm])
        new_compiled = _Compiled(specs, way, run, traced.spec)
        self.clips = [*self.clips[1 - MAX_COMPILED :], new_compiled]
        return new_compiled

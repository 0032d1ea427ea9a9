"""Calls around a step of local parts: the clip, with the norm of all processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..capture import Captured
from ..capture.fx.interpreter import OWN
from .led import TailPlan
from .part_norm import PartNorm

Tensors = list[torch.Tensor]


class PartsWrapper:
    """Calls around a step of local parts; see `StepWrapper`.

    It is a `TailPlan` that computes the clip's factor in the launch of the step. The
    shared arguments are the values of `PartNorm`, a tensor for the total norm, the
    limit, and then those of `TailPlan`.
    """

    def __init__(self, inner: TailPlan, norm: PartNorm) -> None:
        self.inner = inner
        self.measures = inner.measures
        self.dtypes = inner.dtypes
        self.n = len(norm.values)
        finish, n, n_divisors = norm.finish, self.n, int(inner.divides)

        def shared_of_inner(shared: Sequence[Any], factor: Any) -> list[Any]:
            others = [*shared[n + 2 :]]
            return [*others[:n_divisors], factor, *others[n_divisors:]]

        def before(
            params: Tensors,
            grads: Sequence[torch.Tensor | None],
            columns: Sequence[Tensors],
            shared: Sequence[Any],
        ) -> None:
            norm, factor = finish(shared[:n], shared[n + 1])
            shared[n].copy_(norm)
            inner.before(params, grads, columns, shared_of_inner(shared, factor))

        def after(
            params: Tensors,
            grads: Sequence[torch.Tensor | None],
            columns: Sequence[Tensors],
            shared: Sequence[Any],
        ) -> None:
            inner.after(params, grads, columns, shared_of_inner(shared, None))

        for function in (before, after):
            setattr(function, OWN, True)
        self.before, self.after = before, after

    def finish(
        self, captured: Captured, kinds: Sequence[str | None], flag: int | None
    ) -> Captured:
        """See `StepWrapper`."""
        return self.inner.finish(captured, kinds, flag)

"""The step of an optimizer whose state is packed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.optim import Optimizer

from ..compiler.report import Report
from ..replicate.driver import Representatives
from .kept import Kept
from .packing import StatePacking
from .rule import Rule


class Stored:
    """The step of one optimizer, with a rule for what of its state is packed.

    The first step of a parameter makes its state, in eager, and packs it then.
    """

    def __init__(
        self,
        function: Any,
        options: Mapping[str, Any],
        told: list[Report],
        rule: Rule,
    ) -> None:
        self.kept = Kept(rule)
        packing = StatePacking()
        self.few = Representatives(function, options, told, packing=packing)
        self.few.want()

    def release(self) -> None:
        """Release everything that was compiled for the optimizer."""
        self.few.release()

    def step(
        self, optimizer: Optimizer, make: Callable[..., Callable[..., Any]]
    ) -> tuple[bool, str]:
        """Do one step. Returns whether it was done, and the reason if not: "" in a
        parameter's first step, and where Dynamo is told to compile nothing.

        `make(backend)` compiles the step's function.
        """
        self.kept.pack_new(optimizer)
        if not self.few.wants(optimizer):
            return False, self.few.why
        if _begins(optimizer):
            return False, ""
        with self.kept.hollow():
            done = self.few.step(optimizer, make)
        return done, "" if done else self.few.why

    @contextlib.contextmanager
    def in_eager(self, optimizer: Optimizer, every: bool) -> Iterator[None]:
        """Within, the optimizer's own step may run: its state is unpacked. `every`:
        that of parameters without a gradient too.
        """
        self.kept.pack_new(optimizer)
        with self.kept.unpacked(every):
            yield
        self.kept.pack_new(optimizer)


def _begins(optimizer: Optimizer) -> bool:
    """Has a parameter a gradient, and no state yet?"""
    state = optimizer.state
    return any(
        p.grad is not None and p not in state
        for group in optimizer.param_groups
        for p in group["params"]
    )

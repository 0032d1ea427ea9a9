"""The step of an optimizer whose state is packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from ..compiler.report import Report
from ..replicate.driver import Representatives
from .checkpoints import Checkpoints
from .kept import Kept
from .packing import StatePacking
from .rule import Rule


class Stored:
    """The step of one optimizer, whose state is packed by a rule.

    The first step of a parameter makes its state, in eager, and packs it then.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        function: Any,
        options: Mapping[str, Any],
        told: list[Report],
        rule: Rule,
    ) -> None:
        self.function, self.told = function, told
        self.rule = rule
        self.kept = Kept(rule)
        self._checkpoints = Checkpoints(optimizer)
        self.start_anew(options)

    def start_anew(self, options: Mapping[str, Any]) -> None:
        """Compile with these options from now on."""
        packing = StatePacking()
        told = self.told
        self.few = Representatives(self.function, options, told, packing=packing)
        self.few.want()

    def end(self, optimizer: Optimizer) -> None:
        """Unpack the state for good."""
        self.kept.restore(optimizer)
        self._checkpoints.end()

    def release(self) -> None:
        """Release everything that was compiled for the optimizer."""
        self.few.release()

    def step(
        self, optimizer: Optimizer, make: Callable[..., Callable[..., Any]]
    ) -> str | None:
        """Do one step. Returns None, or the reason why nothing was done: "" in a
        parameter's first step, and where Dynamo is told to compile nothing.

        `make(backend)` compiles the step's function.
        """
        self.kept.pack_new(optimizer)
        if not self.few.wants(optimizer):
            return self.few.why
        if _begins(optimizer):
            return ""
        with self.kept.hollow():
            done = self.few.step(optimizer, make)
        return None if done else self.few.why

    def in_eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the step's function with its state unpacked. The first argument is the
        optimizer; with others, parameters may get a gradient within.
        """
        optimizer = args[0]
        self.kept.pack_new(optimizer)
        with self.kept.unpacked(every=len(args) > 1 or bool(kwargs)):
            result = self.function(*args, **kwargs)
        self.kept.pack_new(optimizer)
        return result


def _begins(optimizer: Optimizer) -> bool:
    """Has a parameter a gradient, and no state yet?"""
    state = optimizer.state
    return any(
        p.grad is not None and p not in state
        for group in optimizer.param_groups
        for p in group["params"]
    )

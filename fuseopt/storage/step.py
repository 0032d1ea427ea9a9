"""Step an optimizer whose state is packed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch.optim import Optimizer

from ..compiler.report import Report
from ..replicate.driver import LedOptimizer
from .checkpoints import Checkpoints
from .packed_state import PackedState
from .packing import LanePacking
from .rule import Rule

Result = TypeVar("Result")


class OtherPacked(Protocol):
    """Other packed tensors of an optimizer's lanes while it steps.

    `is_wide`: true while they are unpacked around a step, which must run in eager.
    """

    is_wide: bool

    def hollow(self) -> contextlib.AbstractContextManager[None]:
        """Add the tensors to the state within the context; unpacked ones have no
        memory.
        """

    def unpacked(self) -> contextlib.AbstractContextManager[None]:
        """Unpack the tensors within the context."""


class NoOtherPacked:
    """Pack no other tensors."""

    is_wide = False

    def hollow(self) -> contextlib.AbstractContextManager[None]:
        """See OtherPacked."""
        return contextlib.nullcontext()

    unpacked = hollow


class PackedStep:
    """Step of one optimizer, whose state a rule packs.

    The first step of a parameter runs in eager. It makes the state, which is packed
    then.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        function: Any,
        options: Mapping[str, Any],
        reports: list[Report],
        rule: Rule,
        beside: OtherPacked | None = None,
    ) -> None:
        self.function, self.reports = function, reports
        self.rule = rule
        self.beside = NoOtherPacked() if beside is None else beside
        #: by id, the parameters that have stepped, so that their state exists
        self._begun: dict[int, torch.Tensor] = {}
        self.kept = PackedState(rule)
        self._checkpoints = Checkpoints(optimizer)
        self.start_anew(options)

    def start_anew(self, options: Mapping[str, Any]) -> None:
        """Compile with these options from now on."""
        packing = LanePacking()
        reports = self.reports
        self.leader = LedOptimizer(self.function, options, reports, packing=packing)
        self.leader.want()

    def end(self, optimizer: Optimizer) -> None:
        """Unpack the state for good."""
        self.kept.restore(optimizer)
        self._checkpoints.end()

    def release(self) -> None:
        """Release everything that was compiled for the optimizer."""
        self.leader.release()

    def step(
        self, optimizer: Optimizer, make: Callable[..., Callable[..., Any]]
    ) -> str | None:
        """Do one step. Return None, or the reason why nothing was done. The reason is
        "" in a parameter's first step, without any gradient, and where the user's
        stance forbids Dynamo to compile.

        `make(backend)` compiles the step's function.
        """
        self.kept.pack_new(optimizer)
        if not self.leader.wants(optimizer):
            return self.leader.refusal
        if self.begins(optimizer):
            return ""
        done = self.around(optimizer, lambda: self.leader.step(optimizer, make))
        return None if done else self.leader.refusal

    def in_eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the step's function with its state unpacked. The first argument is the
        optimizer. With more arguments, parameters may get a gradient within the call.
        """
        optimizer = args[0]
        self.kept.pack_new(optimizer)
        every = len(args) > 1 or bool(kwargs)
        with self.beside.unpacked(), self.kept.unpacked(every):
            result = self.function(*args, **kwargs)
            self._begun.update({id(p): p for p in _with_gradients(optimizer)})
        self.kept.pack_new(optimizer)
        return result

    def begins(self, optimizer: Optimizer) -> bool:
        """Must a step run in eager? True without any gradient, if a parameter with a
        gradient has not stepped and has no state, and within `beside.is_wide`.
        """
        if self.beside.is_wide:
            return True
        ready = _with_gradients(optimizer)
        if self._begun.keys() >= {*map(id, ready)}:
            return not ready
        new = (p for p in ready if id(p) not in self._begun)
        return any(p not in optimizer.state for p in new)

    def around(self, optimizer: Optimizer, call: Callable[[], Result]) -> Result:
        """Call it while the state has the unpacked tensors, without memory. Pack the
        state that it makes. `kept.pack_new` comes first.
        """
        n_states = len(optimizer.state)
        with self.beside.hollow(), self.kept.hollow():
            result = call()
        if len(optimizer.state) != n_states:
            self.kept.pack_new(optimizer)
        return result


def _with_gradients(optimizer: Optimizer) -> list[torch.Tensor]:
    return [
        p
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None
    ]

"""Step the masters of some parameters: the buckets of `fuseopt.in_backward`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from ..backward.bucket_proof import KindModels, ReadsSizes
from ..backward.partial_optimizer import attributes_of
from ..errors import UnsupportedInput
from ..inputs.keys import LanesDiffer
from ..isolate.compile import packs
from ..locks import new_rlock
from ..shadow.stand_in import stand_in
from ..storage.packing import packed_in
from ..tails.steps import function_of


class Stepped(Protocol):
    """Optimizer with masters, of which some are stepped.

    `optimizer` is the inner one.
    """

    optimizer: Optimizer

    def step_some(self, params: Sequence[torch.Tensor]) -> None:
        """Step the masters of these parameters, and no others."""

    def wide_groups(self) -> list[dict[str, Any]]:
        """Return the groups, with masters in place of parameters."""


class MasterSteps:
    """Steps of the masters of some parameters; see `backward.on_thread.Steps`.

    `join` makes the current stream wait for the weights that steps have copied. Raises
    UnsupportedInput for an optimizer whose parameters cannot be stepped in buckets.
    """

    def __init__(self, of: Stepped, join: Callable[[], None]) -> None:
        self._of, self._join = of, join
        self.kept = 0
        self.frees = True
        #: one thread at a time
        self.lock = new_rlock()
        self._function, refusal = function_of(of.optimizer)
        if refusal:
            raise self._refused(refusal)
        self._layout: Any = None
        self._proven: set[Any] = set()
        self.refresh()

    def refresh(self) -> None:
        """Prove the step for kinds of parameters that are new since the last call.
        Raises UnsupportedInput.
        """
        state = self._of.optimizer.state
        groups = self._of.wide_groups()
        layout = [
            [[*map(id, group["params"])] for group in groups],
            [*map(_options, groups)],
            [(id(x), len(x)) for x in state.values()],
        ]
        if layout == self._layout:
            return
        try:
            self._survey(self._plain(groups), True)
        except LanesDiffer as error:
            raise self._refused(str(error)) from error
        self._layout = layout

    def _plain(self, groups: list[dict[str, Any]]) -> Any:
        """Return an object like the inner optimizer, with unpacked state."""
        inner = self._of.optimizer
        isolated = packs(inner)
        assert isolated is not None
        assert isolated.packed_step is not None
        kept = isolated.packed_step.kept
        kept.pack_new(inner)
        plain = stand_in(inner)
        vars(plain).update(attributes_of(inner, {}))
        plain.param_groups = groups
        with kept.hollow():
            plain.state = {p: _unpacked(x) for p, x in inner.state.items()}
        return plain

    def _survey(self, plain: Any, ignore_sizes: bool) -> None:
        try:
            models = KindModels(plain, ignore_sizes)
            key = models.key, repr([_options(g) for g in plain.param_groups])
            if key not in self._proven:
                models.check(plain, self._function)
                self._proven.add(key)
        except ReadsSizes:
            if not ignore_sizes:
                raise
            self._survey(plain, False)

    def _refused(self, refusal: str) -> UnsupportedInput:
        return UnsupportedInput(
            f"{type(self._of.optimizer).__name__} cannot step its parameters bucket by "
            f"bucket: {refusal}"
        )

    def forget(self) -> None:
        """Read all parameters anew at the next backward."""
        self._layout = None

    def step(self, params: Sequence[torch.Tensor]) -> None:
        """Step the parameters that have a gradient, and free it if `frees`."""
        ready = [p for p in params if p.grad is not None]
        if not ready:
            return
        with self.lock:
            self._of.step_some(ready)
            for p in ready if self.frees else ():
                p.grad = None

    def wait(self) -> None:
        """Let the current stream wait for the weights."""
        self._join()


def _decides(option: Any) -> bool:
    """May an option decide which code runs? A rate may not, it moves in each step."""
    return not isinstance(option, (float, torch.Tensor))


def _options(group: dict[str, Any]) -> list[Any]:
    return [(k, v) for k, v in group.items() if k != "params" and _decides(v)]


def _unpacked(state: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a state that are not packed."""
    packed = {key for _, keys in packed_in(state).values() for key in keys.values()}
    return {key: value for key, value in state.items() if key not in packed}

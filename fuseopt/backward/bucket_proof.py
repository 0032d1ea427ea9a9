"""Prove that a step of some lanes treats each one as the step of all lanes does.

The proof of `uniformity` must hold: the code treats lanes alike. That leaves open which
kinds of lanes exist; a step may test whether any lane is a matrix. So the step is
rehearsed, on meta tensors, for sets of the optimizer's kinds. The other kinds are
absent in one rehearsal, and present without gradients in a second one. The step must
treat each lane as it treats the lane alone. And it may change only lanes, since each
bucket would increase a counter of the optimizer once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from typing import Any

import torch
from torch.optim import Optimizer

from .. import compat
from ..inputs.keys import LanesDiffer
from ..inputs.lanes import Lanes
from ..replicate.dry_run import Record, rehearse
from ..replicate.models import without_contents
from ..shadow.stand_in import stand_in, unfused
from ..uniformity import prove
from .partial_optimizer import attributes_of

#: Number of kinds up to which all sets are tried; for more kinds, those of `_sets`.
MAX_KINDS = 6
#: Models of each kind. Two of them show which tensors all lanes share.
TWINS = 2


class ReadsSizes(LanesDiffer):
    """The step reads sizes, so lanes of other sizes must be of other kinds."""


class KindModels:
    """Kinds of an optimizer's lanes, each with models: meta tensors with gradients.
    Raises LanesDiffer.

    With `ignore_sizes`, lanes of one kind may have different sizes. `key` is equal for
    equal kinds.
    """

    def __init__(self, optimizer: Optimizer, ignore_sizes: bool) -> None:
        self.ignore_sizes = ignore_sizes
        self.counters = compat.can_stay_symbolic()
        lanes = Lanes(optimizer, ignore_sizes, self.counters)
        #: true if lanes of one kind differ in their sizes
        self.reshaped = lanes.reshaped()
        n = len(optimizer.param_groups)
        self.lists: list[list[torch.Tensor]] = [[] for _ in range(n)]
        self.state: dict[torch.Tensor, dict[str, Any]] = {}
        #: the parameters of the models, by kind
        self.kinds: list[list[torch.Tensor]] = []
        keys: set[str] = set()
        for kind in lanes.kinds:
            # without the entry for the gradient
            key = repr((*kind.key[:2], *kind.key[3:]))
            if key in keys:
                continue
            keys.add(key)
            i = kind.lanes[0]
            self.kinds.append(
                [
                    self._model(lanes.params[i], lanes.states[i], lanes.groups[i])
                    for _ in range(TWINS)
                ]
            )
        self.key = ignore_sizes, frozenset(keys)

    def _model(
        self, lane: torch.Tensor, state: dict[str, Any] | None, group: int
    ) -> torch.Tensor:
        model = without_contents(lane)
        model.grad = without_contents(lane.detach())
        if state is not None:
            self.state[model] = {
                k: without_contents(v) if isinstance(v, torch.Tensor) else v
                for k, v in state.items()
            }
        self.lists[group].append(model)
        return model

    def check(self, optimizer: Optimizer, function: Callable[..., Any]) -> None:
        """Raise LanesDiffer unless `function` treats some of these lanes the same,
        whether other lanes are present or not. `function` is the step of an optimizer.
        Raises ReadsSizes if this holds only for lanes of equal sizes.
        """
        groups = optimizer.param_groups
        if len(groups) != len(self.lists):
            raise LanesDiffer("its groups change during a backward")
        shadow: Any = stand_in(optimizer)
        vars(shadow).update(attributes_of(optimizer, {}))
        shadow.state = self.state
        shadow.param_groups = [
            {**group, "params": params}
            for group, params in zip(groups, self.lists, strict=True)
        ]
        for group in shadow.param_groups:
            group.update(unfused(group))
        proof = prove(function, shadow, counters=self.counters)
        if proof.refusal and self.counters:
            proof = prove(function, shadow)
        if proof.refusal:
            raise LanesDiffer(proof.refusal)
        if proof.sizes and self.reshaped:
            raise ReadsSizes("it reads sizes, in which lanes differ")
        _DryRuns(self, shadow, function).run()


class _DryRuns:
    """Rehearsals of a step for sets of lanes, and their comparison."""

    def __init__(self, kind_models: KindModels, optimizer: Any, function: Any) -> None:
        self.kinds = kind_models.kinds
        self.optimizer = optimizer
        self.function = function
        self.lanes = Lanes(optimizer, kind_models.ignore_sizes, kind_models.counters)
        lane_of = {id(p): i for i, p in enumerate(self.lanes.params)}
        #: the lanes of each kind
        self.members = [
            [lane_of[id(p)] for p in params] for params in kind_models.kinds
        ]
        self.every = sorted(i for params in self.members for i in params)
        record = self._record(_does_nothing, self.every)
        self.rest, self.states = record.rest, record.states

    def _record(self, function: Any, members: Iterable[int]) -> Record:
        with torch.no_grad():
            record: Record = rehearse(self.optimizer, function, self.lanes, [*members])
        return record

    def run(self) -> None:
        """Raise LanesDiffer if the step does not treat a lane as it treats it alone."""
        alone: dict[int, Any] = {}
        n = len(self.kinds)
        for chosen in _sets(n):
            lanes = sorted(i for k in chosen for i in self.members[k])
            record = self._checked(lanes)
            for i in lanes:
                treatment = record.lanes.get(i, []), record.states[i]
                if len(chosen) == 1:
                    alone[i] = treatment
                self._same(treatment, alone[i])
            if len(chosen) < n:
                self._without_gradients(lanes, alone)

    def _without_gradients(self, lanes: list[int], alone: dict[int, Any]) -> None:
        """Compare again, with all other lanes present without gradients."""
        lanes_with_grad = set(lanes)
        others = [i for i in self.every if i not in lanes_with_grad]
        params = self.lanes.params
        grads = [params[i].grad for i in others]
        try:
            for i in others:
                params[i].grad = None
            record = self._checked(self.every)
        finally:
            for i, grad in zip(others, grads, strict=True):
                params[i].grad = grad
        for i in lanes:
            self._same((record.lanes.get(i, []), record.states[i]), alone[i])
        for i in others:
            self._same(
                (record.lanes.get(i, []), record.states[i]), ([], self.states[i])
            )

    def _checked(self, members: list[int]) -> Record:
        record = self._record(self.function, members)
        if record.shared or record.rest != self.rest:
            raise LanesDiffer(
                "it changes an object of the optimizer outside of the parameters' "
                "state, which would happen once for each bucket"
            )
        return record

    @staticmethod
    def _same(one: Any, other: Any) -> None:
        if one != other:
            raise LanesDiffer("its effect on a parameter depends on other parameters")


def _sets(n: int) -> Iterator[tuple[int, ...]]:
    """Yield sets of n kinds, single kinds first. These are all sets, or for many kinds
    the single kinds, the pairs, all but one, and all.
    """
    sizes: Iterable[int] = range(1, n + 1)
    if n > MAX_KINDS:
        sizes = (1, 2, n - 1, n)
    for size in sizes:
        yield from combinations(range(n), size)


def _does_nothing(optimizer: Any) -> None:
    """Do nothing, as a step."""

"""May a step be done to some lanes at a time, and do to each what it does to all at
once?

The code must be proven to treat lanes alike (`uniformity`). What that leaves open is
which kinds of lanes there are: a step may ask of all lanes whether any is a matrix. So
it is run dry, on lanes without contents, for sets of the kinds that the optimizer has,
with the others absent and with the others there without gradients; each lane must be
treated as it is alone. And nothing but lanes may be changed: what a step counts for
itself would be counted once for each bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from typing import Any

import torch
from torch.optim import Optimizer

from .. import compat
from ..replicate.dry_run import Record, rehearse
from ..replicate.models import without_contents
from ..shadow.lanes import Lanes, Unlike
from ..shadow.optimizer import stand_in, unfused
from ..uniformity import prove
from .part import attributes_of

#: Of so many kinds of lanes all sets are tried; of more, those of `_sets`.
EVERY = 6
#: Lanes of each kind: with two of them, what belongs to all is seen to be of both.
TWINS = 2


class ReadsSizes(Unlike):
    """A step reads sizes: lanes of other sizes are of other kinds."""


class Universe:
    """The kinds of lanes that an optimizer had when this was made, each with models,
    which are nobody's and have gradients. Raises Unlike.

    `loose`: are lanes of other sizes of one kind? `key`: what tells the kinds from
    those of another universe.
    """

    def __init__(self, optimizer: Optimizer, loose: bool) -> None:
        self.loose = loose
        self.counters = compat.can_stay_symbolic()
        lanes = Lanes(optimizer, loose, self.counters)
        #: are lanes of one kind that are of other sizes?
        self.reshaped = lanes.reshaped()
        n = len(optimizer.param_groups)
        self.lists: list[list[torch.Tensor]] = [[] for _ in range(n)]
        self.state: dict[torch.Tensor, dict[str, Any]] = {}
        #: the parameters of the models, by kind
        self.kinds: list[list[torch.Tensor]] = []
        known: set[str] = set()
        for kind in lanes.kinds:
            # less what is said of the gradient
            key = repr((*kind.key[:2], *kind.key[3:]))
            if key in known:
                continue
            known.add(key)
            i = kind.lanes[0]
            self.kinds.append(
                [
                    self._model(lanes.params[i], lanes.states[i], lanes.groups[i])
                    for _ in range(TWINS)
                ]
            )
        self.key = loose, frozenset(known)

    def _model(
        self, of: torch.Tensor, state: dict[str, Any] | None, group: int
    ) -> torch.Tensor:
        p = without_contents(of)
        p.grad = without_contents(of.detach())
        if state is not None:
            self.state[p] = {
                k: without_contents(v) if isinstance(v, torch.Tensor) else v
                for k, v in state.items()
            }
        self.lists[group].append(p)
        return p

    def check(self, optimizer: Optimizer, function: Callable[..., Any]) -> None:
        """Raise Unlike unless `function`, the step of an optimizer, does to some of
        these lanes what it does to them where others are there.
        """
        groups = optimizer.param_groups
        if len(groups) != len(self.lists):
            raise Unlike("its groups change while a backward runs")
        every: Any = stand_in(optimizer)
        vars(every).update(attributes_of(optimizer))
        every.state = self.state
        every.param_groups = [
            {**group, "params": own}
            for group, own in zip(groups, self.lists, strict=True)
        ]
        for group in every.param_groups:
            group.update(unfused(group))
        proof = prove(function, every, counters=self.counters)
        if proof.why and self.counters:
            proof = prove(function, every)
        if proof.why:
            raise Unlike(proof.why)
        if proof.sizes and self.reshaped:
            raise ReadsSizes("it reads sizes, in which lanes differ")
        _Trial(self, every, function).run()


class _Trial:
    """Dry runs of a step for sets of lanes, compared with each other."""

    def __init__(self, of: Universe, optimizer: Any, function: Any) -> None:
        self.kinds = of.kinds
        self.optimizer = optimizer
        self.function = function
        self.lanes = Lanes(optimizer, of.loose, of.counters)
        at = {id(p): i for i, p in enumerate(self.lanes.params)}
        #: the lanes of each kind
        self.members = [[at[id(p)] for p in own] for own in of.kinds]
        self.every = sorted(i for own in self.members for i in own)
        nothing = self._record(_does_nothing, self.every)
        self.rest, self.states = nothing.rest, nothing.states

    def _record(self, function: Any, members: Iterable[int]) -> Record:
        with torch.no_grad():
            made: Record = rehearse(self.optimizer, function, self.lanes, [*members])
        return made

    def run(self) -> None:
        """Raise Unlike where lanes are not treated as they are alone."""
        alone: dict[int, Any] = {}
        n = len(self.kinds)
        for chosen in _sets(n):
            some = sorted(i for k in chosen for i in self.members[k])
            made = self._checked(some)
            for i in some:
                does = made.lanes.get(i, []), made.states[i]
                if len(chosen) == 1:
                    alone[i] = does
                self._same(does, alone[i])
            if len(chosen) < n:
                self._without_gradients(some, alone)

    def _without_gradients(self, some: list[int], alone: dict[int, Any]) -> None:
        """The same, where all other lanes are there without gradients."""
        inside = set(some)
        others = [i for i in self.every if i not in inside]
        params = self.lanes.params
        kept = [params[i].grad for i in others]
        try:
            for i in others:
                params[i].grad = None
            made = self._checked(self.every)
        finally:
            for i, grad in zip(others, kept, strict=True):
                params[i].grad = grad
        for i in some:
            self._same((made.lanes.get(i, []), made.states[i]), alone[i])
        for i in others:
            self._same((made.lanes.get(i, []), made.states[i]), ([], self.states[i]))

    def _checked(self, members: list[int]) -> Record:
        made = self._record(self.function, members)
        if made.shared or made.rest != self.rest:
            raise Unlike(
                "it changes what the optimizer holds besides the state of each "
                "parameter, which would be changed once for each bucket"
            )
        return made

    @staticmethod
    def _same(one: Any, other: Any) -> None:
        if one != other:
            raise Unlike("what it does to a parameter depends on the others")


def _sets(n: int) -> Iterator[tuple[int, ...]]:
    """Sets of n kinds, each kind alone first: all there are, or of many kinds pairs,
    all but one, and all.
    """
    sizes: Iterable[int] = range(1, n + 1)
    if n > EVERY:
        sizes = (1, 2, n - 1, n)
    for size in sizes:
        yield from combinations(range(n), size)


def _does_nothing(optimizer: Any) -> None:
    """A step that does nothing."""

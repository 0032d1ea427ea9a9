"""Kinds of lanes -> for each a model, which is what Dynamo traces.

A model is a lane of nobody's: a parameter, a gradient and a state like those of the
lanes that it stands for. Its tensors have no memory but while they are captured. It
stays when its lanes are gone, so that the same trace serves whichever of the lanes
have gradients, or state, in a call.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .. import compat
from ..shadow.lanes import GRAD, PARAM, Kind, Lanes, Role, Unlike, lane_key

#: What integers in the state of models begin with: each has one of its own.
COUNTED = 101
#: The role of what stands beside a parameter and is not the optimizer's.
BESIDE = "beside"
#: So many models an optimizer may have, or so many for each of its kinds of lanes:
#: without state and with it, with a gradient and without.
MOST, MOST_OF_A_KIND = 48, 4


class Models:
    """The models of an optimizer's kinds of lanes, by number.

    `of`: by what lanes of a kind have in common. `params`, `groups`: of each model its
    parameter and the number of its group; `state`: as the optimizer's is. `beside`: by
    number, a tensor for each of the `columns`, which say its dtype by the parameter's;
    None: it is a number.
    """

    def __init__(
        self,
        groups: int,
        loose: bool,
        counters: bool,
        columns: Sequence[Mapping[torch.dtype, torch.dtype] | None] = (),
    ) -> None:
        self.loose = loose
        self.counters = counters
        self.of: dict[Any, int] = {}
        self.params: list[torch.Tensor] = []
        self.groups: list[int] = []
        self.n_groups = groups
        self._twins: dict[int, int] = {}
        self.state: dict[torch.Tensor, dict[str, Any]] = {}
        self.columns = columns
        self.beside: dict[int, list[torch.Tensor]] = {}
        #: by the number that a model counts: its own number, the key of its state
        self.counted: dict[int, tuple[int, str]] = {}
        self._next = COUNTED
        self._most = MOST
        #: have their tensors memory?
        self.filled = False

    def take(self, lanes: Lanes) -> None:
        """Have a model for each kind of some lanes."""
        self._most = max(self._most, MOST_OF_A_KIND * len(lanes.kinds))
        for kind in lanes.kinds:
            if kind.key not in self.of:
                if len(self.params) >= self._most:
                    raise Unlike("its lanes change too often")
                self.of[kind.key] = self._add(lanes, kind)
            kind.model = self.of[kind.key]

    def twin(self, number: int) -> int:
        """Another model like one, which stands for no lanes: with two of them what
        belongs to all is seen to be of both.
        """
        if number not in self._twins:
            self._twins[number] = self._copy(number)
        return self._twins[number]

    def without_gradients(self, numbers: Iterable[int]) -> set[int]:
        """Models like these, but for the gradient, which they lack."""
        found = set()
        for number in [*numbers]:
            p = self.params[number]
            if p.grad is not None and len(self.params) < self._most:
                given = self.groups[number], p, self.state.get(p)
                key = lane_key(*given, self.loose, self.counters, False)
                if key not in self.of:
                    self.of[key] = self._copy(number, grad=False)
                found.add(self.of[key])
        return found

    def _add(self, lanes: Lanes, kind: Kind) -> int:
        i = kind.lanes[0]
        return self._like(lanes.params[i], lanes.states[i], lanes.groups[i])

    def _copy(self, number: int, grad: bool = True) -> int:
        p = self.params[number]
        return self._like(p, self.state.get(p), self.groups[number], grad)

    def _like(
        self,
        of: torch.Tensor,
        state: Mapping[str, Any] | None,
        group: int,
        grad: bool = True,
    ) -> int:
        """Another model, like a parameter and its state; its number."""
        number, p = len(self.params), without_contents(of)
        if grad and of.grad is not None:
            p.grad = without_contents(of.grad)
        if state is not None:
            self.state[p] = {
                k: without_contents(v) if isinstance(v, torch.Tensor) else v
                for k, v in state.items()
            }
        self.params.append(p)
        self.groups.append(group)
        self.beside[number] = [
            torch.zeros((), device=of.device)
            if dtypes is None
            else without_contents(torch.empty_like(of, dtype=dtypes[of.dtype]).detach())
            for dtypes in self.columns
        ]
        self._count(number)
        return number

    def _count(self, number: int) -> None:
        """Give the integers in a model's state values of their own."""
        own = self.state.get(self.params[number], {})
        for key, value in own.items() if self.counters else ():
            if type(value) is int and (number, key) not in self.counted.values():
                own[key] = self._next
                self.counted[self._next] = number, key
                self._next += 2

    def adopt(self, state: Mapping[torch.Tensor, Mapping[str, Any]]) -> bool:
        """Take over the state that tracing made for models that had none."""
        keys = {number: key for key, number in self.of.items()}
        made = False
        for number, p in enumerate(self.params):
            if p in self.state or not (p in state and p.grad is not None):
                continue
            made = True
            self.state[p] = dict(state[p])
            self._count(number)
            if number in keys:
                del self.of[keys[number]]
                self.of.setdefault(self._key(number), number)
        return made

    def _key(self, number: int) -> Any:
        p = self.params[number]
        given = self.groups[number], p, self.state.get(p)
        return lane_key(*given, self.loose, self.counters)

    def follow(self, kind: Kind, numbers: Mapping[str, Any]) -> None:
        """Lanes of a kind have other numbers in their state, all the same."""
        own = self.state[self.params[kind.model]]
        if all(own[k] is v for k, v in numbers.items()):
            return
        own.update(numbers)
        if kind.model in self._twins:
            self.state[self.params[self._twins[kind.model]]].update(numbers)
        self.of = {k: n for k, n in self.of.items() if n != kind.model}
        self.of.setdefault(self._key(kind.model), kind.model)

    def members(self, lanes: Lanes) -> list[list[int]]:
        """The lanes that each model stands for."""
        found: list[list[int]] = [[] for _ in self.params]
        for kind in lanes.kinds:
            found[kind.model] = kind.lanes
        return found

    def active(self, present: Sequence[int]) -> tuple[int, ...]:
        """The models that show what a step does to those of some kinds."""
        if len(present) == 1:
            return present[0], self.twin(present[0])
        return tuple(present)

    def lists(self, active: Iterable[int]) -> list[list[torch.Tensor]]:
        """The parameters of some models, group by group."""
        found: list[list[torch.Tensor]] = [[] for _ in range(self.n_groups)]
        for number in active:
            found[self.groups[number]].append(self.params[number])
        return found

    def states(self, active: Iterable[int]) -> dict[torch.Tensor, dict[str, Any]]:
        """The state of some models."""
        own = [self.params[number] for number in active]
        return {p: self.state[p] for p in own if p in self.state}

    def lanes(
        self, optimizer: Any, active: Sequence[int]
    ) -> tuple[Lanes, dict[int, int]]:
        """Some models as the lanes of an optimizer; which of these each model is."""
        groups = [
            {**group, "params": own}
            for group, own in zip(
                optimizer.param_groups, self.lists(active), strict=True
            )
        ]
        view = types.SimpleNamespace(param_groups=groups, state=self.states(active))
        found = Lanes(view, self.loose, self.counters)
        at = {id(p): i for i, p in enumerate(found.params)}
        return found, {number: at[id(self.params[number])] for number in active}

    def renew(self, lanes: Lanes) -> None:
        """Give the numbers in the state of models the values that lanes have."""
        for kind in lanes.kinds:
            own = self.state.get(self.params[kind.model], {})
            theirs = lanes.states[kind.lanes[0]] or {}
            for key in kind.tensors:
                if not own[key].dim():
                    with torch.no_grad():
                        own[key].copy_(theirs[key])

    def roles(self) -> dict[int, tuple[int, Role]]:
        """By identity of their tensors: the number of the model, and what it is."""
        found: dict[int, tuple[int, Role]] = {}
        for number, p in enumerate(self.params):
            found[id(p)] = number, (PARAM, "")
            if p.grad is not None:
                found[id(p.grad)] = number, (GRAD, "")
            for key, value in self.state.get(p, {}).items():
                if isinstance(value, torch.Tensor):
                    found[id(value)] = number, ("state", key)
            for c, value in enumerate(self.beside[number]):
                found[id(value)] = number, (BESIDE, str(c))
        return found

    def fill(self) -> bool:
        """Be ready to be traced, or captured, until `empty`; were they not? Their
        tensors have memory then, of which nothing is known.
        """
        if self.filled:
            return False
        self.filled = True
        compat.take_for_symbols(frozenset(self.counted))
        for t in self._every():
            storage = t.untyped_storage()
            if not storage.nbytes():
                storage.resize_(_bytes(t))
                storage.fill_(0)  # type: ignore[attr-defined]
        return True

    def empty(self) -> None:
        """Have no memory."""
        self.filled = False
        compat.take_for_symbols(frozenset())
        for t in self._every():
            _empty(t)

    def _every(self) -> Iterator[torch.Tensor]:
        for p in self.params:
            yield p
            if p.grad is not None:
                yield p.grad
        for own in self.state.values():
            yield from (v for v in own.values() if isinstance(v, torch.Tensor))
        for beside in self.beside.values():
            yield from beside


def _bytes(t: torch.Tensor) -> int:
    if not t.numel():
        return 0
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.itemsize * (1 + last)


def _empty(t: torch.Tensor) -> None:
    """Take its memory away; numbers are kept."""
    if t.dim():
        t.untyped_storage().resize_(0)


def without_contents(t: torch.Tensor) -> torch.Tensor:
    """A tensor of the same kind, with nothing in it."""
    with torch.inference_mode(False), torch.no_grad():
        made = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
        if not t.dim():
            made.copy_(t)
    _empty(made)
    if not t.is_leaf:
        raise Unlike("a tensor of a lane is computed from others")
    if isinstance(t, torch.nn.Parameter):
        return torch.nn.Parameter(made, t.requires_grad)
    return made.requires_grad_(t.requires_grad)

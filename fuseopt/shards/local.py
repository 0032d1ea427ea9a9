"""An optimizer of DTensors -> one like it, of the parts that this process has.

The local optimizer has the optimizer's class and what it holds, but for parameters,
gradients and state: of a DTensor it has the part of it that lies here, a plain tensor.
A step that treats each element alike does to that part what the optimizer's own does to
the DTensor, and needs no other process. `refresh` makes it hold what the optimizer
holds; `outward` adds, to what is to be written to it, the same for the optimizer: new
state is spread over the processes as its parameter is, as `zeros_like` has it.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import weakref
from collections.abc import Mapping
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from .. import compat
from ..replicate.writes import Each
from ..runtime.guards.given import Given
from ..shadow.lanes import NUMBERS, Unlike
from ..shadow.optimizer import Write, stand_in, unfused
from .watch import Watch

_GRAD = attrgetter("grad")
_PARAMS = "params"
_CELLS = ("state", "param_groups")


class Part(NamedTuple):
    """A parameter, and what stands for it. `spec`: None for one that is no DTensor,
    which stands for itself.
    """

    whole: torch.Tensor
    local: torch.Tensor
    here: torch.Tensor
    spec: Any


def is_spread(optimizer: Optimizer) -> bool:
    """Is a parameter of an optimizer a DTensor?"""
    kind = compat.dtensor_type()
    return kind is not None and any(
        isinstance(p, kind) for group in optimizer.param_groups for p in group[_PARAMS]
    )


def placed(optimizer: Optimizer) -> str:
    """The ways in which parameters of an optimizer are spread, at most three."""
    kind = compat.dtensor_type()
    ways = {
        ", ".join(map(str, compat.spec_of(p).placements)): None
        for group in optimizer.param_groups
        for p in group[_PARAMS]
        if kind is not None and isinstance(p, kind)
    }
    return " or ".join([*ways][:3]) + (" or otherwise" if len(ways) > 3 else "")


def part_of(t: Any, spec: Any, name: str) -> torch.Tensor:
    """The part of a DTensor that is here, where it is spread as `spec` says.

    Raises Unlike for any other tensor.
    """
    if type(t) is not compat.dtensor_type():
        raise Unlike(f"{name} of a DTensor is a {type(t).__name__}")
    own = compat.spec_of(t)
    if not compat.alike(own, spec):
        raise Unlike(
            f"{name} of a parameter that is {_words(spec)} is {_words(own)}: another "
            "mesh, placement or size"
        )
    local = compat.arrived(compat.local_part(t))
    if type(local) is not torch.Tensor:
        raise Unlike(f"a part of {name} is a {type(local).__name__}")
    return local


def _words(spec: Any) -> str:
    return f"{tuple(spec.placements)} of {tuple(spec.tensor_meta.shape)}"


class LocalOptimizer:
    """See the module. `itself` is the optimizer of parts, `given` their gradients.

    Raises Unlike for an optimizer that no other object can stand for.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.itself = stand_in(optimizer)
        self._owner = weakref.ref(optimizer)
        self._parts: dict[int, Part] = {}  # by id of the parameter
        self._lists: list[list[torch.Tensor]] = []
        self._groups: list[dict[str, Any]] = []
        self._state: dict[Any, Any] = {}
        #: by id of a parameter's state: that, and its own
        self._states: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        #: by id of a container of its own: the optimizer's, the parameter it belongs to
        self._outside: dict[int, tuple[Any, Part | None]] = {}
        #: by id of a part in the state: its DTensor
        self._wholes: dict[int, torch.Tensor] = {}
        self._spread: list[Part] = []
        self._whole: list[torch.Tensor] = []
        self._grad_specs: list[Any] = []  # of gradients, for parameters as they are
        self._watch = Watch()
        self.given = Given()
        self._known = False  # but for what `_watch` sees
        self._wrote = False
        #: has no parameter a gradient?
        self.idle = False

    # ---------------------------------------------------------------- before a step

    def refresh(self, optimizer: Optimizer, helper: ctypes.PyDLL | None = None) -> None:
        """Hold what the optimizer holds; gradients are with `given`, who puts them.

        Raises Unlike for what is no DTensor and no plain data, or is spread otherwise
        than its parameter. `helper`: the library of the guards.
        """
        known = self._known and not self._wrote
        parts: list[Any] | None = self._watch.look(helper) if known else None
        if parts is not None:
            self.idle, self.given.grads = False, parts
            return
        if not (known and self._watch.same(helper)):
            self._known = False
            self._rebuild(optimizer)
            self._note(optimizer)
            self._known = True
        self._take_gradients()
        self._watch.begin(self._grad_specs)

    def _take_gradients(self) -> None:
        grads = [*map(_GRAD, self._whole)]
        rest = (p.grad is None for p, _, _, spec in self._parts.values() if not spec)
        self.idle = not any(g is not None for g in grads) and all(rest)
        if not self.idle:
            self.given.grads = [*self._parts_of(grads)]

    def _parts_of(self, grads: list[Any]) -> list[torch.Tensor | None]:
        """The parts of gradients, most of which have the specs of the last ones."""
        if {*map(type, grads)} == {compat.dtensor_type()} and all(
            map(is_, map(compat.spec_of, grads), self._grad_specs)
        ):
            parts = [*map(compat.local_part, grads)]
            if {*map(type, parts)} == {torch.Tensor}:
                return parts
        found = [
            None if g is None else part_of(g, part.spec, "the gradient")
            for g, part in zip(grads, self._spread, strict=True)
        ]
        # these are alike to those of the parameters, which is not to be asked again
        self._grad_specs = [
            part.spec if g is None else compat.spec_of(g)
            for g, part in zip(grads, self._spread, strict=True)
        ]
        return found

    def _rebuild(self, optimizer: Optimizer) -> None:
        groups, state = optimizer.param_groups, optimizer.state
        if type(groups) is not list or {*map(type, groups)} - {dict}:
            raise Unlike("its groups are no list of dicts")
        if type(state) not in (dict, collections.defaultdict):
            raise Unlike(f"its state is a {type(state).__name__}")
        known, self._parts = self._parts, {}
        for group in groups:
            if type(group[_PARAMS]) is not list:
                raise Unlike("the parameters of a group are no list")
            for p in group[_PARAMS]:
                if id(p) in self._parts:
                    raise Unlike("a parameter is in its groups twice")
                self._parts[id(p)] = self._part(p, known.get(id(p)))
        self._spread = [x for x in self._parts.values() if x.spec is not None]
        self._grad_specs = [x.spec for x in self._spread]
        self._whole = [x.whole for x in self._spread]
        self.given = Given([x.here for x in self._spread])
        self._outside = {}
        self._wholes = {}
        if type(self._state) is not type(state):
            self._state = state.copy()
        content = self._rebuild_state(state)
        self._state.clear()
        self._state.update(content)
        own = self._groups = [
            self._groups[i] if i < len(self._groups) else {} for i in range(len(groups))
        ]
        self._lists = [
            self._lists[i] if i < len(self._lists) else [] for i in range(len(groups))
        ]
        for ours, params, group in zip(own, self._lists, groups, strict=True):
            params[:] = [self._parts[id(p)].here for p in group[_PARAMS]]
            ours.clear()
            ours.update(group)
            ours[_PARAMS] = params
            ours.update(unfused(ours))
            if "foreach" in ours:
                ours["foreach"] = self._form(optimizer, ours)
            self._outside[id(ours)] = group, None
            self._outside[id(params)] = group[_PARAMS], None
        inside = vars(self.itself)
        listed = inside.get("param_groups", [])
        listed[:] = own
        made = {**vars(optimizer), "state": self._state, "param_groups": listed}
        inside.clear()
        inside.update(made)
        self._outside[id(self._state)] = state, None
        self._outside[id(listed)] = groups, None
        self._outside[id(inside)] = vars(optimizer), None

    @staticmethod
    def _form(optimizer: Optimizer, group: Mapping[str, Any]) -> Any:
        """Torch's own steps choose the form with lists for plain tensors on a GPU, but
        not for DTensors.
        """
        home = type(optimizer).step.__module__
        if group["foreach"] is None and home.startswith("torch.optim."):
            return False
        return group["foreach"]

    def _rebuild_state(self, state: Mapping[Any, Any]) -> dict[Any, Any]:
        known, self._states = self._states, {}
        content = {}
        for p, held in state.items():
            part = self._parts.get(id(p))
            if part is None:
                raise Unlike("it has state of something besides its parameters")
            if type(held) is not dict:
                raise Unlike("the state of a parameter is no dict")
            _, ours = known.get(id(held), (held, {}))
            inner = {k: self._inside(v, k, part) for k, v in held.items()}
            ours.clear()
            ours.update(inner)
            self._states[id(held)] = held, ours
            self._outside[id(ours)] = held, part
            content[part.here] = ours
        return content

    def _part(self, p: Any, known: Part | None) -> Part:
        kind = compat.dtensor_type()
        if not (kind is not None and isinstance(p, kind)):
            return Part(p, p, p, None)
        if type(p) is not kind:
            raise Unlike(f"a parameter is a {type(p).__name__}")
        spec = compat.spec_of(p)
        if not compat.is_summed_up(spec):
            raise Unlike(f"a parameter is {_words(spec)}, parts to be added up")
        if not p.dim():
            raise Unlike("a parameter is a DTensor without dimensions")
        local = part_of(p, spec, "a parameter")
        if local.is_contiguous() != p.is_contiguous():
            raise Unlike("a part of a parameter lies otherwise than the whole")
        if not p.is_leaf:
            raise Unlike("a parameter is no leaf")
        if (
            known is not None
            and known.whole is p
            and known.local is local
            and known.here.is_set_to(local)
            and known.here.dtype == local.dtype
        ):
            known.here.requires_grad_(p.requires_grad)
            return known._replace(spec=spec)
        here = torch.nn.Parameter(local.detach(), p.requires_grad)
        return Part(p, local, here, spec)

    def _inside(self, x: Any, name: str, part: Part) -> Any:
        """What stands for a value of a parameter's state."""
        kind = compat.dtensor_type()
        if part.spec is None or not isinstance(x, torch.Tensor):
            if kind is not None and isinstance(x, kind):
                raise Unlike(f"the state {name!r} of a plain parameter is a DTensor")
            return x
        if x.dim() == 0 and type(x) is torch.Tensor:
            return x
        local = part_of(x, part.spec, f"the state {name!r}")
        if not _lies_as(local, part.local):
            raise Unlike(f"a part of the state {name!r} has another size")
        self._wholes[id(local)] = x
        return local

    def _note(self, optimizer: Optimizer) -> None:
        """Optimizer and parts hold the same now."""
        theirs, ours = optimizer.param_groups, self._groups
        inside = vars(optimizer), vars(self.itself)
        both = [inside, *zip(theirs, ours, strict=True)]
        tables = [*(held for held, _ in self._states.values()), optimizer.state]
        rows: list[Any] = [theirs, *(group[_PARAMS] for group in theirs)]
        inner, heres = [*self._wholes.values()], self.given.params
        self._watch = Watch(both, tables, rows, self._whole, inner, heres)
        self._wrote = False

    # ---------------------------------------------------------------- after a step

    def outward(self, writes: list[Write]) -> list[Write]:
        """All that is to be written, to the parts' optimizer and to the optimizer."""
        made: dict[int, torch.Tensor] = {}
        done: list[Write] = []
        for write in writes:
            done.append(write)
            done += self._same_outside(write, made)
        # until `settle`, should an interrupt come between the two
        self._wrote = self._wrote or bool(writes)
        return done

    def settle(self) -> None:
        """What `outward` gave has been done."""
        optimizer = self._owner()
        self._watch.count_up()
        if self._wrote and optimizer is not None:
            self._known = False
            with contextlib.suppress(Unlike):  # the next call says so
                self._rebuild(optimizer)
                self._note(optimizer)
                self._known = True
        self._wrote = False

    def _same_outside(self, write: Any, made: dict[int, torch.Tensor]) -> list[Write]:
        if isinstance(write, Each):
            states = [self._outside[id(x)][0] for x in write.states]
            return [Each(states, write.news)]
        function, args = write.func, write.args
        if function is torch._foreach_copy_:
            return []
        target = getattr(function, "__self__", None)
        if isinstance(target, (dict, list)):
            rest = args
        else:
            target, *rest = args
        if id(target) not in self._outside:
            return []  # the optimizer's own
        theirs, part = self._outside[id(target)]
        name = function.__name__
        if isinstance(theirs, list) or name not in ("update", "pop", "clear"):
            raise Unlike("the step replaces the optimizer's groups or parameters")
        if name == "clear":
            return [functools.partial(theirs.clear)]
        if target is self._state:
            return [self._of_state(theirs, name, rest, made)]
        if name == "pop":
            return [functools.partial(theirs.pop, *rest)]
        news = rest[0]
        if part is None:
            for key, x in news.items():
                if key in (*_CELLS, _PARAMS) or _has_parts(x):
                    raise Unlike(f"the step keeps a part of a DTensor in {key!r}")
        else:
            news = {k: self._spread_out(x, part, made) for k, x in news.items()}
        return [functools.partial(type(theirs).update, theirs, news)]

    def _of_state(
        self, theirs: Any, name: str, rest: Any, made: dict[int, torch.Tensor]
    ) -> Write:
        by_here = {id(part.here): part for part in self._parts.values()}
        if name == "pop":
            key, *default = rest
            return functools.partial(theirs.pop, by_here[id(key)].whole, *default)
        news = {}
        for key, held in rest[0].items():
            part = by_here[id(key)]
            if type(held) is not dict:
                raise Unlike("the state of a parameter is no dict")
            own = {k: self._spread_out(x, part, made) for k, x in held.items()}
            self._states[id(own)] = own, held
            news[part.whole] = own
        return functools.partial(type(theirs).update, theirs, news)

    def _spread_out(self, x: Any, part: Part, made: dict[int, torch.Tensor]) -> Any:
        """What the optimizer holds for a value of a parameter's new state."""
        if not isinstance(x, torch.Tensor):
            if type(x) not in NUMBERS:
                raise Unlike(f"the state of a parameter gets a {type(x).__name__}")
            return x
        if part.spec is None or not x.dim():
            return x
        if x is part.here:
            return part.whole
        if x is part.here.grad:
            return part.whole.grad
        known = self._wholes.get(id(x)) or made.get(id(x))
        if known is not None:
            return known
        if not _lies_as(x, part.local):
            raise Unlike("the step makes state of another size than its parameter")
        made[id(x)] = compat.spread_as(x, part.whole)
        return made[id(x)]


def _lies_as(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Has x another's sizes and order in memory? A part of one row keeps the stride
    that rows of the whole have, which says nothing.
    """
    if x.shape != other.shape:
        return False
    steps = zip(x.shape, x.stride(), other.stride(), strict=True)
    return not x.numel() or all(n == 1 or a == b for n, a, b in steps)


def _has_parts(x: Any) -> bool:
    """Is a tensor with dimensions in what a step leaves in attributes?"""
    if isinstance(x, torch.Tensor):
        return bool(x.dim())
    if isinstance(x, dict):
        return any(map(_has_parts, x.values()))
    return isinstance(x, (list, tuple, set)) and any(map(_has_parts, x))

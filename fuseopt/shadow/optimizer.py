"""The shadow of an optimizer: an object like it, to which the traced step is applied.

The shadow has the optimizer's class and copies of all its dicts and lists, over the
same tensors and numbers. It is kept from call to call, since Dynamo guards its
identity. Before a step, `refresh` updates it from the optimizer; Dynamo and the step
write to the shadow alone; then `writes` returns C calls that write the same to the
optimizer. Until these run, the optimizer is unchanged.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch.optim import Optimizer

from .. import compat
from ..compiler.code_paths import PLAIN
from ..compiler.session import session
from .contents import Pair, Part
from .double import OUTSIDE, is_hooks
from .lanes import Unlike

#: Containers of which a shadow has copies.
DICTS = (dict, collections.OrderedDict, collections.defaultdict)
#: Types of values that are shared: they do not change, or are the tensors themselves.
SHARED = (
    *PLAIN,
    torch.Tensor,
    torch.Size,
    torch.layout,
    torch.memory_format,
    types.FunctionType,
    types.BuiltinFunctionType,
    type,
)
#: The types of most values, which contain no other values.
LEAVES = frozenset(
    {int, float, bool, str, type(None), torch.Tensor, torch.nn.Parameter}
)
Write = Callable[[], object]


def unfused(group: dict[str, Any]) -> dict[str, bool]:
    """The options that replace `fused=True` in a group: those of the foreach step.

    Empty for a group without `fused`. On other devices than the CPU `capturable` is set
    too, so that step counters are on the device, as for the fused kernels. Otherwise
    Adam's foreach step takes no tensors as rate or betas, and its loop does.
    """
    if not group.get("fused"):
        return {}
    form = {"fused": False, "foreach": True}
    if any(p.device.type != "cpu" for p in group["params"]):
        form["capturable"] = True
    elif group.get("capturable") is False:
        numbers = group.get("lr"), *(group.get("betas") or ())
        form["foreach"] = not any(isinstance(x, torch.Tensor) for x in numbers)
    return {key: value for key, value in form.items() if key in group}


def stand_in(optimizer: Optimizer) -> Any:
    """An object of an optimizer's class without attributes.

    Raises Unlike for an optimizer that no other object can stand for.
    """
    kind = type(optimizer)
    for c in kind.__mro__:
        if any(isinstance(x, types.MemberDescriptorType) for x in vars(c).values()):
            raise Unlike(f"{c.__name__} keeps attributes in slots")
    if hasattr(kind, "__del__"):
        raise Unlike(f"{kind.__name__} has a __del__")
    shadow = object.__new__(kind)
    session.apart.add(shadow)
    return shadow


class Shadow:
    """The shadow of an optimizer. `itself` is what a step is given.

    Its groups are those of torch's foreach steps where the optimizer's ask for torch's
    fused kernels. Raises Unlike for an optimizer that no other object can stand for.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.itself = stand_in(optimizer)
        compat.watched.shadows[self.itself] = weakref.ref(self)
        self._owner = weakref.ref(optimizer)
        #: the library of the guards, once it is there
        self.helper: ctypes.PyDLL | None = None
        #: were the last step's writes to the shadow taken over, or discarded?
        self.clean = False
        self._lanes, self._plain = Part(), Part()
        self._known: dict[int, Pair] = {}  # while copies are made: the former ones
        self._within: set[int] = set()  # ids of containers that are being copied
        self._written: list[tuple[Part, Pair]] = []  # by the last step
        #: the optimizer's container, by id of the shadow's copy
        self._back: dict[int, Any] = {}

    def copies(self, x: Any) -> bool:
        """Does the shadow have a copy of this container?"""
        return id(x) in self._lanes.pairs or id(x) in self._plain.pairs

    # ---------------------------------------------------------------- before a step

    def refresh(
        self,
        optimizer: Optimizer,
        state: Mapping[Any, Any] | None = None,
        lists: Sequence[Any] = (),
    ) -> None:
        """Copy what the optimizer holds.

        `state`, `lists`: replace its state and the parameters of each group, if the
        shadow has other lanes. Raises Unlike for values that are not plain data.
        """
        groups = optimizer.param_groups
        if type(groups) is not list:
            raise Unlike("its groups are no list")
        lists_of_params = [group["params"] for group in groups]
        lanes = [
            optimizer.state if state is None else state,
            *(lists or lists_of_params),
        ]
        plain = [vars(optimizer), groups, *groups]
        lanes_part, plain_part = self._lanes, self._plain
        helper = self.helper
        lanes_are_same = (
            self.clean
            and [*map(id, lanes)] == lanes_part.roots
            and lanes_part.theirs.same(helper)
        )
        same = lanes_are_same and [*map(id, plain)] == plain_part.roots
        moved = plain_part.theirs.moved(helper) if same else None
        if moved == []:
            return
        self.clean = False
        if moved is not None:
            plain_part.follow(moved)
            self.clean = True
            return
        self._within.clear()
        self._known = {**self._lanes.pairs, **self._plain.pairs}
        if not lanes_are_same:
            self._lanes.pairs = {}
            for x in lanes:
                self._mirror(x, optimizer, "state", self._lanes.pairs)
            self._lanes.roots = [*map(id, lanes)]
            self._lanes.note()
        self._mirror_plain(optimizer, lanes)
        self._plain.roots = [*map(id, plain)]
        self._plain.note()
        pairs = [*self._lanes.pairs.values(), *self._plain.pairs.values()]
        self._back = {id(pair.ours): pair.theirs for pair in pairs}
        for mirrored, original in zip(
            lanes, (optimizer.state, *lists_of_params), strict=True
        ):
            self._back[id(self._lanes.pairs[id(mirrored)].ours)] = original
        self._known = {}
        self.clean = True

    def _mirror_plain(self, optimizer: Optimizer, lanes: Sequence[Any]) -> None:
        pairs: dict[int, Pair] = {}
        self._plain.pairs = pairs
        attributes = vars(optimizer).copy()
        mirrored: dict[str, Any] = {}
        for name, x in attributes.items():
            if is_hooks(name):
                mirrored[name] = collections.OrderedDict()
            elif name not in OUTSIDE:
                mirrored[name] = self._mirror(x, optimizer, name, pairs)
        mirrored["state"], *lists = (self._lanes.pairs[id(x)].ours for x in lanes)
        groups = []
        every = optimizer.param_groups.copy()
        for group, params in zip(every, lists, strict=True):
            if type(group) is not dict:
                raise Unlike("a group is no dict")
            seen = group.copy()
            content = {
                key: params
                if key == "params"
                else self._mirror(x, optimizer, f"group {key}", pairs)
                for key, x in seen.items()
            }
            content.update(unfused(group))
            groups.append(self._filled(group, seen, content, pairs))
        mirrored["param_groups"] = self._filled(
            optimizer.param_groups, every, groups, pairs
        )
        inside = vars(self.itself)
        inside.clear()
        inside.update(mirrored)
        pairs[id(vars(optimizer))] = Pair(vars(optimizer), attributes, inside)

    def _filled(
        self, theirs: Any, seen: Any, content: Any, pairs: dict[int, Pair]
    ) -> Any:
        """Fill the shadow's copy of a container: the former copy, if there is one."""
        former = self._known.get(id(theirs))
        if former is not None and former.theirs is theirs:
            ours = former.ours
        elif type(theirs) is collections.defaultdict:
            ours = collections.defaultdict(theirs.default_factory)
        else:
            ours = type(theirs)()
        if isinstance(ours, list):
            ours[:] = content
        else:
            if len(ours) != len(content) or not all(map(is_, ours, content)):
                ours.clear()
            ours.update(content)
        pairs[id(theirs)] = Pair(theirs, seen, ours)
        return ours

    def _mirror(
        self, x: Any, optimizer: Optimizer, name: str, pairs: dict[int, Pair]
    ) -> Any:
        """The shadow's copy of a value; the value itself if it can be shared."""
        kind = type(x)
        if kind in DICTS or kind is list:
            pair = self._lanes.pairs.get(id(x)) or pairs.get(id(x))
            if pair is not None:
                return pair.ours
            if id(x) in self._within:
                raise Unlike(f"{name} holds itself")
            self._within.add(id(x))
            seen = x.copy()
            inner: Any
            if kind is list:
                inner = [self._mirror(y, optimizer, name, pairs) for y in seen]
            else:
                inner = {
                    k: self._mirror(y, optimizer, name, pairs) for k, y in seen.items()
                }
            self._within.discard(id(x))
            return self._filled(x, seen, inner, pairs)
        if kind is tuple:
            items = tuple(self._mirror(y, optimizer, name, pairs) for y in x)
            return x if all(map(is_, items, x)) else items
        if isinstance(x, SHARED):
            return x
        if isinstance(x, weakref.ref) and x() is not optimizer:
            return x
        raise Unlike(f"{name} is a {kind.__name__}, of which nothing is known")

    # ---------------------------------------------------------------- after a step

    def changed(self) -> bool:
        """Has the shadow changed since `refresh`?"""
        helper = self.helper
        return not (self._lanes.ours.same(helper) and self._plain.ours.same(helper))

    def translated(self, x: Any) -> Any:
        """The optimizer's value for a value of the shadow's, in place for containers
        that the step made.
        """
        if x is self.itself:
            return self._owner()
        if id(x) in self._back:
            return self._back[id(x)]
        kind = type(x)
        if kind is list:
            x[:] = [self.translated(y) for y in x]
        elif kind in DICTS:
            for k, y in [*x.items()]:
                translated = self.translated(y)
                if translated is not y:
                    x[k] = translated
        elif kind is tuple:
            items = tuple(self.translated(y) for y in x)
            return x if all(map(is_, items, x)) else items
        elif not isinstance(x, (*SHARED, weakref.ref)):
            raise Unlike(f"the step makes a {kind.__name__}, of which nothing is known")
        return x

    def writes(self, lanes: bool = True) -> list[Write]:
        """C calls that write to the optimizer what the step wrote to the shadow.

        `lanes`: also the writes to the state, by parameter, and to the lists of
        parameters.
        """
        self._written = written = []
        writes: list[Write] = []
        for part in (self._lanes, self._plain) if lanes else (self._plain,):
            if part.ours.same():
                continue
            for pair in part.rows:
                ours, before, theirs = pair.ours, pair.before, pair.theirs
                if len(ours) == len(before) and all(map(is_, ours, before)):
                    continue
                written.append((part, pair))
                pair.seen = [self.translated(x) for x in ours]
                change = functools.partial(list.__setitem__, theirs, slice(None))
                writes.append(functools.partial(change, pair.seen))
            for pair in part.tables:
                ours, before, theirs = pair.ours, pair.before, pair.theirs
                alike = len(ours) == len(before) and all(map(is_, ours, before))
                if alike and all(map(is_, ours.values(), before.values())):
                    continue
                written.append((part, pair))
                displaced: list[Any] = []
                if alike:
                    both = zip(ours.items(), before.values(), strict=True)
                    news = {k: x for (k, x), y in both if x is not y}
                else:
                    displaced = _displaced(before, ours)
                    again = dict.fromkeys(displaced)
                    news = {
                        k: x
                        for k, x in ours.items()
                        if k in again or before.get(k, self) is not x
                    }
                if not LEAVES.issuperset(map(type, news.values())):
                    news = {k: self.translated(x) for k, x in news.items()}
                for k in displaced:
                    pair.seen.pop(k, None)
                    writes.append(functools.partial(theirs.pop, k, None))
                if news:
                    pair.seen.update(news)
                    writes.append(functools.partial(type(theirs).update, theirs, news))
        return writes

    def settle(self) -> None:
        """Note that the last `writes` were done: optimizer and shadow are equal."""
        parts = set()
        for part, pair in self._written:
            if self._strange(pair.ours):
                # the shadow has a container of the optimizer's, not a copy
                return
            pair.before = pair.ours.copy()
            parts.add(part)
        for part in parts:
            part.note_again()
        self.clean = True

    def _strange(self, x: Any) -> bool:
        """Does a container have an item that is a container, but no copy?"""
        values = x.values() if isinstance(x, dict) else x
        if LEAVES.issuperset(map(type, values)):
            return False
        for y in values:
            if isinstance(y, tuple):
                if self._strange(y):
                    return True
            elif isinstance(y, (list, dict)) and id(y) not in self._back:
                return True
        return False

    def is_intact(self) -> bool:
        """Has the step kept the state dict and the lists of parameters?"""
        state, *lists = [self._lanes.pairs[x] for x in self._lanes.roots]
        groups = self.itself.param_groups
        if self.itself.state is not state.ours or len(groups) != len(lists):
            return False
        for group, pair in zip(groups, lists, strict=True):
            params, before = group["params"], pair.before
            if params is not pair.ours or len(params) != len(before):
                return False
            if not all(map(is_, params, before)):
                return False
        return True


def _displaced(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> list[Any]:
    """The keys to remove from a dict with the keys `before`, so that adding the missing
    ones gives it the keys of `now`, in order.
    """
    common = [k for k in before if k in now]
    stay = 0
    for k, other in zip(common, now, strict=False):
        if k is not other:
            break
        stay += 1
    return [*(k for k in before if k not in now), *common[stay:]]

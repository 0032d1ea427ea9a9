"""An optimizer -> an object like it, which the traced step gets in its stead.

The shadow has the optimizer's class and copies of all its dicts and lists, over the
same tensors and numbers. It is kept from call to call, since Dynamo's guards know it by
identity. Before a step, `refresh` makes it hold what the optimizer holds; what Dynamo
and the step write goes into the shadow alone; then `writes` says by which calls of C
the optimizer is made to hold the same. Until these run the optimizer is untouched.
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
#: What may be shared: nothing of it changes, or all see it change.
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
#: The types of most values, which no other value is within.
LEAVES = frozenset(
    {int, float, bool, str, type(None), torch.Tensor, torch.nn.Parameter}
)
Write = Callable[[], object]


def unfused(group: dict[str, Any]) -> dict[str, bool]:
    """Which options of a group ask for what torch's fused kernels do, in other words.

    Nothing for a group that does not ask for those. On a device that is not the CPU the
    capturable form, which has counters where the fused kernels have them.
    """
    if not group.get("fused"):
        return {}
    form = {"fused": False, "foreach": True}
    if any(p.device.type != "cpu" for p in group["params"]):
        form["capturable"] = True
    return {key: value for key, value in form.items() if key in group}


def stand_in(optimizer: Optimizer) -> Any:
    """An object of an optimizer's class that has nothing yet.

    Raises Unlike for an optimizer that no other object can stand for.
    """
    kind = type(optimizer)
    for c in kind.__mro__:
        if any(isinstance(x, types.MemberDescriptorType) for x in vars(c).values()):
            raise Unlike(f"{c.__name__} keeps attributes in slots")
    if hasattr(kind, "__del__"):
        raise Unlike(f"{kind.__name__} has a __del__")
    made = object.__new__(kind)
    session.apart.add(made)
    return made


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
        #: was what the last step left taken over, or thrown away?
        self.clean = False
        self._lanes, self._plain = Part(), Part()
        self._known: dict[int, Pair] = {}  # while copies are made: the former ones
        self._within: set[int] = set()  # what is being copied
        self._written: list[tuple[Part, Pair]] = []  # by the last step
        #: by id of what is the shadow's, the optimizer's
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
        """Hold what the optimizer holds.

        `state`, `lists`: what stands for its state and for the parameters of each
        group, if only some lanes are to be seen. Raises Unlike for what is no plain
        data.
        """
        groups = optimizer.param_groups
        if type(groups) is not list:
            raise Unlike("its groups are no list")
        own = [group["params"] for group in groups]
        lanes = [optimizer.state if state is None else state, *(lists or own)]
        plain = [vars(optimizer), groups, *groups]
        mine, rest = self._lanes, self._plain
        helper = self.helper
        known = (
            self.clean and [*map(id, lanes)] == mine.roots and mine.theirs.same(helper)
        )
        same = known and [*map(id, plain)] == rest.roots
        moved = rest.theirs.moved(helper) if same else None
        if moved == []:
            return
        self.clean = False
        if moved is not None:
            rest.follow(moved)
            self.clean = True
            return
        self._within.clear()
        self._known = {**self._lanes.pairs, **self._plain.pairs}
        if not known:
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
        for given, meant in zip(lanes, (optimizer.state, *own), strict=True):
            self._back[id(self._lanes.pairs[id(given)].ours)] = meant
        self._known = {}
        self.clean = True

    def _mirror_plain(self, optimizer: Optimizer, lanes: Sequence[Any]) -> None:
        pairs: dict[int, Pair] = {}
        self._plain.pairs = pairs
        attributes = vars(optimizer).copy()
        made: dict[str, Any] = {}
        for name, x in attributes.items():
            if is_hooks(name):
                made[name] = collections.OrderedDict()
            elif name not in OUTSIDE:
                made[name] = self._mirror(x, optimizer, name, pairs)
        made["state"], *lists = (self._lanes.pairs[id(x)].ours for x in lanes)
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
        made["param_groups"] = self._filled(
            optimizer.param_groups, every, groups, pairs
        )
        inside = vars(self.itself)
        inside.clear()
        inside.update(made)
        pairs[id(vars(optimizer))] = Pair(vars(optimizer), attributes, inside)

    def _filled(
        self, theirs: Any, seen: Any, content: Any, pairs: dict[int, Pair]
    ) -> Any:
        """The shadow's copy of a container, the one it had if it had one."""
        known = self._known.get(id(theirs))
        if known is not None and known.theirs is theirs:
            ours = known.ours
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
        """What stands for a value in the shadow."""
        kind = type(x)
        if kind in DICTS or kind is list:
            done = self._lanes.pairs.get(id(x)) or pairs.get(id(x))
            if done is not None:
                return done.ours
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
        """Does the shadow hold anything else than it did after `refresh`?"""
        helper = self.helper
        return not (self._lanes.ours.same(helper) and self._plain.ours.same(helper))

    def translated(self, x: Any) -> Any:
        """What of the optimizer's stands for a value of the shadow's."""
        if x is self.itself:
            return self._owner()
        if id(x) in self._back:
            return self._back[id(x)]
        kind = type(x)
        if kind is list:
            x[:] = [self.translated(y) for y in x]
        elif kind in DICTS:
            for k, y in [*x.items()]:
                mine = self.translated(y)
                if mine is not y:
                    x[k] = mine
        elif kind is tuple:
            items = tuple(self.translated(y) for y in x)
            return x if all(map(is_, items, x)) else items
        elif not isinstance(x, (*SHARED, weakref.ref)):
            raise Unlike(f"the step makes a {kind.__name__}, of which nothing is known")
        return x

    def writes(self, lanes: bool = True) -> list[Write]:
        """Calls after which the optimizer holds what the step left in the shadow.

        They run no bytecode. `lanes`: also what it left in the state, by parameter, and
        in the lists of parameters.
        """
        self._written = written = []
        done: list[Write] = []
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
                done.append(functools.partial(change, pair.seen))
            for pair in part.tables:
                ours, before, theirs = pair.ours, pair.before, pair.theirs
                alike = len(ours) == len(before) and all(map(is_, ours, before))
                if alike and all(map(is_, ours.values(), before.values())):
                    continue
                written.append((part, pair))
                gone: list[Any] = []
                if alike:
                    both = zip(ours.items(), before.values(), strict=True)
                    news = {k: x for (k, x), y in both if x is not y}
                else:
                    gone = _displaced(before, ours)
                    again = dict.fromkeys(gone)
                    news = {
                        k: x
                        for k, x in ours.items()
                        if k in again or before.get(k, self) is not x
                    }
                if not LEAVES.issuperset(map(type, news.values())):
                    news = {k: self.translated(x) for k, x in news.items()}
                for k in gone:
                    pair.seen.pop(k, None)
                    done.append(functools.partial(theirs.pop, k, None))
                if news:
                    pair.seen.update(news)
                    done.append(functools.partial(type(theirs).update, theirs, news))
        return done

    def settle(self) -> None:
        """What `writes` gave has been done: optimizer and shadow hold the same."""
        parts = set()
        for part, pair in self._written:
            if self._strange(pair.ours):
                # what the step has put there is no copy yet
                return
            pair.before = pair.ours.copy()
            parts.add(part)
        for part in parts:
            part.note_again()
        self.clean = True

    def _strange(self, x: Any) -> bool:
        """Is something in a container that is neither a copy nor no container?"""
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
        """Are its state and the lists of parameters those that it was given?"""
        state, *lists = [self._lanes.pairs[x] for x in self._lanes.roots]
        groups = self.itself.param_groups
        if self.itself.state is not state.ours or len(groups) != len(lists):
            return False
        for group, pair in zip(groups, lists, strict=True):
            own, before = group["params"], pair.before
            if own is not pair.ours or len(own) != len(before):
                return False
            if not all(map(is_, own, before)):
                return False
        return True


def _displaced(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> list[Any]:
    """The keys to be taken out of a dict that holds `before`, so that it has the order
    of `now` when it is given the rest.
    """
    kept = [k for k in before if k in now]
    stay = 0
    for k, other in zip(kept, now, strict=False):
        if k is not other:
            break
        stay += 1
    return [*(k for k in before if k not in now), *kept[stay:]]

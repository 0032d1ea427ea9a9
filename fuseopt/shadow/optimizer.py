"""The shadow of an optimizer: an object like it, to which the traced step is applied.

The shadow has the optimizer's class and copies of all its dicts and lists, over the
same tensors and numbers. It lives from call to call, since Dynamo guards its identity.
Before a step, `refresh` updates it from the optimizer. Dynamo and the step write to the
shadow alone. Then `writes` returns C calls that write the same to the optimizer. Until
these run, the optimizer is unchanged.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch.optim import Optimizer

from .. import compat
from ..compiler.code_paths import PLAIN
from ..compiler.tables import acts_when_copied
from ..inputs.change import Change, MovedNumber
from ..inputs.keys import LanesDiffer, OddValue, only_tensors
from ..inputs.state_guard import Epoch
from ..inputs.values import OUTSIDE, is_hooks
from .mirrored import Pair, Part, within
from .stand_in import stand_in, unfused

#: Containers that a shadow copies.
DICTS = (dict, collections.OrderedDict, collections.defaultdict)
#: Types of values that a shadow shares: they are immutable, or the tensors themselves.
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
#: The number of floats in place of numpy's to keep before a cleanup.
MANY = 1024
NOT_GIVEN = None, None, None
Write = Callable[[], object]


class NumberTypeChanged(Exception):
    """A number replaced a number of a different type."""


class Shadow:
    """The shadow of an optimizer. `stand_in` is the step's argument.

    Its groups are those of torch's foreach steps if the optimizer's options request
    torch's fused kernels. Raises LanesDiffer for an optimizer that no other object can
    replace.

    `follows`: True if a float may replace each numpy.float64. A change of `numpy_names`
    then needs a new trace.
    """

    def __init__(self, optimizer: Optimizer, follows: bool = False) -> None:
        self.stand_in = stand_in(optimizer)
        #: the library of the guards, once it is built
        self.helper: ctypes.PyDLL | None = None
        compat.patch_state.shadows[self.stand_in] = weakref.ref(self)
        self._owner = weakref.ref(optimizer)
        self._follows = follows and compat.may_follow_numpy()
        #: names that ever had a numpy.float64: floats there are followed from then on
        self.numpy_names: frozenset[str] = frozenset()
        self.forget()

    def forget(self) -> None:
        """Release all that the optimizer held."""
        vars(self.stand_in).clear()
        #: False while the optimizer lacks the last step's writes to the shadow
        self.clean = False
        #: the last arguments of `refresh`, while it need not compare all again
        self.given: tuple[Any, ...] = NOT_GIVEN
        #: containers that hold lanes, and the others
        self.lanes, self.plain = Part(), Part()
        self._known: dict[int, Pair] = {}  # the former copies, while it makes new ones
        self._within: set[int] = set()  # ids of containers in the middle of a copy
        #: by the last step, with new values of a dict that kept the order of its keys
        self._written: list[tuple[Part, Pair, dict[Any, Any]]] = []
        #: the optimizer's container, by id of the shadow's copy
        self._back: dict[int, Any] = {}
        #: by id of a float that (maybe) replaces a numpy.float64: the float, the number
        self.numpy: dict[int, tuple[float, Any]] = {}
        self._keeps_numpy = False  # True if the last step stored such a float

    def stands_for_numpy(self, x: float) -> bool:
        """Does, or may, this very float replace a numpy.float64?"""
        return id(x) in self.numpy

    def copies(self, x: Any) -> bool:
        """Does the shadow have a copy of this container?"""
        return id(x) in self.lanes.pairs or id(x) in self.plain.pairs

    def stands_for(self, x: Any) -> bool:
        """Is this the optimizer itself?"""
        return x is self._owner()

    # ---------------------------------------------------------------- before a step

    def refresh(
        self,
        optimizer: Optimizer,
        state: Mapping[Any, Any] | None = None,
        lists: Sequence[Any] = (),
        epoch: Epoch | None = None,
    ) -> None:
        """Copy what the optimizer holds.

        `state`, `lists`: replace its state and the parameters of each group, if the
        shadow has other lanes. `epoch`: that of a StateGuard that has just compared the
        optimizer. Raises OddValue for values that are not plain data.
        """
        given, (former, *roots) = (epoch, state, lists), self.given
        known = self.clean and all(map(is_, given[1:], roots))
        if epoch is not None and known and len(self.numpy) < MANY:
            same = self.lanes.theirs.same(self.helper)
            if same and epoch.reached(former, self._follow):
                self.given = given
                return
        self.given = NOT_GIVEN
        self._refresh(optimizer, state, lists)
        if self.clean:
            self.given = given

    def _refresh(
        self,
        optimizer: Optimizer,
        state: Mapping[Any, Any] | None,
        lists: Sequence[Any],
    ) -> None:
        groups = optimizer.param_groups
        if type(groups) is not list:
            raise OddValue("its groups are not a list", groups)
        lists_of_params = [group["params"] for group in groups]
        first = optimizer.state if state is None else state
        lanes = [first, *(lists or lists_of_params)]
        plain = [vars(optimizer), groups, *groups]
        helper = self.helper
        lanes_are_same = (
            self.clean
            and len(self.numpy) < MANY
            and [*map(id, lanes)] == self.lanes.roots
            and self.lanes.theirs.same(helper)
        )
        same = lanes_are_same and [*map(id, plain)] == self.plain.roots
        found = self.plain.theirs.compare(helper) if same else None
        if found is not None and found.change is Change.SAME:
            return
        self.clean = False
        if found is not None and found.change is Change.NUMBERS:
            if self._follow(found.moved):
                return
        names = self.numpy_names
        self._within.clear()
        self._known = {**self.lanes.pairs, **self.plain.pairs}
        if not lanes_are_same:
            self.numpy.clear()
            self.lanes.pairs = {}
            for x, holder in zip(lanes, (None, *groups), strict=True):
                self._mirror(x, optimizer, "state", self.lanes.pairs)
                if id(x) not in self.lanes.pairs:
                    what = f"the parameters of a group are a {type(x).__name__}"
                    raise OddValue(what, x, holder)
                if holder is not None:
                    only_tensors(x)
            self.lanes.roots = [*map(id, lanes)]
            self.lanes.note()
        self._mirror_plain(optimizer, lanes)
        if state is not None:
            own = {id(optimizer.state), *map(id, optimizer.state.values())}
            if not own.isdisjoint(self.plain.pairs):
                raise LanesDiffer("it holds a parameter's state under a second name")
        self.plain.roots = [*map(id, plain)]
        self.plain.note()
        pairs = [*self.lanes.pairs.values(), *self.plain.pairs.values()]
        self._back = {id(pair.ours): pair.theirs for pair in pairs}
        for mirrored, original in zip(
            lanes, (optimizer.state, *lists_of_params), strict=True
        ):
            self._back[id(self.lanes.pairs[id(mirrored)].ours)] = original
        self._known = {}
        if self.numpy_names != names:  # other values of these names have copies already
            self._refresh(optimizer, state, lists)
        self.clean = True

    def _float(self, x: float, name: str) -> float:
        """Return the shadow's float: for a numpy.float64, a float of equal value.

        Where a numpy.float64 has been, a float gets a stand-in too: a trace holds for
        both.
        """
        if compat.is_numpy_float(x):
            self.numpy_names |= {name}
        return self._stand_in_for(x) if name in self.numpy_names else x

    def _stand_in_for(self, x: float) -> float:
        """Return a new float for a float or numpy.float64, an object nowhere else."""
        plain = float(x) * 1.0
        self.numpy[id(plain)] = plain, x
        return plain

    def _follow(self, moved: Iterable[MovedNumber]) -> bool:
        """Take over numbers that have moved; False if all must be copied anew."""
        self.clean = False
        try:
            ours = self._number if self.numpy_names else None
            self.clean = self.plain.follow(moved, ours)
        except NumberTypeChanged:
            pass
        return self.clean

    def _number(self, before: Any, x: Any) -> Any:
        """Return the shadow's number for a number that replaces another one."""
        if type(before) is not (float if isinstance(x, float) else type(x)):
            raise NumberTypeChanged
        return self._stand_in_for(x) if id(before) in self.numpy else x

    def _mirror_plain(self, optimizer: Optimizer, lanes: Sequence[Any]) -> None:
        pairs: dict[int, Pair] = {}
        self.plain.pairs = pairs
        attributes = vars(optimizer).copy()
        _, *lists = (self.lanes.pairs[id(x)].ours for x in lanes)
        groups = []
        every = optimizer.param_groups.copy()
        # before attributes, which may hold groups too
        for group, params in zip(every, lists, strict=True):
            if type(group) is not dict:
                raise OddValue("a group is not a dict", group)
            acts = acts_when_copied(group)
            if acts:
                raise OddValue(f"a group {acts}", group)
            if id(group) in self.lanes.pairs:
                raise OddValue("a state contains a group", group)
            seen = group.copy()
            content = {
                key: params
                if key == "params"
                else self._mirror(x, optimizer, f"group {key}", pairs)
                for key, x in seen.items()
            }
            content.update(unfused(group))
            groups.append(self._filled(group, seen, content, pairs))
        groups = self._filled(optimizer.param_groups, every, groups, pairs)
        mirrored: dict[str, Any] = {}
        for name, x in attributes.items():
            if is_hooks(name):
                mirrored[name] = collections.OrderedDict()
            elif name not in OUTSIDE:
                mirrored[name] = self._mirror(x, optimizer, name, pairs)
        mirrored["state"] = self.lanes.pairs[id(lanes[0])].ours
        mirrored["param_groups"] = groups
        inside = vars(self.stand_in)
        inside.clear()
        inside.update(mirrored)
        pairs[id(vars(optimizer))] = Pair(vars(optimizer), attributes, inside)

    def _filled(
        self, theirs: Any, seen: Any, content: Any, pairs: dict[int, Pair]
    ) -> Any:
        """Fill the shadow's copy of a container: the former copy, if there is one."""
        # a container that came up before its turn has a copy already
        former = pairs.get(id(theirs)) or self._known.get(id(theirs))
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
        """Return the shadow's copy of a value; the value itself if it can be shared."""
        kind = type(x)
        if kind in DICTS or kind is list:
            pair = self.lanes.pairs.get(id(x)) or pairs.get(id(x))
            if pair is not None:
                return pair.ours
            if id(x) in self._within:
                raise OddValue(f"{name} holds itself", x)
            acts = acts_when_copied(x)
            if acts:
                raise OddValue(f"{name} {acts}", x)
            self._within.add(id(x))
            seen = x.copy()
            inner: Any
            if kind is list:
                inner = [self._mirror(y, optimizer, name, pairs) for y in seen]
            else:
                inner = {
                    k: self._mirror(y, optimizer, within(name, k, y), pairs)
                    for k, y in seen.items()
                }
            self._within.discard(id(x))
            return self._filled(x, seen, inner, pairs)
        if kind is tuple:
            items = tuple(self._mirror(y, optimizer, name, pairs) for y in x)
            return x if all(map(is_, items, x)) else items
        if isinstance(x, SHARED):
            if self._follows and isinstance(x, float):
                return self._float(x, name)
            return x
        if isinstance(x, weakref.ref) and x() is not optimizer:
            return x
        raise OddValue(f"{name} is a {kind.__name__}, an unsupported type", x)

    # ---------------------------------------------------------------- after a step

    def changed(self) -> bool:
        """Has the shadow changed since `refresh`?"""
        helper = self.helper
        return not (self.lanes.ours.same(helper) and self.plain.ours.same(helper))

    def translated(self, x: Any) -> Any:
        """Return the optimizer's value for a value of the shadow's. Changes containers
        that the step made in place.
        """
        if x is self.stand_in:
            return self._owner()
        if id(x) in self._back:
            return self._back[id(x)]
        kind = type(x)
        if kind is float and id(x) in self.numpy:
            self._keeps_numpy = True
            return self.numpy[id(x)][1]
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
            raise LanesDiffer(f"the step makes a {kind.__name__}, an unsupported type")
        return x

    def writes(
        self, lanes: bool = True, check: Callable[[Iterable[Any]], None] | None = None
    ) -> list[Write]:
        """Return C calls that write to the optimizer what the step wrote to the shadow.

        `lanes`: also the writes to the state, by parameter, and to the lists of
        parameters. `check` is called with the new values of each container.
        """
        written = self._written = []
        writes: list[Write] = []
        for part in (self.lanes, self.plain) if lanes else (self.plain,):
            if part.ours.same():
                continue
            for pair in part.rows:
                if pair.keeps_items():
                    continue
                theirs = pair.theirs
                written.append((part, pair, {}))
                pair.seen = [self.translated(x) for x in pair.ours]
                if check is not None:
                    check(pair.seen)
                change = functools.partial(list.__setitem__, theirs, slice(None))
                writes.append(functools.partial(change, pair.seen))
            for pair in part.tables:
                found = pair.news()
                if found is None:
                    continue
                displaced, news = found
                theirs = pair.theirs
                if self.numpy or not LEAVES.issuperset(map(type, news.values())):
                    news = {k: self.translated(x) for k, x in news.items()}
                written.append((part, pair, {} if displaced else news))
                for k in displaced:
                    pair.seen.pop(k, None)
                    writes.append(functools.partial(theirs.pop, k, None))
                if news:
                    if check is not None:
                        check(news.values())
                    pair.seen.update(news)
                    writes.append(functools.partial(type(theirs).update, theirs, news))
        return writes

    def settle(self, lanes: bool = True) -> None:
        """Record that the last `writes` were done: optimizer and shadow are equal.

        `lanes`: as for `writes`. Without them, the copies of the state get their
        contents from before the step.
        """
        if not lanes and not self.lanes.restored(self.helper):
            return
        parts = set()
        if self._keeps_numpy:  # it has a second place now, which the next call finds
            self._keeps_numpy = False
            return
        for part, pair, news in self._written:
            if self._holds_original(pair.ours):
                return  # the shadow has a container of the optimizer's, not a copy
            if not (news and part.settle(pair, news)):
                pair.before = pair.ours.copy()
                parts.add(part)
        for part in parts:
            part.note_again()
        self.clean = True

    def _holds_original(self, x: Any) -> bool:
        """Does a container hold a container that is not a copy?"""
        values = x.values() if isinstance(x, dict) else x
        if LEAVES.issuperset(map(type, values)):
            return False
        for y in values:
            if isinstance(y, tuple):
                if self._holds_original(y):
                    return True
            elif isinstance(y, (list, dict)) and id(y) not in self._back:
                return True
        return False

    def is_intact(self) -> bool:
        """Has the step kept the state dict and the lists of parameters?"""
        state, *lists = [self.lanes.pairs[x] for x in self.lanes.roots]
        groups = self.stand_in.param_groups
        if self.stand_in.state is not state.ours or len(groups) != len(lists):
            return False
        for group, pair in zip(groups, lists, strict=True):
            if group["params"] is not pair.ours or not pair.keeps_items():
                return False
        return True

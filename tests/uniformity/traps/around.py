"""What lies around a step: clocks, random numbers, modes, modules, texts."""

from __future__ import annotations

import abc
import array
import bisect
import collections
import copy
import dataclasses
import functools
import itertools
import math
import operator
import os
import random
import sys
import time
import types
import warnings
import weakref
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from tests.uniformity.traps.base import Momentum, Trap
from tests.uniformity.traps.numbers import Warmup

COUNT = [0]


class Counting:
    """A data descriptor that counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __get__(self, owner: Any, kind: Any) -> float:
        self.asked += 1
        return 2.0 if self.asked % 20 == 0 else 1.0

    def __set__(self, owner: Any, value: Any) -> None:
        self.asked = value


class DescriptorCounts(Trap):
    rate = Counting()

    def scale(self, i, p, group):
        return self.rate

    def before(self, turn, ps):
        if turn == 2:
            self.rate = 5


class GetattrCounts(Trap):
    """A name that is never there; asking for it leaves a mark."""

    def __getattr__(self, name):
        if name == "missing":
            COUNT[0] += 1
            return 1.0 / COUNT[0]
        raise AttributeError(name)

    def scale(self, i, p, group):
        return self.missing


class PropertyAppends(Trap):
    def ready(self, ps):
        self.log = []

    @property
    def rate(self):
        self.log.append(1)
        return 1.0 / len(self.log)

    def scale(self, i, p, group):
        return self.rate


def counter():
    """A function with a number of its own."""
    n = 0

    def count():
        nonlocal n
        n += 1
        return n

    return count


TICK = counter()


class CellCounts(Trap):
    def scale(self, i, p, group):
        return 1.0 / TICK()


class CellOfItsOwn(Trap):
    def ready(self, ps):
        self.tick = counter()

    def scale(self, i, p, group):
        return 1.0 / self.tick()


class CellIsSet(Trap):
    """The cell of a closure, written from outside."""

    def ready(self, ps):
        rate = 1.0

        def look(n):
            return rate

        self.look = look

    def scale(self, i, p, group):
        return self.look(i)

    def before(self, turn, ps):
        self.look.__closure__[0].cell_contents = float(turn)


class DefaultCounts(Trap):
    def scale(self, i, p, group, seen={"n": 0}):  # noqa: B006
        seen["n"] += 1
        return 1.0 / seen["n"]


class DefaultOfALambda(Trap):
    def ready(self, ps):
        self.rule = lambda n, rate=1.0: rate

    def scale(self, i, p, group):
        return self.rule(i)

    def before(self, turn, ps):
        self.rule.__defaults__ = (float(turn),)


class CodeOfAFunction(Trap):
    """A function of the module is given another one's code."""

    def scale(self, i, p, group):
        return one_of_two(i)

    def before(self, turn, ps):
        if turn == 2:
            one_of_two.__code__ = the_other.__code__


def one_of_two(n):
    """One of two functions."""
    return 1.0


def the_other(n):
    """The other one."""
    return 1.0 + n


class SentTo(Trap):
    """A generator that is told each lane."""

    def ready(self, ps):
        def rates():
            total = 0
            while True:
                total += yield 1.0 / (1 + total)

        self.rates = rates()
        next(self.rates)

    def scale(self, i, p, group):
        return self.rates.send(1)


class IteratorIsKept(Trap):
    def ready(self, ps):
        self.rates = iter([1.0 / (1 + n) for n in range(200)])

    def scale(self, i, p, group):
        return next(self.rates)


class MapIsKept(IteratorIsKept):
    def ready(self, ps):
        self.rates = map(float, range(200))


class CountIsReplaced(Trap):
    def ready(self, ps):
        self.ticks = itertools.count(1)

    def scale(self, i, p, group):
        return 1.0 / next(self.ticks)

    def before(self, turn, ps):
        if turn == 2:
            self.ticks = itertools.count(100)


class PartialReplaced(Trap):
    def ready(self, ps):
        self.rule = functools.partial(operator.mul, 1.0)

    def scale(self, i, p, group):
        return self.rule(1.0)

    def before(self, turn, ps):
        self.rule = functools.partial(operator.mul, float(turn))


class PartialKeywords(Trap):
    def ready(self, ps):
        self.rule = functools.partial(one_rate, rate=1.0)

    def scale(self, i, p, group):
        return self.rule(i)

    def before(self, turn, ps):
        self.rule.keywords["rate"] = float(turn)


def one_rate(n, rate):
    """What it is given."""
    return rate


def seed(optimizer: Any, args: Any, kwargs: Any) -> None:
    """A hook that begins all sequences of random numbers anew."""
    optimizer.calls += 1
    random.seed(optimizer.calls)
    np.random.seed(optimizer.calls)
    torch.manual_seed(optimizer.calls)


class Random(Trap):
    def ready(self, ps):
        self.calls = 0
        self.register_step_pre_hook(seed)

    def scale(self, i, p, group):
        return random.random()


class RandomChoice(Random):
    def scale(self, i, p, group):
        return random.choice((1.0, 2.0, 3.0))


class RandomOfItsOwn(Trap):
    def ready(self, ps):
        self._drawn = random.Random(1)

    def scale(self, i, p, group):
        return self._drawn.uniform(0.5, 1.0)


class RandomOfNumpy(Random):
    def scale(self, i, p, group):
        return float(np.random.rand())


class RandomOfTorch(Random):
    def lane(self, i, p, group):
        p.sub_(p.grad * torch.rand(()).item())


class Clock(Trap):
    """The time of one call is never that of another."""

    def ready(self, ps):
        self._last = -1

    def scale(self, i, p, group):
        now = time.perf_counter_ns()
        before, self._last = self._last, now
        return 2.0 if now == before else 1.0


class ClockOfTheStep(Trap):
    @torch.no_grad()
    def step(self, closure=None):
        now = time.time()
        same = now == self._last
        self._last = now
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.2 if same else 0.1)

    _last = 0.0

    def before(self, turn, ps):
        time.sleep(0.002)


class NumpyRate(Warmup):
    def before(self, turn, ps):
        self.param_groups[0]["lr"] = np.float64(self.rates[turn])


class NumpySmallRate(Warmup):
    """Arithmetic in float32."""

    def rate(self, i, lr):
        return float(self.factor * np.float32(1 + i))

    factor = np.float32(0.1)

    def before(self, turn, ps):
        type(self).factor = np.float32(0.1 * turn)


class NumpyTable(Trap):
    def ready(self, ps):
        self._table = np.ones(16)

    def scale(self, i, p, group):
        return float(self._table[i])

    def before(self, turn, ps):
        if turn == 2:
            self._table[9] = 2.0


class NumpyFunctions(Warmup):
    def rate(self, i, lr):
        return float(np.cos(np.sqrt(lr) + i) ** 2)


class NumpyOfTheState(Momentum):
    """A schedule by numpy, of a counter."""

    def scale(self, i, p, group):
        return float(np.exp(-0.1 * self.state[p]["n"]))


class MathOfTheState(Momentum):
    def scale(self, i, p, group):
        n = self.state[p]["n"]
        return math.exp(-0.1 * n) * math.cos(n) + math.log1p(n) / math.gamma(n)


class WarningFilters(Trap):
    """What a warning does depends on who asked."""

    def scale(self, i, p, group):
        try:
            warnings.warn("a warning", UserWarning, stacklevel=2)
        except UserWarning:
            return 2.0
        return 1.0

    def before(self, turn, ps):
        warnings.simplefilter("error" if turn == 2 else "ignore", UserWarning)


class DefaultDtype(Trap):
    def scale(self, i, p, group):
        return 1.0 if torch.get_default_dtype() is torch.float32 else 2.0

    def before(self, turn, ps):
        torch.set_default_dtype(torch.float64 if turn == 2 else torch.float32)


class DefaultDtypeOfWhatIsMade(DefaultDtype):
    def lane(self, i, p, group):
        p.sub_(p.grad * torch.tensor([1.0 / 3]).to(p.dtype) + torch.ones(()).sum())


class GradMode(Trap):
    """A step that nobody decorated."""

    def step(self, closure=None):
        scale = 0.3 if torch.is_grad_enabled() else 0.1
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad, alpha=scale)

    def before(self, turn, ps):
        torch.set_grad_enabled(turn != 2)


class Threads(Trap):
    def scale(self, i, p, group):
        return 1.0 if torch.get_num_threads() == 1 else 2.0

    def before(self, turn, ps):
        torch.set_num_threads(2 if turn == 2 else 1)


class Deterministic(Trap):
    def scale(self, i, p, group):
        return 2.0 if torch.are_deterministic_algorithms_enabled() else 1.0

    def before(self, turn, ps):
        torch.use_deterministic_algorithms(turn == 2)


class Switch(Trap):
    """A setting of torch's that is an attribute of a module."""

    def scale(self, i, p, group):
        return 2.0 if torch.backends.cudnn.benchmark else 1.0

    def before(self, turn, ps):
        torch.backends.cudnn.benchmark = turn == 2


class Getenv(Trap):
    def scale(self, i, p, group):
        return float(os.getenv("TRAP_RATE", "1"))

    def before(self, turn, ps):
        os.environ["TRAP_RATE"] = "2" if turn == 2 else "1"


class InEnviron(Trap):
    def scale(self, i, p, group):
        return 2.0 if "TRAP_FLAG" in os.environ else 1.0

    def before(self, turn, ps):
        os.environ.pop("TRAP_FLAG", None)
        if turn == 2:
            os.environ["TRAP_FLAG"] = ""


class InModules(Trap):
    def scale(self, i, p, group):
        return 2.0 if "trap_module" in sys.modules else 1.0

    def before(self, turn, ps):
        sys.modules.pop("trap_module", None)
        if turn == 2:
            sys.modules["trap_module"] = types.ModuleType("trap_module")


class OfAModule(Trap):
    """An attribute of a module that is there later."""

    def scale(self, i, p, group):
        return getattr(sys.modules[__name__], "LATER", 1.0)

    def before(self, turn, ps):
        globals().pop("LATER", None)
        if turn == 2:
            globals()["LATER"] = 2.0


class NameErrors(OfAModule):
    def scale(self, i, p, group):
        try:
            return LATER
        except NameError:
            return 1.0


class InGlobals(OfAModule):
    def scale(self, i, p, group):
        return globals().get("LATER", 1.0)


class BuiltinHidden(OfAModule):
    """A name of the module comes before a builtin's."""

    def scale(self, i, p, group):
        return float(max(1.0, 0.5))

    def before(self, turn, ps):
        globals().pop("max", None)
        if turn == 2:
            globals()["max"] = min


class Holder:
    """An object with methods that Python calls by itself."""

    __slots__ = ("later", "rates", "yes")

    def __init__(self) -> None:
        self.rates = [1.0] * 16
        self.yes = True

    def __len__(self) -> int:
        return len(self.rates)

    def __bool__(self) -> bool:
        return self.yes

    def __iter__(self) -> Any:
        return iter(self.rates)

    def __contains__(self, n: Any) -> bool:
        return n in self.rates

    def __eq__(self, other: Any) -> bool:
        return self.yes

    __hash__ = None  # type: ignore[assignment]


class SlotIsEmpty(Trap):
    def ready(self, ps):
        self._held = Holder()

    def scale(self, i, p, group):
        try:
            return self._held.later
        except AttributeError:
            return 1.0

    def before(self, turn, ps):
        if turn == 2:
            self._held.later = 2.0
        if turn == 3:
            del self._held.later


class TruthOfAnObject(SlotIsEmpty):
    def scale(self, i, p, group):
        return 1.0 if self._held else 2.0

    def before(self, turn, ps):
        self._held.yes = turn != 2


class LengthOfAnObject(TruthOfAnObject):
    def scale(self, i, p, group):
        return len(self._held) / 16

    def before(self, turn, ps):
        self._held.rates.append(1.0)


class InAnObject(TruthOfAnObject):
    def scale(self, i, p, group):
        return 2.0 if 0.5 in self._held else 1.0

    def before(self, turn, ps):
        if turn == 2:
            self._held.rates[3] = 0.5


class EqualsAnObject(TruthOfAnObject):
    def scale(self, i, p, group):
        return 2.0 if self._held == i else 1.0


class OverAnObject(TruthOfAnObject):
    def scale(self, i, p, group):
        return sum(self._held) / 16

    def before(self, turn, ps):
        self._held.rates[turn] = 2.0


class Deque(Trap):
    def ready(self, ps):
        self.rates = collections.deque([1.0] * 15 + [2.0])

    def scale(self, i, p, group):
        return self.rates[i]

    def before(self, turn, ps):
        self.rates.rotate(turn)


class DequeOfSteps(Trap):
    """A window of the last steps, written by the step."""

    def ready(self, ps):
        self.seen = collections.deque(maxlen=3)

    @torch.no_grad()
    def step(self, closure=None):
        self.seen.append(len(self.seen))
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1 * (1 + sum(self.seen)))


class ListOfSteps(Trap):
    """The same in a list."""

    def ready(self, ps):
        self.seen = []

    @torch.no_grad()
    def step(self, closure=None):
        self.seen.append(len(self.seen))
        if len(self.seen) > 2:
            self.seen.pop(0)
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1 * (1 + sum(self.seen)))


class Counter(Trap):
    def ready(self, ps):
        self.seen = collections.Counter()

    def scale(self, i, p, group):
        self.seen[i % 2] += 1
        return 1.0 / self.seen[i % 2]


class Array(Trap):
    def ready(self, ps):
        self._rates = array.array("d", [1.0] * 16)

    def scale(self, i, p, group):
        return self._rates[i]

    def before(self, turn, ps):
        if turn == 2:
            self._rates[9] = 2.0


class Bytes(Trap):
    def ready(self, ps):
        self._rates = bytearray([1] * 16)

    def scale(self, i, p, group):
        return float(self._rates[i])

    def before(self, turn, ps):
        if turn == 2:
            self._rates[9] = 2


class KeysAreKept(Trap):
    """A view of a dict that goes on to change."""

    def ready(self, ps):
        self.table = {0: 1.0}
        self._keys = self.table.keys()

    def scale(self, i, p, group):
        return float(len(self._keys))

    def before(self, turn, ps):
        self.table[turn] = 1.0


class InTheViewOfADict(KeysAreKept):
    def scale(self, i, p, group):
        return 2.0 if i in self._keys else 1.0


class Bisected(Trap):
    def ready(self, ps):
        self.limits = [4, 8, 12]

    def scale(self, i, p, group):
        return float(1 + bisect.bisect(self.limits, i))

    def before(self, turn, ps):
        if turn == 2:
            self.limits[1] = 11


class ItemGetter(Trap):
    def ready(self, ps):
        self.table = dict.fromkeys(range(16), 1.0)

    def scale(self, i, p, group):
        return operator.itemgetter(i)(self.table)

    def before(self, turn, ps):
        if turn == 2:
            self.table[9] = 2.0


class BestKey(ItemGetter):
    def scale(self, i, p, group):
        return 2.0 if max(self.table, key=self.table.get) == i else 1.0


class Copied(ItemGetter):
    def scale(self, i, p, group):
        return copy.deepcopy(self.table)[i]


class Pair(NamedTuple):
    """Two rates."""

    even: float
    odd: float


class Named(Trap):
    def ready(self, ps):
        self.pair = Pair(1.0, 1.0)

    def scale(self, i, p, group):
        return self.pair.odd if i % 2 else self.pair.even

    def before(self, turn, ps):
        self.pair = self.pair._replace(odd=float(turn))


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A frozen dataclass."""

    rate: float = 1.0


class Dataclass(Trap):
    def ready(self, ps):
        self.fixed = Fixed()

    def scale(self, i, p, group):
        return self.fixed.rate

    def before(self, turn, ps):
        self.fixed = dataclasses.replace(self.fixed, rate=float(turn))


class Kind(abc.ABC):  # noqa: B024
    """Its subclasses are whoever is registered."""


class Registered(Trap):
    def scale(self, i, p, group):
        return 2.0 if isinstance(self, Kind) else 1.0

    def before(self, turn, ps):
        if turn == 2:
            Kind.register(type(self))


class Asked(type):
    """Who is an instance is said by a table."""

    yes: ClassVar[bool] = False

    def __instancecheck__(cls, one: Any) -> bool:
        return Asked.yes


class Maybe(metaclass=Asked):
    """Of which nothing is an instance, at first."""


class InstanceCheck(Trap):
    def scale(self, i, p, group):
        return 2.0 if isinstance(self, Maybe) else 1.0

    def before(self, turn, ps):
        Asked.yes = turn == 2


class Bases(Trap):
    """A class gets another base."""

    def scale(self, i, p, group):
        return Derived().rate()

    def before(self, turn, ps):
        if turn == 2:
            Derived.__bases__ = (Second,)


class First:
    """A base."""

    def rate(self):
        return 1.0


class Second:
    """Another one."""

    def rate(self):
        return 2.0


class MethodOfAnother(Bases):
    """A class of whose objects the step makes one gets another method."""

    def before(self, turn, ps):
        if turn == 2:
            First.rate = lambda self: 3.0


class Derived(First):
    """Of the one, then of the other."""


class OfTheClassItself(Trap):
    rate = 1.0

    def scale(self, i, p, group):
        return vars(type(self)).get("rate", 0.5)

    def before(self, turn, ps):
        if turn == 2:
            type(self).rate = 2.0


class WeakValues(Trap):
    def ready(self, ps):
        self._kept = [Fixed(1.0), Fixed(2.0)]
        self._weak = weakref.WeakValueDictionary({0: self._kept[0]})

    def scale(self, i, p, group):
        return self._weak[0].rate

    def before(self, turn, ps):
        if turn == 2:
            self._weak[0] = self._kept[1]


class WeakProxy(Trap):
    def ready(self, ps):
        self._held = First()
        self._held.now = 1.0
        self._proxy = weakref.proxy(self._held)

    def scale(self, i, p, group):
        return self._proxy.now

    def before(self, turn, ps):
        self._held.now = float(turn)


class Referents(Trap):
    """A weak reference that dies."""

    def ready(self, ps):
        self._held = First()
        self._weak = weakref.ref(self._held)

    def scale(self, i, p, group):
        return 2.0 if self._weak() is None else 1.0

    def before(self, turn, ps):
        if turn == 2:
            del self._held


class GroupsByThemselves(Trap):
    """`_init_group` of its own, which Dynamo would call for real."""

    def ready(self, ps):
        self.table = {}

    def _init_group(self, group, params, grads, scales):
        for i, p in enumerate(group["params"]):
            if p.grad is not None:
                params.append(p)
                grads.append(p.grad)
                scales.append(self.table.get(i, 1.0))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params: list[Any] = []
            grads: list[Any] = []
            scales: list[Any] = []
            self._init_group(group, params, grads, scales)
            for p, g, scale in zip(params, grads, scales, strict=True):
                p.sub_(g, alpha=group["lr"] * scale)

    def before(self, turn, ps):
        if turn == 2:
            self.table[9] = 2.0


class AsText(Warmup):
    rates = (0.0, 0.5, 1.0, 0.123456789, 1 / 3)

    def rate(self, i, lr):
        return float(str(lr)[:4])


class AsPercents(AsText):
    def rate(self, i, lr):
        return float("%.3f" % lr)  # noqa: UP031


class AsFormatted(AsText):
    def rate(self, i, lr):
        return float("{:.2f}".format(lr))  # noqa: UP032


class AsFormat(AsText):
    def rate(self, i, lr):
        return float(format(lr, ".3f"))


class AsHex(AsText):
    def rate(self, i, lr):
        return float.fromhex(lr.hex()) / 2


class AsRatio(AsText):
    def rate(self, i, lr):
        return 1.0 / lr.as_integer_ratio()[1]


class IsInteger(AsText):
    def rate(self, i, lr):
        return 2.0 if lr.is_integer() else 1.0


class Divided(AsText):
    def rate(self, i, lr):
        whole, rest = divmod(lr * 7, 1.5)
        return whole + rest


class AsAKey(AsText):
    """A table that has the rate for a key."""

    def rate(self, i, lr):
        return {0.5: 2.0, 1 / 3: 3.0}.get(lr, 1.0)


class FlagOfATensor(Trap):
    """A branch on what a tensor holds, which changes in place."""

    def ready(self, ps):
        self.flag = torch.zeros(())

    def scale(self, i, p, group):
        return 2.0 if self.flag.item() > 0 else 1.0

    def before(self, turn, ps):
        self.flag.fill_(float(turn == 2))


class SizeOfAnAttribute(Trap):
    def ready(self, ps):
        self.rates = torch.ones(3)

    def scale(self, i, p, group):
        return float(len(self.rates))

    def before(self, turn, ps):
        self.rates = torch.ones(3 + turn)


class HooksOfAParameter(Trap):
    """Whether somebody waits for a gradient."""

    def scale(self, i, p, group):
        return 2.0 if p._backward_hooks else 1.0

    def before(self, turn, ps):
        if turn == 2:
            ps[9].register_hook(lambda g: g)


class IsAView(Trap):
    def scale(self, i, p, group):
        return 2.0 if p.grad._is_view() else 1.0

    def before(self, turn, ps):
        if turn == 2:
            ps[9].grad = torch.ones(10)[:5]


class IsShared(Trap):
    def scale(self, i, p, group):
        return 2.0 if p.is_shared() else 1.0

    def before(self, turn, ps):
        if turn == 2:
            ps[9].data = ps[9].data.clone().share_memory_()


class StateGoes(Momentum):
    """The state of one lane is dropped between steps."""

    def before(self, turn, ps):
        if turn in (2, 3):
            self.state.pop(ps[9])


class StateWithoutLength(Momentum):
    """State that is looked for by exceptions alone."""

    def lane(self, i, p, group):
        state = self.state[p]
        try:
            state["m"]
        except KeyError:
            state["m"] = torch.zeros_like(p)
        try:
            boost = state["boost"]
        except KeyError:
            boost = 1.0
        state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
        p.sub_(state["m"], alpha=group["lr"] * boost)

    def before(self, turn, ps):
        if turn == 2:
            self.state[ps[9]]["boost"] = 2.0
        if turn == 3:
            self.state[ps[8]].pop("m")

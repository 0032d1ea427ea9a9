"""What a lane looks up: tables that are reached by every way there is."""

from __future__ import annotations

import collections
import contextvars
import enum
import functools
import os
import sys
import threading
import types
import weakref
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from tests.uniformity.traps.base import Trap

TABLE = [1.0] * 16
BY_NAME = {"even": 1.0, "odd": 1.0}
RATE = contextvars.ContextVar("rate", default=(1.0,) * 16)
HERE = threading.local()
LIMIT = 1000


class GlobalList(Trap):
    def scale(self, i, p, group):
        return TABLE[i]

    def before(self, turn, ps):
        if turn == 2:
            TABLE[11] = 0.5


class GlobalByItsModule(GlobalList):
    def scale(self, i, p, group):
        return sys.modules[type(self).__module__].TABLE[i]


class GlobalByGlobals(GlobalList):
    def scale(self, i, p, group):
        return globals()["TABLE"][i]


class GlobalThroughAFunction(GlobalList):
    def scale(self, i, p, group):
        return through(lambda: TABLE)(i)


def through(where):
    """A function that looks up what another one gives."""
    return lambda n: where()[n]


class OfTheClass(Trap):
    table: ClassVar[Any] = {}

    def scale(self, i, p, group):
        return self.table.get(i, 1.0)

    def before(self, turn, ps):
        if turn == 2:
            type(self).table[9] = 2.0


class OfTheClassByName(OfTheClass):
    def scale(self, i, p, group):
        return OfTheClass.table.get(i, 1.0)

    def before(self, turn, ps):
        if turn == 2:
            OfTheClass.table = {9: 2.0}


class OfABase(OfTheClass):
    def scale(self, i, p, group):
        return super().scale(i, p, group) * super().table.get(i + 1, 1.0)


class OfTheFunction(Trap):
    def scale(self, i, p, group):
        return looked_up(i)

    def before(self, turn, ps):
        if turn == 2:
            looked_up.table = {7: 2.0}


def looked_up(n):
    """A function that keeps its table itself."""
    return looked_up.table.get(n, 1.0)


looked_up.table = {}


class OfTheMethod(Trap):
    def scale(self, i, p, group):
        return type(self).step.table.get(i, 1.0)

    @torch.no_grad()
    def step(self, closure=None):
        return super().step()

    step.table = {}  # noqa: RUF012

    def before(self, turn, ps):
        if turn == 2:
            type(self).step.table[7] = 2.0


class DefaultArgument(Trap):
    def scale(self, i, p, group, table=[1.0] * 16):
        return table[i]

    def before(self, turn, ps):
        if turn == 2:
            type(self).scale.__defaults__[0][9] = 2.0


class DefaultArgumentReplaced(Trap):
    def scale(self, i, p, group, *, odd=-1):
        return 2.0 if i == odd else 1.0

    def before(self, turn, ps):
        type(self).scale.__kwdefaults__ = {"odd": turn * 3}


class DefaultArgumentFills(Trap):
    """The argument that all calls share."""

    def scale(self, i, p, group, seen=[]):  # noqa: B006
        seen.append(i)
        return 1.0 / len(seen)


def enclosed():
    """Two functions over one table."""
    table = [1.0] * 16

    def look(n):
        return table[n]

    def put(n, value):
        nonlocal table
        table = [*table[:n], value, *table[n + 1 :]]

    return look, put


LOOK, PUT = enclosed()


class Closure(Trap):
    def scale(self, i, p, group):
        return LOOK(i)

    def before(self, turn, ps):
        if turn == 2:
            PUT(9, 2.0)


class ClosureOfItsOwn(Trap):
    def ready(self, ps):
        self.look, self.put = enclosed()

    def scale(self, i, p, group):
        return self.look(i)

    def before(self, turn, ps):
        if turn == 2:
            self.put(9, 2.0)


class Partial(Trap):
    def ready(self, ps):
        self.table = {}
        self.look = functools.partial(dict.get, self.table)

    def scale(self, i, p, group):
        return self.look(i, 1.0)

    def before(self, turn, ps):
        if turn == 2:
            self.table[9] = 2.0


class Holder:
    """What keeps a table alive."""

    def __init__(self):
        self.table = [1.0] * 16

    def __call__(self, n):
        return self.table[n]


HOLDER = Holder()


class Weak(Trap):
    def ready(self, ps):
        self.holder = weakref.ref(HOLDER)

    def scale(self, i, p, group):
        return self.holder().table[i]

    def before(self, turn, ps):
        if turn == 2:
            HOLDER.table[9] = 2.0


class Called(Trap):
    def scale(self, i, p, group):
        return HOLDER(i)

    def before(self, turn, ps):
        if turn == 2:
            HOLDER.table[9] = 2.0


class BoundMethodOfAnother(Called):
    def ready(self, ps):
        self.look = HOLDER.__call__

    def scale(self, i, p, group):
        return self.look(i)


@dataclass
class Settings:
    """A dataclass in an attribute."""

    scales: Any = field(default_factory=lambda: [1.0] * 16)


class InADataclass(Trap):
    def ready(self, ps):
        self.settings = Settings()

    def scale(self, i, p, group):
        return self.settings.scales[i]

    def before(self, turn, ps):
        if turn == 2:
            self.settings.scales[9] = 2.0


class Slots:
    """Attributes without a dict."""

    __slots__ = ("scales",)


class InSlots(InADataclass):
    def ready(self, ps):
        self.settings = Slots()
        self.settings.scales = [1.0] * 16


class InANamespace(InADataclass):
    def ready(self, ps):
        self.settings = types.SimpleNamespace(scales=[1.0] * 16)


class Kind(enum.Enum):
    """Of lanes."""

    SLOW = 0.5
    FAST = 1.0


class Enumerated(Trap):
    def ready(self, ps):
        self.kinds = [Kind.FAST] * 16

    def scale(self, i, p, group):
        return self.kinds[i].value

    def before(self, turn, ps):
        if turn == 2:
            self.kinds[9] = Kind.SLOW


class ContextVariable(Trap):
    def scale(self, i, p, group):
        return RATE.get()[i]

    def before(self, turn, ps):
        if turn == 2:
            RATE.set((*[1.0] * 9, 2.0, *[1.0] * 6))


class ThreadLocal(Trap):
    def scale(self, i, p, group):
        return getattr(HERE, "scale", {}).get(i, 1.0)

    def before(self, turn, ps):
        if turn == 2:
            HERE.scale = {9: 2.0}


class Environment(Trap):
    def scale(self, i, p, group):
        return float(os.environ.get(f"TRAP_RATE_{i}", "1"))

    def before(self, turn, ps):
        os.environ.pop("TRAP_RATE_9", None)
        if turn == 2:
            os.environ["TRAP_RATE_9"] = "2"


@functools.lru_cache
def cached(n):
    """What the table said when it was first asked."""
    return TABLE[n]


class Cached(Trap):
    def scale(self, i, p, group):
        return cached(i)

    def before(self, turn, ps):
        if turn == 2:
            TABLE[9] = 2.0
            cached.cache_clear()


class CachedBeforehand(Trap):
    """The cache has one lane's number from an earlier table."""

    def scale(self, i, p, group):
        return cached(i)

    def ready(self, ps):
        cached.cache_clear()
        TABLE[9] = 3.0
        cached(9)
        TABLE[9] = 1.0


class CachedProperty(Trap):
    @functools.cached_property
    def table(self):
        return [1.0] * 16

    def scale(self, i, p, group):
        return self.table[i]

    def before(self, turn, ps):
        if turn == 2:
            self.table[9] = 2.0
        if turn == 3:
            del self.table


class ByShape(Trap):
    def ready(self, ps):
        self.table = set()

    def scale(self, i, p, group):
        return 2.0 if p.shape in self.table else 1.0

    def before(self, turn, ps):
        if turn == 2:
            self.table.add(torch.Size([5]))


class ByDimension(Trap):
    def ready(self, ps):
        self.table = {1: 1.0, 2: 1.0}

    def scale(self, i, p, group):
        return self.table[p.ndim]

    def before(self, turn, ps):
        if turn == 2:
            self.table[1] = 2.0


class BySize(Trap):
    def scale(self, i, p, group):
        return 2.0 if p.numel() > LIMIT else 1.0

    def before(self, turn, ps):
        global LIMIT
        LIMIT = 6 if turn == 2 else 2 if turn == 3 else 1000


class BySizeOfManyShapes(BySize):
    """Lanes of other sizes may lead each other."""

    shapes = ((3,), (5,), (9,), (4, 2))


class ByDtype(Trap):
    def ready(self, ps):
        self.table = {torch.float32: 1.0}

    def scale(self, i, p, group):
        return self.table.get(p.dtype, 1.0)

    def before(self, turn, ps):
        if turn == 2:
            self.table[torch.float32] = 2.0


class ByFormattedName(Trap):
    def scale(self, i, p, group):
        return getattr(self, "scale_%02d" % i, 1.0)  # noqa: UP031

    def before(self, turn, ps):
        if turn == 2:
            self.scale_09 = 2.0


class ByItsOwnDict(ByFormattedName):
    def scale(self, i, p, group):
        return vars(self).get(f"scale_{i:02}", 1.0)


class ByParityOfAName(Trap):
    def scale(self, i, p, group):
        return BY_NAME["odd" if i % 2 else "even"]

    def before(self, turn, ps):
        if turn == 2:
            BY_NAME["odd"] = 2.0


class Named(Trap):
    """torch's own names of parameters."""

    def groups(self, ps):
        return [(f"layers.{n}.weight", p) for n, p in enumerate(ps)]

    def scale(self, i, p, group):
        return 2.0 if group["param_names"][i].endswith("bias") else 1.0

    def before(self, turn, ps):
        if turn == 2:
            self.param_groups[0]["param_names"][9] = "layers.9.bias"


class InTheGroup(Trap):
    def ready(self, ps):
        self.param_groups[0]["scales"] = [1.0] * 16

    def scale(self, i, p, group):
        return group["scales"][i]

    def before(self, turn, ps):
        if turn == 2:
            self.param_groups[0]["scales"][9] = 2.0


class InAnotherGroup(Trap):
    def groups(self, ps):
        return [{"params": ps[:12]}, {"params": ps[12:], "scales": {}}]

    def scale(self, i, p, group):
        return self.param_groups[1]["scales"].get(i, 1.0)

    def before(self, turn, ps):
        if turn == 2:
            self.param_groups[1]["scales"][9] = 2.0


class InTheDefaults(Trap):
    def scale(self, i, p, group):
        return self.defaults.get(i, 1.0)

    def before(self, turn, ps):
        if turn == 2:
            self.defaults[9] = 2.0


class InTheState(Trap):
    """A table under a key of the state that is no parameter."""

    def ready(self, ps):
        self.state["table"] = {}

    def scale(self, i, p, group):
        return self.state["table"].get(i, 1.0)

    def before(self, turn, ps):
        if turn == 2:
            self.state["table"][9] = 2.0


class Missing(dict):
    """A dict that makes up what it lacks."""

    def __missing__(self, n):
        return 1.0


class MadeUp(Trap):
    def ready(self, ps):
        self.table = Missing()

    def scale(self, i, p, group):
        return self.table[i]

    def before(self, turn, ps):
        if turn == 2:
            self.table[9] = 2.0


class Chained(MadeUp):
    def ready(self, ps):
        self.first = {}
        self.table = collections.ChainMap(self.first, dict.fromkeys(range(16), 1.0))

    def before(self, turn, ps):
        if turn == 2:
            self.first[9] = 2.0


class Proxy(MadeUp):
    def ready(self, ps):
        self.first = dict.fromkeys(range(16), 1.0)
        self.table = types.MappingProxyType(self.first)

    def before(self, turn, ps):
        if turn == 2:
            self.first[9] = 2.0


class KeyErrors(Trap):
    def ready(self, ps):
        self.table = {}

    def scale(self, i, p, group):
        try:
            return self.table[i]
        except KeyError:
            return 1.0

    def before(self, turn, ps):
        if turn == 2:
            self.table[9] = 2.0


class OrderOfADict(Trap):
    def ready(self, ps):
        self.order = collections.OrderedDict((n, None) for n in range(16))

    def scale(self, i, p, group):
        return 2.0 if next(iter(self.order)) == i else 1.0

    def before(self, turn, ps):
        if turn == 2:
            self.order.move_to_end(9, last=False)


class PlaceInADict(Trap):
    def ready(self, ps):
        self.order = dict.fromkeys(range(16))

    def scale(self, i, p, group):
        return 1.0 + (list(self.order).index(i) > i)

    def before(self, turn, ps):
        if turn == 2:
            del self.order[8]
            self.order[8] = None


class OfTensors(Trap):
    def ready(self, ps):
        self.rates = torch.ones(16)

    def lane(self, i, p, group):
        p.sub_(p.grad * self.rates[i])

    def before(self, turn, ps):
        if turn == 2:
            self.rates[9] = 2.0


class OfTensorsAsNumbers(OfTensors):
    def lane(self, i, p, group):
        p.sub_(p.grad, alpha=self.rates.tolist()[i])


class OneTensorEach(Trap):
    """A list of tensors beside the parameters; one of them is another's later."""

    def ready(self, ps):
        self.masks = [torch.ones_like(p.detach()) for p in ps]

    def lane(self, i, p, group):
        p.sub_(p.grad * self.masks[i])

    def before(self, turn, ps):
        if turn == 2:
            self.masks[9] = self.masks[11] * 0.5
        if turn == 3:
            self.masks[8].mul_(0.25)


class Zipped(Trap):
    """Lanes end where the shorter list does."""

    def ready(self, ps):
        self.scales = [1.0] * 16

    @torch.no_grad()
    def step(self, closure=None):
        for p, scale in zip(self.param_groups[0]["params"], self.scales, strict=False):
            p.sub_(p.grad, alpha=scale * 0.1)

    def before(self, turn, ps):
        if turn == 2:
            self.scales.pop()


class Sliced(Trap):
    def ready(self, ps):
        self.table = [0.0] * 16

    def scale(self, i, p, group):
        return 1.0 + sum(self.table[:i])

    def before(self, turn, ps):
        if turn == 2:
            self.table[9] = 0.5


class Sorted(Trap):
    """Who comes last is doubled; the key is a table that changes."""

    def ready(self, ps):
        self.keys = list(range(16))

    @torch.no_grad()
    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        order = sorted(range(16), key=self.keys.__getitem__)
        for n in order:
            params[n].sub_(params[n].grad, alpha=0.2 if n == order[-1] else 0.1)

    def before(self, turn, ps):
        if turn == 2:
            self.keys[9] = 99


class Matched(Trap):
    def ready(self, ps):
        self.kinds = ["plain"] * 16

    def scale(self, i, p, group):
        match self.kinds[i]:
            case "plain":
                return 1.0
            case other:
                return float(len(other))

    def before(self, turn, ps):
        if turn == 2:
            self.kinds[9] = "odd"

"""Tables that hold keys weakly, and keys with a hash or a comparison of their own."""

from __future__ import annotations

import weakref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from tests.cases.base import Once, Scenario


class Numbers(Scenario):
    """Parameters of one number, which Python can compare."""

    @classmethod
    def params(cls, lanes):
        numbers = torch.randn(lanes, generator=torch.Generator().manual_seed(0))
        return [torch.nn.Parameter(x.clone()) for x in numbers]


class WeakKeys(Numbers):
    """A step keeps a number of each parameter in a table of weak keys."""

    def ready(self, ps):
        self.table = weakref.WeakKeyDictionary()

    def scale(self, p, group):
        self.table[p] = self.table.get(p, 300) + 1
        return 1 / self.table[p]

    def after(self):
        return [self.table.get(p) for p in self.param_groups[0]["params"]]


class WeakKeysRead(WeakKeys):
    """The user fills it, and changes it between steps."""

    def ready(self, ps):
        self.table = weakref.WeakKeyDictionary({p: 300 + k for k, p in enumerate(ps)})

    def scale(self, p, group):
        return 1 / self.table[p]

    def before(self, turn, ps):
        self.table[ps[turn]] += 1


class WeakKeysOfTensors(WeakKeys):
    def ready(self, ps):
        self.table = weakref.WeakKeyDictionary()

    def scale(self, p, group):
        if p not in self.table:
            self.table[p] = torch.zeros_like(p)
        self.table[p].add_(p.grad)
        return float(1 + len(self.table))

    def after(self):
        return [self.table.get(p) for p in self.param_groups[0]["params"]]


class WeakIdentities(Scenario):
    """torch's table of weak keys, which asks which object a tensor is."""

    def ready(self, ps):
        self.table = WeakIdKeyDictionary()

    def scale(self, p, group):
        self.table[p] = self.table.get(p, 300) + 1
        return 1 / self.table[p]

    def after(self):
        return [self.table.get(p) for p in self.param_groups[0]["params"]]


class WeakValues(Scenario):
    """A step finds tensors of state by name, in a table of weak values."""

    def ready(self, ps):
        self.table = weakref.WeakValueDictionary()

    def scale(self, p, group):
        state = self.state[p]
        if not state:
            state["sum"] = torch.zeros_like(p)
            self.table[len(self.table)] = state["sum"]
        state["sum"].add_(p.grad)
        return float(1 + len(self.table))


class WeakValuesRead(Scenario):
    def ready(self, ps):
        self.kept = [torch.full((), 300.0 + k) for k in range(len(ps))]
        self.table = weakref.WeakValueDictionary(enumerate(self.kept))

    def scale(self, p, group):
        return 1.0 + len(self.table)

    def before(self, turn, ps):
        if turn % 2:
            self.kept.pop()


class WeakSet(Numbers):
    def ready(self, ps):
        self.seen = weakref.WeakSet(ps[:2])

    def scale(self, p, group):
        return 1.0 + len(self.seen)

    def before(self, turn, ps):
        self.seen.add(ps[turn])


class WeakSetWritten(Numbers):
    def ready(self, ps):
        self.seen = weakref.WeakSet()

    def scale(self, p, group):
        first = p not in self.seen
        self.seen.add(p)
        return 1.0 + first

    def after(self):
        return len(self.seen)


class WeakReference(Once):
    """What a weak reference leads to ends between two steps."""

    def ready(self, ps):
        self.number = torch.full((), 300.0)
        self.ref = weakref.ref(self.number)

    def once(self):
        x = self.ref()
        return 1.0 if x is None else 2.0

    def before(self, turn, ps):
        if turn == 3:
            self.number = None


class Key:
    """Counts how often it was hashed and compared."""

    def __init__(self, name, opt):
        self.name, self.opt = name, opt

    def __repr__(self):
        return self.name

    def __hash__(self):
        self.opt.hashed += 1
        return hash(self.name)

    def __eq__(self, other):
        self.opt.compared += 1
        return isinstance(other, Key) and self.name == other.name


class OwnHash(Once):
    hashed = compared = 0

    def ready(self, ps):
        self.key = Key("a", self)
        self.table = {self.key: 300}

    def once(self):
        return self.table[self.key] / (300 + self.hashed)

    def after(self):
        return self.hashed, self.compared


class OwnHashWritten(OwnHash):
    def once(self):
        self.table[self.key] += 1
        return self.table[self.key] / 300


class OwnEquality(OwnHash):
    def once(self):
        return self.table[Key("a", self)] / (300 + self.compared)


class OwnEqualityInList(OwnHash):
    def once(self):
        return 1.0 + (self.key in [Key("b", self), Key("a", self)]) + self.compared


class OwnEqualityAsked(OwnHash):
    def once(self):
        return 1.0 + (self.key == Key("a", self)) + self.compared


class OwnHashAsked(OwnHash):
    def once(self):
        return 1.0 + (hash(self.key) == hash("a")) + self.hashed


class OwnHashInSet(OwnHash):
    def once(self):
        return 1.0 + len({self.key, Key("a", self)}) + self.hashed


class OwnHashInState(Scenario):
    hashed = compared = 0

    def ready(self, ps):
        self.key = Key("a", self)

    def scale(self, p, group):
        state = self.state[p]
        state[self.key] = state.get(self.key, 300) + 1
        return 1 / state[self.key]

    def after(self):
        return self.hashed > 0, self.compared > 0


class OwnHashInGroup(OwnHash):
    def ready(self, ps):
        super().ready(ps)
        self.param_groups[0][self.key] = 300

    def once(self):
        return self.param_groups[0][self.key] / (300 + self.hashed)


class OwnHashOfValue(OwnHash):
    """The object is a value alone: nothing hashes it."""

    def ready(self, ps):
        self.key = Key("abc", self)
        self.param_groups[0]["key"] = self.key
        for p in ps:
            self.state[p]["key"] = self.key

    def once(self):
        group = self.param_groups[0]
        name = self.state[group["params"][0]]["key"].name
        return 1.0 / (len(group["key"].name) + len(name) + len(self.key.name))


class Ordered(Key):
    def __lt__(self, other):
        self.opt.compared += 1
        return self.name < other.name


class OwnOrder(OwnHash):
    def once(self):
        first = min(Ordered("b", self), Ordered("a", self))
        return 300 / (300 + self.compared + (first.name == "a"))


class OwnOrderSorted(OwnHash):
    def once(self):
        every = sorted([Ordered(x, self) for x in "cab"])
        return 300 / (300 + self.compared + (every[0].name == "a"))


class OwnTruth(OwnHash):
    def once(self):
        key = Truth("a", self)
        return 2.0 if key else 1.0 + self.compared


class Truth(Key):
    def __bool__(self):
        self.opt.compared += 1
        return self.opt.compared > 2


class OwnLength(OwnHash):
    def once(self):
        return 1.0 + len(Long("a", self)) + self.compared


class Long(Key):
    def __len__(self):
        self.opt.compared += 1
        return 3

"""What a step uses up: counters, iterators, generators, files. Each is used once."""

from __future__ import annotations

import collections
import functools
import io
import itertools
import queue
import random

import numpy as np
import torch

from tests.cases.base import Once, Scenario


class FactoryCounts(Scenario):
    def ready(self, ps):
        self.rates = collections.defaultdict(itertools.count(1).__next__)

    def scale(self, p, group):
        return 1.0 / self.rates[p.ndim]


class CountOfSteps(Once):
    def ready(self, ps):
        self.next_rate = itertools.count(1).__next__

    def once(self):
        return 1.0 / self.next_rate()


class PopsLeft(Once):
    def ready(self, ps):
        self.pop = collections.deque([1.0 / k for k in range(1, 2000)]).popleft

    def once(self):
        return self.pop()


class PopsRight(Once):
    def ready(self, ps):
        self.pop = [1.0 / k for k in range(1, 2000)].pop

    def once(self):
        return self.pop()


def gen():
    k = 0
    while True:
        k += 1
        yield (1.0 / k)


class NextOfGenerator(Once):
    def ready(self, ps):
        self.g = gen()

    def once(self):
        return next(self.g)


class BoundNext(Once):
    def ready(self, ps):
        self.g = gen().__next__

    def once(self):
        return self.g()


class RandomObject(Once):
    def ready(self, ps):
        self.rng = random.Random(3)

    def once(self):
        return self.rng.random()


class BoundRandom(Once):
    def ready(self, ps):
        self.draw = random.Random(3).random

    def once(self):
        return self.draw()


class NumpyGenerator(Once):
    def ready(self, ps):
        self.rng = np.random.default_rng(3)

    def once(self):
        return float(self.rng.random())


class TorchGenerator(Scenario):
    def ready(self, ps):
        self.gen = torch.Generator().manual_seed(3)

    @torch.no_grad()
    def step(self, closure=None):
        r = torch.rand((), generator=self.gen)
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * r, alpha=group["lr"])


class LogOfLanes(Scenario):
    def ready(self, ps):
        self.log = []

    def scale(self, p, group):
        self.log.append(p.ndim)
        return 1.0 / len(self.log)


class NonlocalCounter(Once):
    def ready(self, ps):
        n = 0

        def count():
            nonlocal n
            n += 1
            return n

        self.count = count

    def once(self):
        return 1.0 / self.count()


class BoxedCounter(Once):
    def ready(self, ps):
        box = {"n": 0}

        def count():
            box["n"] += 1
            return box["n"]

        self.count = count

    def once(self):
        return 1.0 / self.count()


class PartialOfList(Once):
    def ready(self, ps):

        def count(x, seen):
            seen.append(x)
            return len(seen)

        self.count = functools.partial(count, 3, [])

    def once(self):
        return 1.0 / self.count()


class CachedCount(Once):
    def ready(self, ps):
        c = itertools.count(1)
        self.f = functools.lru_cache(None)(lambda k: next(c))
        self.k = 0

    def once(self):
        self.k += 1
        return 1.0 / self.f(self.k)


class Desc:
    def __set_name__(self, owner, name):
        self.n = 0

    def __get__(self, o, t):
        self.n += 1
        return 1.0 / self.n


class CountingDescriptor(Once):
    rate = Desc()

    def once(self):
        return self.rate


class PropertyOfLanes(Scenario):
    def ready(self, ps):
        self.n = 0

    @property
    def rate(self):
        self.n += 1
        return 1.0 / self.n

    def scale(self, p, group):
        return self.rate


class PropertyOfSteps(Once):
    def ready(self, ps):
        self.n = 0

    @property
    def rate(self):
        self.n += 1
        return 1.0 / self.n

    def once(self):
        return self.rate


class Sched:
    def __init__(self):
        self.n = 0

    def __call__(self):
        self.n += 1
        return 1.0 / self.n


class CallableSchedule(Once):
    def ready(self, ps):
        self.sched = Sched()

    def once(self):
        return self.sched()


class BoundCall(Once):
    def ready(self, ps):
        self.sched = Sched().__call__

    def once(self):
        return self.sched()


class Cfg:
    def __init__(self):
        self.n = 0
        self.lr = 0.5

    @property
    def rate(self):
        self.n += 1
        return 1.0 / self.n


class PropertyOfAnObject(Once):
    def ready(self, ps):
        self.cfg = Cfg()

    def once(self):
        return self.cfg.rate


class ZippedRates(Scenario):
    def ready(self, ps):
        self.it = iter([1.0 / k for k in range(1, 3000)])

    @torch.no_grad()
    def step(self, closure=None):
        for group, r in zip(self.param_groups, self.it, strict=False):
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] * r)


class MappedRates(Once):
    def ready(self, ps):
        self.it = map(float, range(1, 3000))

    def once(self):
        return 1.0 / next(self.it, 1.0)


class MissingKeys(Once):
    class D(dict):
        def __missing__(self, k):
            self[k] = len(self) + 1
            return self[k]

    def ready(self, ps):
        self.d = self.D()
        self.t = 0

    def once(self):
        self.t += 1
        return 1.0 / self.d[self.t]


class FactoryOfTexts(Once):
    def ready(self, ps):
        self.d = collections.defaultdict(itertools.count(1).__next__)
        self.t = 0

    def once(self):
        self.t += 1
        return 1.0 / self.d[f"k{self.t}"]


class StateFactory(Scenario):
    def ready(self, ps):
        c = itertools.count(1)
        self.state = collections.defaultdict(lambda: {"k": float(next(c))})

    def scale(self, p, group):
        return 1.0 / self.state[p]["k"]


class PopsFirst(Once):
    def ready(self, ps):
        self.stack = [float(k) for k in range(1, 2000)]

    def once(self):
        return 1.0 / self.stack.pop(0)


class ReadsLines(Once):
    def ready(self, ps):
        self.buf = io.StringIO("\n".join(str(k) for k in range(1, 2000)))

    def once(self):
        return 1.0 / float(self.buf.readline())


class BoundReadline(Once):
    def ready(self, ps):
        self.read = io.StringIO("\n".join(str(k) for k in range(1, 2000))).readline

    def once(self):
        return 1.0 / float(self.read())


class TakesFromQueue(Once):
    def ready(self, ps):
        self.q = queue.SimpleQueue()
        [self.q.put(float(k)) for k in range(1, 2000)]

    def once(self):
        return 1.0 / self.q.get()


class CyclesRates(Once):
    def ready(self, ps):
        self.it = itertools.cycle([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])

    def once(self):
        return 1.0 / next(self.it)


class CountOfGroups(Scenario):
    def ready(self, ps):
        self.it = itertools.count(1)
        self.t = 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["no"] = next(self.it)
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / group["no"])


class FactoryOfPairs(Scenario):
    def ready(self, ps):
        self.rates = collections.defaultdict(itertools.count(1).__next__)
        (self.rates[1], self.rates[2])

    def scale(self, p, group):
        return 1.0 / self.rates[p.ndim, group["lr"]]


class HookCounts(Once):
    def ready(self, ps):
        self.cb = []
        self.hook = lambda: self.cb.append(1) or len(self.cb)

    def once(self):
        return 1.0 / self.hook()

"""What a step leaves behind on classes and in iterators, and objects that end in it."""

from __future__ import annotations

import itertools
import threading

import numpy as np

from tests.cases.base import Once, Scenario


class OfClass(Once):
    """A step counts on its class, and reads the count in some way."""

    count = 300

    def once(self):
        type(self).count += 1
        return 1 / self.count

    def after(self):
        return type(self).count

    @classmethod
    def undo(cls):
        cls.count = 300


class OfClassByName(OfClass):
    def once(self):
        OfClassByName.count += 1
        return 1 / self.count


class OfClassOnTheWay(OfClass):
    @classmethod
    def bump(cls):
        cls.count += 1

    def once(self):
        self.bump()
        return 1 / self.count


class OfClassSet(OfClass):
    def once(self):
        setattr(type(self), "count", 7)  # noqa: B010
        return 1 / self.count


class OfClassInEachLane(Scenario):
    count = 300

    def scale(self, p, group):
        type(self).count += 1
        return 1 / self.count

    @classmethod
    def undo(cls):
        cls.count = 300


class Basis:
    count = 300


class Derived(Basis):
    pass


class OfOtherClass(Once):
    """What derived classes and instances have of it, the step reads."""

    def once(self):
        Basis.count += 1
        return 1 / (Derived.count + Basis().count)


class KeptGenerator(Once):
    n = 300

    def once(self):
        self.rest = (self.n + k for k in range(3))
        self.n += 1
        return 1 / next(self.rest)


class KeptOfFunction(Once):
    def numbers(self):
        for k in range(300, 310):
            self.last = k
            yield k

    def once(self):
        self.rest = self.numbers()
        return 1 / next(self.rest)


class KeptInState(Scenario):
    def scale(self, p, group):
        state = self.state[p]
        if "rest" not in state:
            state["rest"] = (k for k in range(300, 310))
        return 1 / next(state["rest"])


class KeptOfList(Once):
    def once(self):
        self.numbers = [300, 301, 302]
        self.rest = iter(self.numbers)
        return 1 / next(self.rest)


class KeptEnumerate(Once):
    def once(self):
        self.rest = enumerate(range(300, 303), 5)
        return 1 / next(self.rest)[1]


class KeptReversed(Once):
    def once(self):
        self.rest = reversed([300, 301])
        return 1 / next(self.rest)


class KeptChain(Once):
    def once(self):
        self.rest = itertools.chain([300], [301])
        return 1 / next(self.rest)


class Ending:
    ended = 0

    def __del__(self):
        Ending.ended += 1


class Finalizer(Once):
    def once(self):
        x = Ending()
        del x
        return 1 / (1 + Ending.ended)

    def after(self):
        return Ending.ended


class ArrayOfState(Scenario):
    """An array in a state, of which a number is read: the step runs in eager."""

    def scale(self, p, group):
        state = self.state[p]
        if not state:
            state["a"] = np.zeros(3)
        state["a"][1] += 3
        return float(state["a"].sum())


class ArrayMadeAnew(Scenario):
    def scale(self, p, group):
        self.state[p]["a"] = np.full(2, 0.5)
        return float(self.state[p]["a"][0])


class Local(threading.local):
    k = 300


LOCAL = Local()


class OfThread(Once):
    """A step counts in an object of which each thread has another."""

    def once(self):
        LOCAL.k += 1
        return 1 / LOCAL.k

    def after(self):
        return LOCAL.k

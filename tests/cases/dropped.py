"""Generators that a step leaves before they end, and what they then do."""

from __future__ import annotations

import contextlib
import itertools

from tests.cases.base import Once, Scenario


class Left(Once):
    """A generator counts how far it came, and that it ended."""

    came = ended = 0

    def numbers(self):
        try:
            for k in range(300, 303):
                self.came += 1
                yield k
        finally:
            self.ended += 1

    def number(self):
        return next(self.numbers())

    def once(self):
        return self.number() / (1 + self.ended)

    def after(self):
        return self.came, self.ended


class LeftNotBegun(Left):
    def number(self):
        self.numbers()
        return 1.0


class LeftAtItsEnd(Left):
    def number(self):
        return sum(self.numbers())


class LeftByBreak(Left):
    def number(self):
        for k in self.numbers():
            if k == 301:
                break
        return k


class LeftByReturn(Left):
    def number(self):
        for k in self.numbers():
            if k == 301:
                return k
        return 1


class LeftByError(Left):
    def number(self):
        try:
            for k in self.numbers():
                if k == 301:
                    raise ValueError
        except ValueError:
            return 300
        return 1


class LeftByAny(Left):
    def number(self):
        return 1.0 + any(k > 300 for k in self.numbers())


class LeftByAll(Left):
    def number(self):
        return 1.0 + all(k < 301 for k in self.numbers())


class LeftBySearch(Left):
    def number(self):
        return 1.0 + (301 in self.numbers())


class LeftByZip(Left):
    def number(self):
        return sum(k * n for n, k in zip((1, 2), self.numbers(), strict=False))


class LeftByZipFirst(Left):
    def number(self):
        return sum(k * n for k, n in zip(self.numbers(), (1, 2), strict=False))


class LeftBySlice(Left):
    def number(self):
        return sum(itertools.islice(self.numbers(), 2))


class LeftByMap(Left):
    def number(self):
        return next(map(float, self.numbers()))


class LeftByFilter(Left):
    def number(self):
        return next(filter(lambda k: k > 300, self.numbers()))


class LeftByEnumerate(Left):
    def number(self):
        return next(enumerate(self.numbers(), 1))[1]


class LeftByChain(Left):
    def number(self):
        return next(itertools.chain(self.numbers(), self.numbers()))


class LeftByTakeWhile(Left):
    def number(self):
        return sum(itertools.takewhile(lambda k: k < 302, self.numbers()))


class LeftClosed(Left):
    def number(self):
        every = self.numbers()
        first = next(every)
        every.close()
        return first


class LeftByClosing(Left):
    def number(self):
        with contextlib.closing(self.numbers()) as every:
            return next(every)


class LeftInPair(Left):
    def number(self):
        (first, *rest) = self.numbers()
        return first + len(rest)


class LeftWithin(Left):
    def outer(self):
        yield from self.numbers()

    def number(self):
        return next(self.outer())


class LeftInContext(Left):
    """A context that a generator enters is left with it."""

    @contextlib.contextmanager
    def counted(self):
        self.came += 1
        try:
            yield 300
        finally:
            self.ended += 1

    def numbers(self):
        with self.counted() as n:
            yield n
            yield n + 1


class LeftWithoutHandler(Left):
    """What comes after the place where it was left is not run."""

    def numbers(self):
        self.came += 1
        yield 300
        self.came += 1
        yield 301
        self.ended += 1


class LeftInEachLane(Scenario):
    ended = 0

    def numbers(self):
        try:
            yield 2.0
            yield 3.0
        finally:
            self.ended += 1

    def scale(self, p, group):
        return next(self.numbers())

    def after(self):
        return self.ended


class LeftForEachLane(Scenario):
    """The parameters themselves come of one that is left."""

    ended = 0

    def every(self):
        try:
            for group in self.param_groups:
                for p in group["params"]:
                    yield p, group
        finally:
            self.ended += 1

    def step(self, closure=None):
        for k, (p, group) in enumerate(self.every()):
            if k == 3:
                break
            p.data.add_(p.grad, alpha=-group["lr"])

    def after(self):
        return self.ended

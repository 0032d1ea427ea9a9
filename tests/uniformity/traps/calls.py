"""What is called for a lane: descriptors, metaclasses, code that is replaced."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from tests.uniformity.traps.base import Momentum, Trap


class Descriptor:
    """An attribute whose value is another's."""

    def __get__(self, owner: Any, kind: Any) -> Any:
        return getattr(owner, "hidden", [1.0] * 16)


class ByDescriptor(Trap):
    table = Descriptor()

    def scale(self, i, p, group):
        return self.table[i]

    def before(self, turn, ps):
        if turn == 2:
            self.hidden = [1.0] * 9 + [2.0] * 7


class ByProperty(Trap):
    @property
    def now(self):
        return self.tables[-1]

    def ready(self, ps):
        self.tables = [[1.0] * 16]

    def scale(self, i, p, group):
        return self.now[i]

    def before(self, turn, ps):
        if turn == 2:
            self.tables.append([1.0] * 9 + [2.0] * 7)


class ByGetattr(Trap):
    """Names that nobody gave."""

    def __getattr__(self, name):
        if name.startswith("scale_"):
            return self.__dict__.get("made", {}).get(name, 1.0)
        raise AttributeError(name)

    def scale(self, i, p, group):
        return getattr(self, f"scale_{i}")

    def before(self, turn, ps):
        if turn == 2:
            self.made = {"scale_9": 2.0}


class ByGetattribute(Trap):
    def __getattribute__(self, name):
        if name == "rate":
            return object.__getattribute__(self, "rates").pop()
        return object.__getattribute__(self, name)

    def ready(self, ps):
        self.rates = [1.0 + n for n in range(100)]

    def scale(self, i, p, group):
        return self.rate


class Meta(type):
    """A class of classes with a table of its own."""

    table: ClassVar[Any] = {}

    @property
    def tables(cls) -> Any:
        return Meta.table


class ByMetaclass(Trap, metaclass=Meta):
    def scale(self, i, p, group):
        return type(self).tables.get(i, 1.0)

    def before(self, turn, ps):
        if turn == 2:
            Meta.table = {9: 2.0}


class MethodReplaced(Trap):
    def before(self, turn, ps):
        if turn == 2:
            type(self).scale = lambda self, i, p, group: 1.0 + i


class MethodOfTheObject(Trap):
    def before(self, turn, ps):
        if turn == 2:
            self.scale = lambda i, p, group: 1.0 + i


class CodeReplaced(Trap):
    def before(self, turn, ps):
        if turn == 2:
            made = compile("def f(self, i, p, group): return 1.0 + i", "none", "exec")
            found: Any = {}
            exec(made, found)
            type(self).scale = found["f"]


class ClassOfTheObject(Trap):
    """The optimizer becomes another one."""

    def before(self, turn, ps):
        if turn == 2:
            self.__class__ = ClassOfTheObjectLater


class ClassOfTheObjectLater(ClassOfTheObject):
    def scale(self, i, p, group):
        return 1.0 + i


class WithoutSource(Trap):
    """Code that no file has."""

    def ready(self, ps):
        self.odd = -1
        self.rule = eval("lambda i, odd: 2.0 if i == odd else 1.0")

    def scale(self, i, p, group):
        return self.rule(i, self.odd)

    def before(self, turn, ps):
        if turn == 2:
            self.odd = 9


class RulesInAList(Trap):
    def ready(self, ps):
        self.rules = [self.one] * 16

    def one(self, group):
        return 1.0

    def two(self, group):
        return 2.0

    def scale(self, i, p, group):
        return self.rules[i](group)

    def before(self, turn, ps):
        if turn == 2:
            self.rules[9] = self.two


class RulesByName(Trap):
    def ready(self, ps):
        self.rules = ["one"] * 16

    def one(self):
        return 1.0

    def two(self):
        return 2.0

    def scale(self, i, p, group):
        return getattr(self, self.rules[i])()

    def before(self, turn, ps):
        if turn == 2:
            self.rules[9] = "two"


class RuleOfTheGroup(Trap):
    """A function among the hyperparameters."""

    def ready(self, ps):
        self.odd = {}
        self.param_groups[0]["rule"] = lambda n: self.odd.get(n, 1.0)

    def scale(self, i, p, group):
        return group["rule"](i)

    def before(self, turn, ps):
        if turn == 2:
            self.odd[9] = 2.0


def doubled(method):
    """A decorator that keeps a table."""

    @functools.wraps(method)
    def inner(self, i, p, group):
        return method(self, i, p, group) * inner.table.get(i, 1.0)

    inner.table = {}
    return inner


class Decorated(Trap):
    @doubled
    def scale(self, i, p, group):
        return 1.0

    def before(self, turn, ps):
        if turn == 2:
            type(self).scale.table[9] = 2.0


class Number(float):
    """A float that multiplies in its own way."""

    def __rmul__(self, other):
        return float(other) * float(self) * Number.factor

    factor = 1.0


class OwnNumbers(Trap):
    def ready(self, ps):
        self.rates = [1.0] * 16
        self.rates[9] = Number(1.0)

    def scale(self, i, p, group):
        return self.rates[i]

    def before(self, turn, ps):
        if turn == 2:
            Number.factor = 3.0


class Contains:
    """`in` asks it, and it remembers."""

    def __init__(self) -> None:
        self.asked = 0

    def __contains__(self, n: int) -> bool:
        self.asked += 1
        return self.asked > 40


class OwnContainer(Trap):
    def ready(self, ps):
        self.slow = Contains()

    def scale(self, i, p, group):
        return 0.5 if i in self.slow else 1.0


class Managed(Trap):
    """A context manager for each lane that counts."""

    def ready(self, ps):
        self.entered = []

    def __enter__(self):
        self.entered.append(1)
        return len(self.entered)

    def __exit__(self, *error):
        return None

    def lane(self, i, p, group):
        with self as n:
            p.sub_(p.grad, alpha=0.1 / n)


class Finally(Trap):
    """A lane is left by an exception, and the next one knows."""

    def ready(self, ps):
        self.stop = -1

    @torch.no_grad()
    def step(self, closure=None):
        failed = 0
        for i, p in enumerate(self.param_groups[0]["params"]):
            try:
                if i == self.stop:
                    raise ValueError(i)
                p.sub_(p.grad, alpha=0.1 * (1 + failed))
            except ValueError:
                failed += 1

    def before(self, turn, ps):
        if turn == 2:
            self.stop = 9


class Stops(Trap):
    """The loop ends early, from the third step on."""

    def ready(self, ps):
        self.last = 16

    @torch.no_grad()
    def step(self, closure=None):
        for i, p in enumerate(self.param_groups[0]["params"]):
            if i >= self.last:
                break
            p.sub_(p.grad, alpha=0.1)

    def before(self, turn, ps):
        if turn == 2:
            self.last = 10


class Neighbours(Trap):
    """The gradient of another lane, by a table of places."""

    def ready(self, ps):
        self.other = list(range(16))

    @torch.no_grad()
    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        for i, p in enumerate(params):
            p.sub_(params[self.other[i]].grad)

    def before(self, turn, ps):
        if turn == 2:
            self.other[9] = 11


class NeighboursState(Momentum):
    def scale(self, i, p, group):
        other = group["params"][i - self.far]
        return 1.0 / self.state[other]["n"]

    far = 0

    def before(self, turn, ps):
        if turn == 2:
            type(self).far = 2
            self.state[ps[7]]["n"] = 9


class Foreach(Trap):
    """Lists, one of whose numbers differs later."""

    def ready(self, ps):
        self.rates = [-0.1] * 16

    @torch.no_grad()
    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        grads = torch._foreach_mul([p.grad for p in params], self.rates)
        torch._foreach_add_(params, grads)

    def before(self, turn, ps):
        if turn == 2:
            self.rates[9] = 0.5


class ForeachOfSome(Foreach):
    """Which lanes are in the list is the optimizer's to say."""

    def ready(self, ps):
        self.some = set(range(16))

    @torch.no_grad()
    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        params = [p for i, p in enumerate(params) if i in self.some]
        torch._foreach_add_(params, [p.grad for p in params], alpha=-0.1)

    def before(self, turn, ps):
        if turn == 2:
            self.some.discard(9)


class ForeachShifted(Foreach):
    """Gradients beside other parameters of the same shape."""

    shift = 0

    @torch.no_grad()
    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        grads = [p.grad for p in params]
        grads = grads[self.shift :] + grads[: self.shift]
        torch._foreach_add_(params, grads, alpha=-0.1)

    def before(self, turn, ps):
        if turn == 2:
            type(self).shift = 2


class Lookahead(Optimizer):
    """A wrapper that shares the groups and the state of another optimizer."""

    shapes: Any = ((3, 4), (5,))
    turns = 5
    params = Trap.params
    lanes = 16

    def __init__(self, ps: Any) -> None:
        self.base = torch.optim.SGD(ps, lr=0.1, momentum=0.9)
        super().__init__(self.base.param_groups, self.base.defaults)
        self.param_groups = self.base.param_groups
        self.state = self.base.state
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        self.calls += 1
        if self.calls % 2 == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.5)

    def before(self, turn: int, ps: list[Any]) -> None:
        if turn == 2:
            self.base.state[ps[9]]["momentum_buffer"].fill_(1.0)

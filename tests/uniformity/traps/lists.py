"""Code that an analysis may take for uniform: lists of lanes, exceptions, metadata."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch

from tests.uniformity.traps.base import Momentum, Trap, fill


class Lists(Trap):
    """All lanes' gradients in a list; a trap combines them with parameters."""

    def pairs(self, params: list[Any], grads: list[Any]) -> Any:
        return zip(params, grads, strict=False)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params]
            for p, g in self.pairs(params, grads):
                p.sub_(g, alpha=group["lr"])


class OneShape(Lists):
    """Any two lanes fit."""

    shapes = ((3, 4),)


class Reversed(OneShape):
    def pairs(self, params, grads):
        return zip(params, reversed(grads), strict=True)


class ReversedBySlice(OneShape):
    def pairs(self, params, grads):
        return zip(params, grads[::-1], strict=True)


class Shifted(OneShape):
    def pairs(self, params, grads):
        return zip(params, grads[1:], strict=False)


class Halves(OneShape):
    def pairs(self, params, grads):
        return zip(params[::2], grads[1::2], strict=True)


class InsertedInFront(OneShape):
    def pairs(self, params, grads):
        other: list[Any] = []
        for g in grads:
            other.insert(0, g)
        return zip(params, other, strict=True)


class Popped(OneShape):
    def pairs(self, params, grads):
        return [(p, grads.pop()) for p in params]


class PoppedInFront(OneShape):
    def pairs(self, params, grads):
        grads.pop(0)
        return zip(params, grads, strict=False)


class Iterated(OneShape):
    def pairs(self, params, grads):
        it = iter(grads)
        next(it)
        return zip(params, it, strict=False)


class SortedByNumbers(OneShape):
    def pairs(self, params, grads):
        grads.sort(key=lambda g: g.numel())
        grads.reverse()
        return zip(params, grads, strict=True)


class Pairwise(OneShape):
    def pairs(self, params, grads):
        return [
            (p, g) for p, (_, g) in zip(params, itertools.pairwise(grads), strict=False)
        ]


class Rotated(OneShape):
    def pairs(self, params, grads):
        return zip(params, grads[self.by :] + grads[: self.by], strict=True)

    by = 0

    def before(self, turn, ps):
        if turn == 2:
            type(self).by = 3


class Looked(OneShape):
    """A dict of all lanes, asked by another's key."""

    def pairs(self, params, grads):
        known = dict(zip(params, grads, strict=True))
        return [(p, known[params[0]]) for p in params]


class Reduced(OneShape):
    def pairs(self, params, grads):
        total = functools.reduce(lambda a, b: a * 0 + b, grads)
        return [(p, total) for p in params]


class Starred(OneShape):
    def pairs(self, params, grads):
        first, *rest = grads
        return zip(params, [*rest, first], strict=True)


class Accumulated(OneShape):
    """Through a name of the function around."""

    def pairs(self, params, grads):
        total: Any = 0

        def add(g):
            nonlocal total
            total = total + g
            return total

        return [(p, add(g)) for p, g in zip(params, grads, strict=True)]


class Leaked(OneShape):
    """The name of a loop that has ended."""

    def pairs(self, params, grads):
        for g in grads:
            last = g
        return [(p, last) for p in params]


class Some(Momentum):
    """Lists to which only some lanes add, and then all go together."""

    shapes = ((5,),)

    @torch.no_grad()
    def step(self, closure=None):
        params, moments = [], []
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            params.append(p)
            if "m" in state:
                moments.append(state["m"])
            state["n"] = state.get("n", 0) + 1
        for p, m in zip(params, moments, strict=False):
            p.sub_(m)
        for p in params:
            p.sub_(p.grad)

    def before(self, turn, ps):
        if turn == 1:
            for n in (1, 4, 5, 9):
                self.state[ps[n]]["m"] = fill(ps[n], float(n))


class UniformKeyError(Trap):
    """No lane is told apart; the table gets an entry that was missing."""

    def ready(self, ps):
        self.table = {}

    def scale(self, i, p, group):
        try:
            return self.table["all"]
        except KeyError:
            return 1.0

    def before(self, turn, ps):
        if turn == 2:
            self.table["all"] = 0.5


class UniformAttributeError(Trap):
    def scale(self, i, p, group):
        try:
            return self.boost
        except AttributeError:
            return 1.0

    def before(self, turn, ps):
        if turn == 2:
            self.boost = 0.5


class UniformAttributeOfTheClass(UniformAttributeError):
    def before(self, turn, ps):
        if turn == 2:
            type(self).boost = 0.5


class UniformHasattr(UniformAttributeOfTheClass):
    def scale(self, i, p, group):
        return self.boost if hasattr(self, "boost") else 1.0


class UniformGetattr(UniformAttributeOfTheClass):
    def scale(self, i, p, group):
        return getattr(self, "boost", 1.0)


class UniformIs(Trap):
    """Two attributes that become one object."""

    def ready(self, ps):
        self.a, self.b = [1], [1]

    def scale(self, i, p, group):
        return 0.5 if self.a is self.b else 1.0

    def before(self, turn, ps):
        if turn == 2:
            self.a = self.b


class UniformKeyOfTheGroup(Trap):
    def scale(self, i, p, group):
        try:
            return group["boost"]
        except KeyError:
            return 1.0

    def before(self, turn, ps):
        if turn == 2:
            self.param_groups[0]["boost"] = 0.5


class KeyErrorOfTheState(Momentum):
    def scale(self, i, p, group):
        try:
            return self.state[p]["boost"]
        except KeyError:
            return 1.0

    def before(self, turn, ps):
        if turn == 2:
            self.state[ps[9]]["boost"] = 0.5


class KeyErrorOfTheLeadsState(KeyErrorOfTheState):
    def before(self, turn, ps):
        if turn == 2:
            for p in ps:
                self.state[p]["boost"] = 0.5


class Tick(float):
    """A number that counts how often it was multiplied."""

    seen = 0

    def __mul__(self, other):
        Tick.seen += 1
        return float(self) * float(other) * (1 + (Tick.seen > 20))

    __rmul__ = __mul__


class CountingNumber(Trap):
    def ready(self, ps):
        self.param_groups[0]["rate"] = Tick(0.1)

    def lane(self, i, p, group):
        p.sub_(p.grad, alpha=group["rate"] * 1.0)


class Text(str):
    """A string that is never equal for long."""

    asked = 0

    def __eq__(self, other):
        Text.asked += 1
        return Text.asked % 20 != 0

    __hash__ = str.__hash__


class CountingText(Trap):
    def ready(self, ps):
        self.kind = Text("a")

    def scale(self, i, p, group):
        return 1.0 if self.kind == "a" else 2.0


SMALLEST = []


def min(a, b):
    """A function of the module under the name of a builtin."""
    SMALLEST.append(a)
    return a if len(SMALLEST) % 20 else b


class Shadowed(Trap):
    def scale(self, i, p, group):
        return min(1.0, 2.0)


class StateOfAll(Momentum):
    """A dict of the state that is no lane's, counted by all lanes."""

    def ready(self, ps):
        self.state["all"] = {"n": 0}

    def scale(self, i, p, group):
        own = self.state["all"]
        own["n"] += 1
        return 1.0 / own["n"]


class LayoutOfOne(Trap):
    """A parameter's memory, turned in place: the same object."""

    def lane(self, i, p, group):
        p.sub_(p.grad, alpha=0.1 if p.is_contiguous() else 0.3)

    def before(self, turn, ps):
        if turn == 2:
            ps[6].data = ps[6].data.t().contiguous().t()


class LayoutOfState(Momentum):
    def scale(self, i, p, group):
        return 1.0 if self.state[p]["m"].is_contiguous() else 3.0

    def before(self, turn, ps):
        if turn == 2:
            own = self.state[ps[6]]
            own["m"].data = own["m"].data.t().contiguous().t()


class DtypeOfState(Momentum):
    """In place as well; eager goes on."""

    def lane(self, i, p, group):
        super().lane(i, p, group)
        if self.state[p]["m"].dtype is torch.float64:
            p.mul_(0.5)

    def before(self, turn, ps):
        if turn == 2:
            own = self.state[ps[6]]
            own["m"].data = own["m"].data.double()


class ShapeOfState(Momentum):
    def lane(self, i, p, group):
        state = self.state[p]
        if "row" not in state:
            state["row"] = torch.zeros(1)
        state["row"].add_(1.0)
        p.sub_(state["row"].sum() * p.grad)

    def before(self, turn, ps):
        if turn == 2:
            self.state[ps[6]]["row"].data = torch.ones(3)


class StateThatWantsAGradient(Momentum):
    def scale(self, i, p, group):
        return 3.0 if self.state[p]["m"].requires_grad else 1.0

    def before(self, turn, ps):
        if turn == 2:
            self.state[ps[9]]["m"].requires_grad_(True)


class NegativeStride(Trap):
    """A gradient that is expanded from one number."""

    def scale(self, i, p, group):
        return 3.0 if p.grad.stride() == (0,) else 1.0

    def before(self, turn, ps):
        if turn == 2:
            ps[9].grad = torch.ones(1).expand(5)


class LastOfTheGroup(Trap):
    """Groups end where they ended; the last one of each is another."""

    def groups(self, ps):
        return [{"params": ps[:7]}, {"params": ps[7:]}]

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            left = len(group["params"])
            for p in group["params"]:
                left -= 1
                p.sub_(p.grad, alpha=0.1 if left else 0.3)


class FirstOfAll(Trap):
    """A flag that the first lane takes down."""

    @torch.no_grad()
    def step(self, closure=None):
        first = True
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=0.3 if first else 0.1)
                first = False


class FlagOfALane(Trap):
    """What one lane sets, the lanes after it see."""

    shapes = ((3, 4), (5,))

    @torch.no_grad()
    def step(self, closure=None):
        seen = False
        for p in self.param_groups[0]["params"]:
            if p.dim() == 1:
                seen = True
            p.sub_(p.grad, alpha=0.3 if seen else 0.1)


class FlagOfAGroup(Trap):
    """A group whose number is read before its lanes change it."""

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        for p in group["params"]:
            rate = group.setdefault("rate", 0.1)
            p.sub_(p.grad, alpha=rate)
            if p.dim() == 1:
                group["rate"] = rate * 0.5

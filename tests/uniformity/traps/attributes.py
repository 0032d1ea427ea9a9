"""What a lane is told apart by: its attributes, its identity, its kind."""

from __future__ import annotations

import functools
import operator
import weakref
from typing import Any, ClassVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from tests.uniformity.traps.base import Momentum, Trap, fill


class AttributeLater(Trap):
    def scale(self, i, p, group):
        return getattr(p, "lr_scale", 1.0)

    def before(self, turn, ps):
        if turn == 2:
            ps[9].lr_scale = 3.0


class AttributeAtOnce(AttributeLater):
    def before(self, turn, ps):
        ps[10].lr_scale = 0.5
        ps[13].lr_scale = 2.0


class AttributeOfLeadLater(AttributeLater):
    def before(self, turn, ps):
        if turn == 2:
            ps[0].lr_scale = ps[1].lr_scale = 3.0


class AttributeMoves(AttributeLater):
    def ready(self, ps):
        for p in ps:
            p.lr_scale = 1.0

    def before(self, turn, ps):
        ps[(turn * 5) % 16].lr_scale = 0.5
        ps[8].lr_scale += 0.25


class AttributeGoes(Trap):
    def ready(self, ps):
        for p in ps:
            p.no_decay = True

    def lane(self, i, p, group):
        if not hasattr(p, "no_decay"):
            p.mul_(0.5)
        p.sub_(p.grad, alpha=group["lr"])

    def before(self, turn, ps):
        if turn == 3:
            del ps[6].no_decay


class AttributeByException(Trap):
    def scale(self, i, p, group):
        try:
            return p.lr_scale
        except AttributeError:
            return 1.0

    def before(self, turn, ps):
        if turn == 2:
            ps[7].lr_scale = 4.0


class AttributeByOperator(Trap):
    def ready(self, ps):
        for p in ps:
            p.lr_scale = 1.0

    def scale(self, i, p, group):
        return operator.attrgetter("lr_scale")(p)

    def before(self, turn, ps):
        if turn == 2:
            ps[7].lr_scale = 4.0


class AttributeInItsDict(Trap):
    def scale(self, i, p, group):
        return 2.0 if "odd" in p.__dict__ else 1.0

    def before(self, turn, ps):
        if turn == 2:
            ps[12].odd = None


class AttributeByMadeName(Trap):
    def scale(self, i, p, group):
        return getattr(p, "_".join(("lr", "scale")), 1.0)

    def before(self, turn, ps):
        if turn == 1:
            ps[11].lr_scale = 0.0


class MainGrad(Trap):
    """A gradient of its own for each lane, as mixed precision trainers keep it."""

    def lane(self, i, p, group):
        p.sub_(p.main_grad, alpha=group["lr"])

    def ready(self, ps):
        for n, p in enumerate(ps):
            p.main_grad = fill(p, float(n))


class MainGradLater(Trap):
    def lane(self, i, p, group):
        grad = getattr(p, "main_grad", None)
        p.sub_(p.grad if grad is None else grad, alpha=group["lr"])

    def before(self, turn, ps):
        if turn in (2, 3):
            ps[4 + turn].main_grad = fill(ps[4 + turn], 2.0)


class MainGradReplaced(MainGrad):
    def before(self, turn, ps):
        for n, p in enumerate(ps):
            p.main_grad = fill(p, float(n * turn))


class AverageOnParameter(Trap):
    """The step itself keeps a tensor on each parameter."""

    def lane(self, i, p, group):
        if not hasattr(p, "average"):
            p.average = torch.zeros_like(p)
        p.average.lerp_(p.grad, 0.5)
        p.sub_(p.average, alpha=group["lr"])


class CountsOnParameter(Trap):
    def scale(self, i, p, group):
        p.steps = getattr(p, "steps", 0) + 1
        return 1.0 / p.steps

    def before(self, turn, ps):
        if turn == 3:
            ps[9].steps = 10


class NameOnParameter(Trap):
    def ready(self, ps):
        for n, p in enumerate(ps):
            p.label = f"layers.{n}.weight"

    def scale(self, i, p, group):
        return 0.0 if p.label.endswith("bias") else 1.0

    def before(self, turn, ps):
        if turn == 2:
            ps[5].label = "layers.5.bias"


class DictOnParameter(Trap):
    def ready(self, ps):
        for p in ps:
            p.optim = {"lr_mult": 1.0}

    def scale(self, i, p, group):
        return p.optim["lr_mult"]

    def before(self, turn, ps):
        if turn == 2:
            ps[8].optim["lr_mult"] = 0.25


class SharedDictOnParameter(DictOnParameter):
    """All hold one dict, until one is given its own."""

    def ready(self, ps):
        shared = {"lr_mult": 1.0}
        for p in ps:
            p.optim = shared

    def before(self, turn, ps):
        if turn == 2:
            ps[8].optim = {"lr_mult": 0.25}
        if turn == 3:
            ps[3].optim["lr_mult"] = 2.0


class IdInSet(Trap):
    def ready(self, ps):
        self.slow = set()

    def scale(self, i, p, group):
        return 0.5 if id(p) in self.slow else 1.0

    def before(self, turn, ps):
        if turn == 2:
            self.slow.add(id(ps[9]))


class IdInSetAtOnce(IdInSet):
    def ready(self, ps):
        self.slow = {id(p) for p in ps[6:9]}


class IdIsOne(Trap):
    def ready(self, ps):
        self.odd = 0

    def scale(self, i, p, group):
        return -1.0 if id(p) == self.odd else 1.0

    def before(self, turn, ps):
        self.odd = id(ps[3 * turn])


class IdTable(Trap):
    def ready(self, ps):
        self.table = {id(p): 1.0 for p in ps}

    def scale(self, i, p, group):
        return self.table[id(p)]

    def before(self, turn, ps):
        if turn == 2:
            self.table[id(ps[10])] = 3.0


class IdByOtherName(IdTable):
    def scale(self, i, p, group):
        key = [id][0]
        return self.table[key(p)]


class HashTable(IdTable):
    def scale(self, i, p, group):
        return self.table[hash(p)]


class TensorKeys(Trap):
    def ready(self, ps):
        self.table = {}

    def scale(self, i, p, group):
        return self.table.get(p, 1.0)

    def before(self, turn, ps):
        if turn == 2:
            self.table[ps[10]] = 3.0


class WeakKeys(TensorKeys):
    def ready(self, ps):
        self.table = WeakTensorKeyDictionary()


class WeakReference(Trap):
    def ready(self, ps):
        self.odd = weakref.ref(ps[0])

    def scale(self, i, p, group):
        return 2.0 if self.odd() is p else 1.0

    def before(self, turn, ps):
        self.odd = weakref.ref(ps[turn + 5])


class InList(Trap):
    def ready(self, ps):
        self.slow = []

    def scale(self, i, p, group):
        return 2.0 if any(p is q for q in self.slow) else 1.0

    def before(self, turn, ps):
        if turn == 2:
            self.slow.append(ps[14])


class IsOne(Trap):
    def ready(self, ps):
        self.odd = None

    def scale(self, i, p, group):
        return 2.0 if p is self.odd else 1.0

    def before(self, turn, ps):
        self.odd = ps[turn + 7]


class GradIsOne(Trap):
    def ready(self, ps):
        self.odd = None

    def scale(self, i, p, group):
        return 2.0 if p.grad is self.odd else 1.0

    def before(self, turn, ps):
        self.odd = ps[turn + 7].grad


class Address(Trap):
    def ready(self, ps):
        self.odd = set()

    def scale(self, i, p, group):
        return 2.0 if p.data_ptr() in self.odd else 1.0

    def before(self, turn, ps):
        if turn == 2:
            self.odd.add(ps[6].data_ptr())


class Version(Trap):
    """How often a tensor was written."""

    def scale(self, i, p, group):
        return 2.0 if p.grad._version > 0 else 1.0

    def before(self, turn, ps):
        if turn == 2:
            ps[6].grad.add_(1)


class Offset(Trap):
    """Where in its storage a parameter begins."""

    def scale(self, i, p, group):
        return 2.0 if p.storage_offset() else 1.0

    def before(self, turn, ps):
        if turn == 2:
            ps[7].data = torch.cat([torch.ones(1), ps[7].data])[1:]


class GradLayout(Trap):
    def scale(self, i, p, group):
        return 1.0 if p.grad.is_contiguous() else 2.0

    def before(self, turn, ps):
        if turn == 2:
            ps[6].grad = ps[6].grad.t().contiguous().t()


class Frozen(Trap):
    def scale(self, i, p, group):
        return 1.0 if p.requires_grad else 0.0

    def before(self, turn, ps):
        ps[6].requires_grad_(turn % 2 == 0)


class GradOfGrad(Trap):
    """A gradient that wants one itself."""

    def scale(self, i, p, group):
        return 3.0 if p.grad.requires_grad else 1.0

    def before(self, turn, ps):
        if turn == 2:
            ps[9].grad.requires_grad_(True)


class GradOfAnotherType(Trap):
    def scale(self, i, p, group):
        return 3.0 if type(p.grad) is torch.nn.Parameter else 1.0

    def before(self, turn, ps):
        if turn == 2:
            ps[9].grad = torch.nn.Parameter(ps[9].grad)


class Slow(torch.nn.Parameter):
    """A parameter of another kind."""

    rate = 0.5


class Kinds(Trap):
    @classmethod
    def params(cls):
        return [Slow(p) if n in (5, 8) else p for n, p in enumerate(super().params())]

    def scale(self, i, p, group):
        return 0.5 if isinstance(p, Slow) else 1.0


class KindsByName(Kinds):
    def scale(self, i, p, group):
        return {"Slow": 0.5}.get(type(p).__name__, 1.0)


class KindAttribute(Kinds):
    def scale(self, i, p, group):
        return getattr(p, "rate", 1.0)

    def before(self, turn, ps):
        if turn == 2:
            type(ps[5]).rate = 4.0


class KindChanges(Kinds):
    def before(self, turn, ps):
        if turn == 2:
            ps[7].__class__ = Slow


class Property(torch.nn.Parameter):
    """Its rate is looked up somewhere else."""

    table: ClassVar[Any] = {}

    @property
    def rate(self):
        return self.table.get(self.shape[0], 1.0)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Properties(Trap):
    @classmethod
    def params(cls):
        return [Property(p) for p in super().params()]

    def scale(self, i, p, group):
        return p.rate

    def before(self, turn, ps):
        if turn == 2:
            type(ps[0]).table = {5: 0.25}


class Doubling(torch.nn.Parameter):
    """What is added to it counts twice, if it is told to."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.sub_ and getattr(args[0], "twice", False):
            kwargs["alpha"] = 2 * kwargs["alpha"]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


class TorchFunction(Trap):
    @classmethod
    def params(cls):
        return [Doubling(p) for p in super().params()]

    def before(self, turn, ps):
        if turn == 2:
            ps[9].twice = True


@functools.singledispatch
def rate_of(p):
    """The rate of a kind of parameters."""
    return 1.0


@rate_of.register
def _(p: Slow):
    return 0.5


class SingleDispatch(Kinds):
    def scale(self, i, p, group):
        return rate_of(p)


class StateByAttribute(Momentum):
    """State that the attribute of one lane asks for, from the third step on."""

    def lane(self, i, p, group):
        super().lane(i, p, group)
        if getattr(p, "averaged", False):
            state = self.state[p]
            if "average" not in state:
                state["average"] = p.clone()
            state["average"].lerp_(p, 0.25)

    def before(self, turn, ps):
        if turn == 2:
            ps[9].averaged = True

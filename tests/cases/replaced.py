"""What a user exchanges while he trains: functions, methods, classes."""

from __future__ import annotations

import math

import torch
from torch.optim import Optimizer

from tests.cases.base import Scenario


class PatchMath(Scenario):
    real = math.sqrt

    def scale(self, p, group):
        return math.sqrt(group["lr"])

    def before(self, turn, ps):
        if turn == 3:
            math.sqrt = lambda x: 0.25

    @classmethod
    def undo(cls):
        math.sqrt = cls.real


class PatchTensorMethod(Scenario):
    real = torch.Tensor.mul_

    def lane(self, p, group):
        p.mul_(0.9)
        p.add_(p.grad, alpha=-group["lr"])

    def before(self, turn, ps):
        if turn == 3:
            torch.Tensor.mul_ = lambda s, o: s.sub_(0.125)

    @classmethod
    def undo(cls):
        torch.Tensor.mul_ = cls.real


class PatchOperator(Scenario):
    real = torch.Tensor.__mul__

    def lane(self, p, group):
        p.sub_(p.grad * group["lr"])

    def before(self, turn, ps):
        if turn == 3:
            torch.Tensor.__mul__ = lambda s, o: s - o

    @classmethod
    def undo(cls):
        torch.Tensor.__mul__ = cls.real


class PatchTorchFunction(Scenario):
    real = torch.sqrt

    def lane(self, p, group):
        p.sub_(torch.sqrt(p.grad.abs()), alpha=group["lr"])

    def before(self, turn, ps):
        if turn == 3:
            torch.sqrt = torch.exp

    @classmethod
    def undo(cls):
        torch.sqrt = cls.real


class PatchParameterProperty(Scenario):
    def scale(self, p, group):
        return p.rate_of_mine

    def before(self, turn, ps):
        torch.nn.Parameter.rate_of_mine = property(
            lambda p: 0.5 + turn + (p.data_ptr() and 0)
        )

    @classmethod
    def undo(cls):
        del torch.nn.Parameter.rate_of_mine


class PatchParameterClassAttr(Scenario):
    def scale(self, p, group):
        return p.rate_of_mine2

    def before(self, turn, ps):
        torch.nn.Parameter.rate_of_mine2 = 0.5 + turn

    @classmethod
    def undo(cls):
        del torch.nn.Parameter.rate_of_mine2


class PatchOptimizerBase(Scenario):
    def scale(self, p, group):
        return getattr(self, "base_rate", 1.0)

    def before(self, turn, ps):
        if turn == 3:
            Optimizer.base_rate = 0.25

    @classmethod
    def undo(cls):
        if hasattr(Optimizer, "base_rate"):
            del Optimizer.base_rate


class PatchLane(Scenario):
    def before(self, turn, ps):
        if turn == 2:
            self.lane = lambda p, g: p.add_(p.grad, alpha=-0.01)
        if turn == 4:
            del self.lane


class PatchLaneOfClass(Scenario):
    def before(self, turn, ps):
        if turn == 2:
            type(self).lane = lambda s, p, g: p.add_(p.grad, alpha=-0.01)


class PatchStep(Scenario):
    """The user replaces the class's step after it was compiled."""

    def before(self, turn, ps):
        if turn == 3:
            type(self).scale = lambda s, p, g: 0.125


class PatchBase(Scenario):
    real = Scenario.scale

    def scale(self, p, group):
        return super().scale(p, group)

    def before(self, turn, ps):
        if turn == 3:
            Scenario.scale = lambda s, p, g: 0.125

    @classmethod
    def undo(cls):
        Scenario.scale = cls.real

"""Counters of other kinds: large ones, floats, tensors, several in a lane."""

from __future__ import annotations

import math

import numpy as np
import torch

from tests.cases.counted import Counts


class CountHuge(Counts):
    def lane(self, p, group):
        state = self.state[p]
        if not state:
            state["n"] = 2**62
        state["n"] *= 3
        p.add_(p.grad, alpha=-group["lr"] * (state["n"] % 1000) / 1000)


class CountHugeAdd(Counts):
    def lane(self, p, group):
        state = self.state[p]
        if not state:
            state["n"] = 2**63 - 3
        state["n"] += 1
        p.add_(p.grad, alpha=-group["lr"] * (state["n"] - 2**63))


class CountBig53(Counts):
    def lane(self, p, group):
        state = self.state[p]
        if not state:
            state["n"] = 2**53
        state["n"] += 1
        p.add_(
            p.grad,
            alpha=-group["lr"] * (state["n"] - 2**53) * (state["n"] / 2**53 - 0.5),
        )


class CountTrueDivBig(Counts):
    def lane(self, p, group):
        state = self.state[p]
        if not state:
            state["n"] = 10**17 + 1
        state["n"] += 3
        p.add_(p.grad, alpha=-group["lr"] * (state["n"] / 3 - 33333333333333333))


class CountMixedBig(Counts):
    def lane(self, p, group):
        state = self.state[p]
        if not state:
            state["n"] = 2**60
        state["n"] += 1
        p.add_(p.grad, alpha=-group["lr"] * (0.5 * state["n"] - 2.0**59 + 1))


class CountFloat(Counts):
    def lane(self, p, group):
        state = self.state[p]
        if not state:
            state["n"] = 0.0
        state["n"] += 1.0
        p.add_(p.grad, alpha=-group["lr"] / state["n"])


class CountTensor(Counts):
    def lane(self, p, group):
        state = self.state[p]
        if not state:
            state["n"] = torch.zeros((), dtype=torch.int64)
        state["n"] += 1
        p.add_(p.grad, alpha=-group["lr"] / state["n"].item())


class CountTensorFloorDiv(Counts):
    def lane(self, p, group):
        state = self.state[p]
        if not state:
            state["n"] = torch.zeros(())
        state["n"] += 1
        n = state["n"].item()
        p.add_(
            p.grad,
            alpha=-group["lr"]
            * (n // 2 + n % 3 + round(n / 2) + int(n / 3) + max(n, 3) + min(2, n)),
        )


class CountTensorIntPow(Counts):
    def lane(self, p, group):
        state = self.state[p]
        if not state:
            state["n"] = torch.zeros((), dtype=torch.int32)
        state["n"] += 1
        n = state["n"].item()
        p.add_(p.grad, alpha=-group["lr"] * (0.9**n + n // 2 + n % 3 + n**2 % 5))


class CountAdamLike(Counts):
    def lane(self, p, group):
        state = self.state[p]
        if not state:
            state["n"], state["m"], state["v"] = (
                0,
                torch.zeros_like(p),
                torch.zeros_like(p),
            )
        state["n"] += 1
        state["m"].lerp_(p.grad, 0.1)
        state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
        c1, c2 = (1 - 0.9 ** state["n"], 1 - 0.99 ** state["n"])
        p.addcdiv_(
            state["m"],
            (state["v"].sqrt() / math.sqrt(c2)).add_(1e-08),
            value=-group["lr"] / c1,
        )


class CountTwo(Counts):
    """Two counters: one is reset."""

    def lane(self, p, group):
        state = self.state[p]
        if not state:
            state["n"], state["k"] = (0, 0)
        state["n"] += 1
        state["k"] = (state["k"] + 1) % 3
        p.add_(p.grad, alpha=-group["lr"] / (state["n"] + state["k"]))


class CountSwapped(Counts):
    def lane(self, p, group):
        state = self.state[p]
        if not state:
            state["a"], state["b"] = (1, 1)
        state["a"], state["b"] = (state["b"], state["a"] + state["b"])
        p.add_(p.grad, alpha=-group["lr"] / state["b"])


class CountBoolState(Counts):
    def lane(self, p, group):
        state = self.state[p]
        if not state:
            state["n"] = False
        state["n"] = not state["n"]
        p.add_(p.grad, alpha=-group["lr"] * (1 + state["n"]))


class CountTrueIsOne(Counts):
    def lane(self, p, group):
        state = self.state[p]
        if not state:
            state["n"] = 1
        p.add_(
            p.grad, alpha=-group["lr"] * (2.0 if isinstance(state["n"], bool) else 1.0)
        )

    def before(self, turn, ps):
        if turn == 2:
            self.state[ps[3]]["n"] = True


class CountFloatIsInt(Counts):
    def lane(self, p, group):
        state = self.state[p]
        if not state:
            state["n"] = 4
        p.add_(
            p.grad, alpha=-group["lr"] * (2.0 if isinstance(state["n"], float) else 1.0)
        )

    def before(self, turn, ps):
        if turn == 2:
            self.state[ps[3]]["n"] = 4.0


class CountFloorDivFloatZero(Counts):
    def lane(self, p, group):
        state = self.state[p]
        if not state:
            state["n"] = 3
        p.mul_(0.5).add_(p.grad * 0, alpha=math.copysign(1.0, state["n"] * 0.0))

    def before(self, turn, ps):
        if turn == 2:
            self.state[ps[3]]["n"] = -3


class CountNumpy(Counts):
    def lane(self, p, group):
        state = self.state[p]
        if not state:
            state["n"] = np.int64(0)
        state["n"] += 1
        p.add_(p.grad, alpha=-group["lr"] / float(state["n"]))


class CountStatic(Counts):
    """A counter of one lane set by the user to another kind of number."""

    def lane(self, p, group):
        state = self.state[p]
        if not state:
            state["n"] = 1
        state["n"] = state["n"] + 1
        p.add_(p.grad, alpha=-group["lr"] / state["n"])

    def before(self, turn, ps):
        if turn == 2:
            self.state[ps[3]]["n"] = 2.5
        if turn == 3:
            self.state[ps[4]]["n"] = 10**30
        if turn == 4:
            self.state[ps[5]]["n"] = float("inf")


class CountHeldNumpy(Counts):
    """A number of numpy's that the user has put there."""

    def before(self, turn, ps):
        if turn == 0:
            for p in ps:
                self.state[p]["n"] = np.int64(3)

    def of(self, n, state, group):
        return 1.0 / float(n)


class LastCount(Counts):
    """A note of the count before this one."""

    def lane(self, p, group):
        state = self.state[p]
        if not state:
            state["n"], state["last"] = 0, 0
        state["last"] = state["n"]
        state["n"] += 1
        p.add_(p.grad, alpha=-group["lr"] / (1 + state["last"]))

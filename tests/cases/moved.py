"""What a user moves on the whole: groups, states, memory; numbers of large size."""

from __future__ import annotations

import collections
import copy
import dataclasses
import decimal
import enum
import fractions
import math

import torch

from tests.cases.base import Ring, Scenario


class Counted(Scenario):
    """A momentum and a counter in each lane."""

    abstract = True
    turns = 8

    def lane(self, p, group):
        s = self.state[p]
        if not s:
            s["n"], s["m"] = 0, torch.zeros_like(p)
        s["n"] += 1
        s["m"].mul_(0.9).add_(p.grad)
        p.add_(s["m"], alpha=-group["lr"] / s["n"])


class TwoGroups(Counted):
    abstract = True

    def groups(self, ps):
        half = len(ps) // 2
        return [{"params": ps[:half]}, {"params": ps[half:], "lr": 0.25}]


class GroupTakenOff(TwoGroups):
    """A group goes, and comes back as the first one; then all are copies."""

    def before(self, turn, ps):
        if turn == 2:
            self.off = self.param_groups.pop()
        if turn == 4:
            self.param_groups.insert(0, self.off)
        if turn == 5:
            self.param_groups[:] = [dict(group) for group in self.param_groups]
        if turn == 6:
            self.param_groups = [{"params": ps[::-1], "lr": 0.5}]


class GroupEmptied(TwoGroups):
    def before(self, turn, ps):
        first, *rest = self.param_groups
        if turn == 2:
            first["params"], rest[0]["params"] = [], list(ps)
        if turn == 3:
            first["params"] = rest[0]["params"][:2]
            del rest[0]["params"][:2]
        if turn == 4:
            self.param_groups.clear()
            self.add_param_group({"params": ps[1:], "lr": 0.3})


class StatesMoved(Counted):
    """The table of states is another one; two lanes change states, or share one."""

    def before(self, turn, ps):
        if turn == 2:
            self.state = collections.defaultdict(dict, self.state)
        if turn == 3:
            turned = {p: dict(s) for p, s in reversed(self.state.items())}
            self.state = collections.defaultdict(dict, turned)
        if turn == 4:
            self.state.clear()
        if turn == 5:
            one, other = self.state[ps[0]], self.state[ps[2]]
            self.state[ps[0]], self.state[ps[2]] = other, one
        if turn == 6:
            self.state[ps[0]] = self.state[ps[2]]


class StateDictLoaded(TwoGroups):
    def before(self, turn, ps):
        if turn == 1:
            self.saved = copy.deepcopy(self.state_dict())
        if turn == 3:
            self.load_state_dict(self.saved)
        if turn == 4:
            self.load_state_dict(self.state_dict())
        if turn == 6:
            self.saved["state"].clear()
            self.load_state_dict(self.saved)


class DtypeThereAndBack(Counted):
    def before(self, turn, ps):
        if turn in (2, 4):
            dtype = torch.float64 if turn == 2 else torch.float32
            for p in list(ps):
                p.grad, p.data = None, p.data.to(dtype)
                p.grad = torch.ones_like(p)
                self.state[p]["m"] = self.state[p]["m"].to(dtype)
        if turn == 5:
            for p in ps[1::2]:
                m = self.state[p]["m"]
                m.data = m.data.to(torch.bfloat16)


class ViewsOfOne(Scenario):
    """The states of all lanes lie in one tensor."""

    def ready(self, ps: Ring) -> None:
        self.flat, self.at = torch.zeros(500), 0

    def lane(self, p, group):
        s = self.state[p]
        if not s:
            s["m"] = self.flat[self.at : self.at + p.numel()].view(p.shape)
            self.at += p.numel()
        s["m"].mul_(0.9).add_(p.grad)
        p.add_(s["m"], alpha=-group["lr"])


class MemoryExchanged(Scenario):
    """A parameter and its slow copy exchange their memory in each step."""

    def lane(self, p, group):
        s = self.state[p]
        if not s:
            s["slow"] = p.detach().clone()
        p.add_(p.grad, alpha=-group["lr"])
        p.data, s["slow"].data = s["slow"].data, p.data


class MemoryKept(Scenario):
    """A step keeps the former memory of what it gives other memory."""

    def lane(self, p, group):
        s = self.state[p]
        if not s:
            s["slow"] = torch.zeros_like(p)
            return
        s["old"] = p.data
        p.data = s["slow"].data
        self.kept = s["slow"].data
        s["slow"].data = p.grad * 0.5
        p.add_(p.grad, alpha=-group["lr"])


class OldOnesHeld(Scenario):
    """Each step makes a momentum; the former ones are read and kept."""

    def ready(self, ps: Ring) -> None:
        self.kept = []

    def lane(self, p, group):
        s = self.state[p]
        if not s:
            s["m"] = torch.zeros_like(p)
        s["old"] = s["m"]
        s["m"] = s["m"] * 0.9 + p.grad
        self.kept.append(s["m"])
        p.add_(s["m"] + s["old"], alpha=-group["lr"])


class Beyond64Bits(Scenario):
    def lane(self, p, group):
        s = self.state[p]
        s["n"] = s.get("n", 3) * 1000003 + 1
        s["rest"] = s["n"] % 1009
        p.add_(p.grad, alpha=-group["lr"] * s["rest"] / 1009 - 1 / float(s["n"]))


class NegativeIntegers(Scenario):
    def lane(self, p, group):
        s = self.state[p]
        if not s:
            s["n"], s["k"] = 5, -3
        s["n"] = (s["n"] * 7 - 13) // 3
        s["k"] = (s["k"] >> 1) ^ s["n"]
        s["a"], s["b"], s["c"] = -s["n"] % 5, -s["n"] // 4, ~s["n"]
        s["d"] = s["n"] & 6 | 1
        p.add_(p.grad, alpha=-group["lr"] / (1 + abs(s["a"] + s["c"])))


class NegativeFloats(Scenario):
    def lane(self, p, group):
        s = self.state[p]
        s["x"] = s.get("x", 0.3) * -1.7
        s["a"], s["b"] = s["x"] % 0.7, s["x"] // 0.3
        s["c"], s["d"] = round(s["x"]), round(s["x"], 1)
        s["e"], s["f"] = math.floor(s["x"]), int(s["x"])
        s["g"], s["h"] = math.fmod(s["x"], 0.7), math.trunc(s["x"])
        p.add_(p.grad, alpha=-group["lr"] * s["a"] + s["c"])


class NotANumber(Scenario):
    def lane(self, p, group):
        s = self.state[p]
        if not s:
            s["x"], s["n"] = float("nan"), 0
        s["n"] += 1
        s["y"] = 1.0 if s["x"] != s["x"] else 2.0
        s["z"], s["w"] = max(s["x"], 1.0), max(1.0, s["x"])
        s["v"] = min(s["x"], float(s["n"]))
        p.add_(p.grad, alpha=-group["lr"] * s["y"] / s["n"])


class SignOfZero(Scenario):
    def lane(self, p, group):
        s = self.state[p]
        s["x"] = -s.get("x", 0.0)
        p.mul_(0.0).add_(p.grad, alpha=s["x"])
        p.add_(math.copysign(1.0, s["x"]))


class OddKeys(Scenario):
    def lane(self, p, group):
        s = self.state[p]
        if not s:
            s[True], s[1.5], s["a", 0] = 1, 2.0, 3
        s[True] += 1
        s[1.5] *= 0.5
        s["a", 0] += s[1]
        p.add_(p.grad, alpha=-group["lr"] * s[1.5] / s["a", 0])


@dataclasses.dataclass
class Held:
    n: int
    m: torch.Tensor
    x: float = 1.0

    def tick(self):
        self.n += 1
        self.x *= 0.5


class DataclassTicks(Scenario):
    def lane(self, p, group):
        s = self.state[p]
        if not s:
            s["d"] = Held(0, torch.zeros_like(p))
        s["d"].tick()
        s["d"].m.mul_(0.9).add_(p.grad, alpha=s["d"].x)
        p.add_(s["d"].m, alpha=-group["lr"] / s["d"].n)


Pair = collections.namedtuple("Pair", "n x")


class NamedTupleReplaced(Scenario):
    def lane(self, p, group):
        s = self.state[p]
        if not s:
            s["d"] = Pair(0, 1.0)
        s["d"] = s["d"]._replace(n=s["d"].n + 1, x=s["d"].x * 0.5)
        p.add_(p.grad, alpha=-group["lr"] * s["d"].x / s["d"].n)


class DecimalRate(Scenario):
    def lane(self, p, group):
        s = self.state[p]
        s["d"] = s.get("d", decimal.Decimal("1.5")) * decimal.Decimal("0.9")
        p.add_(p.grad, alpha=-group["lr"] * float(s["d"]))


class FractionRate(Scenario):
    def lane(self, p, group):
        s = self.state[p]
        s["d"] = s.get("d", fractions.Fraction(1, 3)) + fractions.Fraction(1, 7)
        p.add_(p.grad, alpha=-group["lr"] * float(s["d"]))


class Phase(enum.Enum):
    WARM = 1
    MAIN = 2
    COOL = 3

    def after(self):
        return Phase(self.value % 3 + 1)


class PhasesOfLanes(Scenario):
    def lane(self, p, group):
        s = self.state[p]
        phase = s.get("phase", Phase.WARM)
        p.add_(p.grad, alpha=-group["lr"] * phase.value)
        s["phase"] = phase.after()


class Slot:
    __slots__ = ("n",)

    def __init__(self):
        self.n = 0


class SlotsInState(Scenario):
    def lane(self, p, group):
        s = self.state[p]
        if not s:
            s["slot"] = Slot()
        s["slot"].n += 1
        p.add_(p.grad, alpha=-group["lr"] / s["slot"].n)

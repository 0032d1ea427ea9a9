"""Other things than numbers in the state of a lane, or of all."""
# ruff: noqa: RUF012

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import math
import typing

import torch

from tests.cases.base import Scenario
from tests.cases.counted import Counts


class Stated(Scenario):
    abstract = True
    first = None
    plain = True

    def lane(self, p, group):
        state = self.state[p]
        if not state:
            state["k"] = self.first if self.plain else copy.deepcopy(self.first)
        p.add_(p.grad, alpha=-group["lr"] * self.of(state["k"]))

    def before(self, turn, ps):
        if turn == 2:
            self.state[ps[3]]["k"] = self.later()
            self.state[ps[4]]["k"] = self.later()
        if turn == 4:
            self.state[ps[3]]["k"] = copy.deepcopy(self.first)


class StateText(Stated):
    first = "slow"

    def of(self, k):
        return 1.0 if k == "slow" else 2.0

    def later(self):
        return "fast"


class StateNone(Stated):
    def of(self, k):
        return 1.0 if k is None else k

    def later(self):
        return 0.25


class StateTuple(Stated):
    first = (0.5, 0.25)

    def of(self, k):
        return k[0] + k[1]

    def later(self):
        return (0.5, 0.125)


class StateNested(Stated):
    plain = False
    first = {"a": {"b": 0.5}}

    def of(self, k):
        return k["a"]["b"]

    def later(self):
        return {"a": {"b": 2.0}}


class StateListOfFloats(Stated):
    plain = False
    first = [0.5]

    def of(self, k):
        k.append(0.1)
        return sum(k)

    def later(self):
        return [0.5, 2.0]


class StateSet(Stated):
    plain = False
    first = {"warm"}

    def of(self, k):
        return 1.0 if "warm" in k else 0.5

    def later(self):
        return set()


class StateFrozen(Stated):
    first = frozenset([1])

    def of(self, k):
        return 1.0 / len(k)

    def later(self):
        return frozenset([1, 2])


class Phase(enum.Enum):
    WARM = 1
    HOT = 2


class StateEnum(Stated):
    first = Phase.WARM

    def of(self, k):
        return k.value

    def later(self):
        return Phase.HOT


class StateDtype(Stated):
    first = torch.float32

    def of(self, k):
        return 1.0 if k is torch.float32 else 2.0

    def later(self):
        return torch.float64


class StateFunction(Stated):
    first = math.sqrt

    def of(self, k):
        return k(4.0)

    def later(self):
        return math.exp


@dataclasses.dataclass
class Rec:
    k: float = 0.5
    n: int = 0


class StateDataclass(Stated):
    plain = False
    first = Rec()

    def of(self, k):
        k.n += 1
        return k.k * k.n

    def later(self):
        return Rec(2.0, 3)


class NT(typing.NamedTuple):
    k: float
    n: int


class StateNamedTuple(Scenario):
    def lane(self, p, group):
        state = self.state[p]
        if not state:
            state["k"] = NT(0.5, 0)
        state["k"] = state["k"]._replace(n=state["k"].n + 1)
        p.add_(p.grad, alpha=-group["lr"] * state["k"].k / state["k"].n)

    def before(self, turn, ps):
        if turn == 2:
            self.state[ps[3]]["k"] = NT(0.25, 7)


class StateRange(Scenario):
    """Dynamo does not implement a slice of a range whose bounds move."""

    def lane(self, p, group):
        state = self.state[p]
        state["r"] = state.get("r", range(1, 9))[1:]
        p.add_(p.grad, alpha=-group["lr"] * state["r"][0])


class StateIsTuple(Scenario):
    def lane(self, p, group):
        if p not in self.state:
            self.state[p] = (torch.zeros_like(p), 0)
        m, n = self.state[p]
        m.mul_(0.9).add_(p.grad)
        self.state[p] = (m, n + 1)
        p.add_(m, alpha=-group["lr"] / (n + 1))


class StateByName(Scenario):
    def ready(self, ps):
        self._names = [f"w{k}" for k in range(len(ps))]

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for name, p in zip(self._names, group["params"], strict=False):
                state = self.state[name]
                state["n"] = state.get("n", 0) + 1
                p.add_(p.grad, alpha=-group["lr"] / state["n"])

    def before(self, turn, ps):
        if turn == 3:
            self.state["w4"]["n"] = 10


class StateShared(Scenario):
    """One state dict for all lanes."""

    def lane(self, p, group):
        state = self.state["all"]
        state["n"] = state.get("n", 0) + 1
        p.add_(p.grad, alpha=-group["lr"] / state["n"])


class StateSharedOnce(Scenario):
    @torch.no_grad()
    def step(self, closure=None):
        state = self.state["all"]
        state["n"] = state.get("n", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / state["n"])

    def before(self, turn, ps):
        if turn == 3:
            self.state["all"]["n"] = 20


class StateOfFirst(Scenario):
    """Torch's own trick: a global counter in the state of the first parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        ps = self.param_groups[0]["params"]
        state = self.state[ps[0]]
        state.setdefault("func_evals", 0)
        state["func_evals"] += 1
        for p in ps:
            p.add_(p.grad, alpha=-self.param_groups[0]["lr"] / state["func_evals"])


class StateItems(Scenario):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("m", torch.zeros_like(p)).add_(p.grad)
        for p, state in self.state.items():
            p.add_(state["m"], alpha=-0.1)

    def before(self, turn, ps):
        if turn in (0, 2):
            ps[3].grad = None
            ps[1].grad = None


class StateLen(Scenario):
    def lane(self, p, group):
        self.state[p].setdefault("k", 0)
        p.add_(p.grad, alpha=-group["lr"] / len(self.state))

    def before(self, turn, ps):
        if turn < 2:
            ps[3].grad = None


class StateValues(Scenario):
    def lane(self, p, group):
        state = self.state[p]
        state["k"] = state.get("k", 0) + 1
        p.add_(p.grad, alpha=-group["lr"] / max(s["k"] for s in self.state.values()))

    def before(self, turn, ps):
        if turn < 2:
            ps[3].grad = None


class StatePop(Scenario):
    def lane(self, p, group):
        state = self.state[p]
        m = state.pop("m", None)
        if m is None:
            m = torch.zeros_like(p)
        state["m"] = m.mul_(0.9).add_(p.grad)
        p.add_(m, alpha=-group["lr"])

    def before(self, turn, ps):
        if turn == 2:
            self.state[ps[3]].pop("m")


class StateClears(Counts):
    def lane(self, p, group):
        state = self.state[p]
        if not state:
            state["n"], state["m"] = (0, torch.zeros_like(p))
        state["n"] += 1
        state["m"].add_(p.grad)
        p.add_(state["m"], alpha=-group["lr"])
        if state["n"] == 3:
            state.clear()


class StateRestart(Counts):
    def lane(self, p, group):
        state = self.state[p]
        if not state:
            state["n"], state["m"] = (0, torch.zeros_like(p))
        state["n"] += 1
        if state["n"] % 3 == 0:
            state["m"].zero_()
        state["m"].add_(p.grad)
        p.add_(state["m"], alpha=-group["lr"])


class StateGetDefault(Scenario):
    def lane(self, p, group):
        m = self.state[p].get("m", p.grad)
        p.add_(m, alpha=-group["lr"])
        self.state[p]["m"] = p.grad.clone()

    def before(self, turn, ps):
        if turn == 2:
            ps[3].grad = None
            self.state[ps[3]].clear()


class StateOrdered(Scenario):
    def lane(self, p, group):
        if not isinstance(self.state[p], collections.OrderedDict):
            self.state[p] = collections.OrderedDict(m=torch.zeros_like(p))
        state = self.state[p]
        state.move_to_end("m")
        state["m"].add_(p.grad)
        p.add_(state["m"], alpha=-group["lr"])

"""Traps for the analysis itself: code that a hasty reader takes for harmless.

Read, not run: `tests/uniformity/test_analysis.py` asks the analysis of each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.uniformity.divergence.base import Base


class FirstSetsAgain(Base):
    """What looks like a default set once is set anew by each lane."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        eps = None
        for p in self.param_groups[0]["params"]:
            if eps is None:
                eps = float(p.dim())
            p.sub_(p.grad * eps)
            if p.dim() == 1:
                eps = None


class FirstSetsContents(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        scale = None
        for p in self.param_groups[0]["params"]:
            if scale is None:
                scale = p.grad.norm().item()
            p.sub_(p.grad * scale)


class PartsOfTurns(Base):
    """The same condition leaves other lanes in another turn."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        first: Any = []
        for r in range(2):
            now = [p.grad.norm().item() for p in params if self.state[p]["t"] > r]
            if r == 0:
                first = now
            else:
                for p, n in zip(params, first, strict=False):
                    p.sub_(p.grad * n)


class AddedTwice(Base):
    """A list with each lane twice, beside one with each lane once."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        norms = []
        for p in params:
            norms.append(p.grad.norm().item())
            if p.dim() == 2:
                norms.append(1.0)
        for p, n in zip(params, norms, strict=False):
            p.sub_(p.grad * n)


class AddedInTurns(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        norms: list[float] = []
        for r in range(2):
            for p in params:
                norms.append(p.grad.norm().item() * r)
        for p, n in zip(params, norms[2:], strict=False):
            p.sub_(p.grad * n)


class AddedByTwoLoops(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        norms: list[float] = []
        for p in params:
            if p.dim() == 2:
                norms.append(p.grad.norm().item())
        for p in params:
            if p.dim() == 1:
                norms.append(p.grad.norm().item())
        for p, n in zip(params, norms, strict=True):
            p.sub_(p.grad * n)


class OtherCondition(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        flat = [p for p in params if p.dim() == 1]
        norms = [p.grad.norm().item() for p in params if p.dim() == 2]
        for p, n in zip(flat, norms, strict=False):
            p.sub_(p.grad * n)


class OtherGroup(Base):
    """Lists of one group beside parameters of the next."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        norms: Any = None
        for group in self.param_groups:
            if norms is not None:
                for p, n in zip(group["params"], norms, strict=False):
                    p.sub_(p.grad * n)
            norms = [p.grad.norm().item() for p in group["params"]]


class Alias(Base):
    """A list by two names."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        a: list[float] = []
        b = a
        for p in self.param_groups[0]["params"]:
            a.append(1.0)
            p.sub_(p.grad / len(b))


class Popped(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        rates = [0.1, 0.2] * 8
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * rates.pop())


class Inserted(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        norms: list[float] = []
        for p in params:
            norms.insert(0, p.grad.norm().item())
        for p, n in zip(params, norms, strict=True):
            p.sub_(p.grad * n)


class SortedNumbers(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        norms = sorted(p.grad.norm().item() for p in params)
        for p, n in zip(params, norms, strict=True):
            p.sub_(p.grad * n)


class LastOfList(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        for p in params:
            p.sub_(p.grad / params[-1].dim())


class FirstTensor(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        n = params[0].grad.norm().item()
        for p in params:
            p.sub_(p.grad * n)


class Bound(Base):
    """A default argument that keeps a lane."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:

            def scale(n: float = p.grad.norm().item()) -> float:
                return n

        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * scale())


class Late(Base):
    """A closure that sees the last lane."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            q = p
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad / q.dim())


class SetInHelper(Base):
    """A helper changes the optimizer for the lanes behind."""

    factor = 1.0

    def use(self, p: Tensor) -> float:
        found = self.factor
        self.factor = 1.0 / p.dim()
        return found

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * self.use(p))


class SetAttribute(SetInHelper):
    def use(self, p: Tensor) -> float:
        setattr(self, "factor", 1.0 / p.dim())  # noqa: B010
        return self.factor


class DictOfOptimizer(SetInHelper):
    def use(self, p: Tensor) -> float:
        self.__dict__["factor"] = self.__dict__.get("factor", 0) + 1
        return 1.0 / self.__dict__["factor"]


class GroupCounter(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                group["n"] = group.get("n", 0) + 1
                p.sub_(p.grad / group["n"])


class Mixed(Base):
    """Lists of numbers by turns of a condition that is not the lane's."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            norms = [1.0]
            for p in group["params"]:
                norms.append(p.grad.norm().item())
            for p, n in zip(group["params"], norms, strict=False):
                p.sub_(p.grad * n)


class OtherState(Base):
    """State of the parameter before."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        q = self.param_groups[0]["params"][0]
        for p in self.param_groups[0]["params"]:
            self.state[q]["t"] = self.state[q].get("t", 0) + 1
            p.sub_(p.grad / self.state[q]["t"])
            q = p


class ViaData(Base):
    """The state of another tensor on the same memory."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p.data]["t"] = 1
            p.sub_(p.grad * len(self.state))


class Enumerated(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for i, (p, g) in enumerate(
            zip(
                self.param_groups[0]["params"],
                [p.grad for p in self.param_groups[0]["params"]],
                strict=True,
            )
        ):
            p.sub_(g / (1 + i))


class Ranged(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        for i in range(1, len(params)):
            params[i].sub_(params[i].grad)


class Stepped(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        for i in range(0, len(params), 2):
            params[i].sub_(params[i].grad)


class Compared(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        if len(params) > 3:
            for p in params:
                p.sub_(p.grad)


class Truth(Base):
    """How far the list has got."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        seen: list[Any] = []
        for p in self.param_groups[0]["params"]:
            if not seen:
                p.sub_(p.grad)
            seen.append(p)


class Formatted(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for i, p in enumerate(self.param_groups[0]["params"]):
            self.state[p][f"m{i}"] = torch.zeros_like(p)
            p.sub_(p.grad)


class Hidden(Base):
    """A name that its class changes."""

    __factor = 2.0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * self.__factor)


class Unpacked(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        a, *_, b = self.param_groups[0]["params"]
        a.sub_(a.grad)
        b.sub_(b.grad)


class Mapped(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        for p, k in zip(params, map(float, range(len(params))), strict=True):
            p.sub_(p.grad * k)


class Totalled(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        total = sum((p.grad.norm() for p in params), torch.zeros(()))
        torch._foreach_mul_([p.grad for p in params], 1 / total.item())


class Stacked(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        scale = torch.stack([p.grad.norm() for p in params]).max()
        for p in params:
            p.sub_(p.grad / scale)


class ForeachTable(Base):
    """A list of numbers that was given, by place."""

    def prepare(self, params: list[Tensor]) -> None:
        self.rates = [0.1] * len(params)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        torch._foreach_mul_(params, self.rates)


class ForeachShifted(Base):
    """Numbers of another list of the same length."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        a = [p for p in params if p.dim() == 1]
        b = [p.grad.norm().item() for p in params if p.dim() == 2]
        torch._foreach_mul_(a, b)


class MovedAround(Base):
    """Lists whose items were dealt anew."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        norms = [p.grad.norm().item() for p in params]
        norms[0] = 5.0
        for p, n in zip(params, norms, strict=True):
            p.sub_(p.grad * n)


class Whiled(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            x = p.grad
            while x.norm().item() > 1:
                x = x / 2
            p.sub_(x)


class Asserted(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        total = 0
        for p in self.param_groups[0]["params"]:
            total += p.dim()
            p.sub_(p.grad)
        self.total = total


class Default(Base):
    """A mutable default that lanes change."""

    def count(self, seen: list[int] = []) -> float:  # noqa: B006
        seen.append(1)
        return 1.0 / len(seen)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * self.count())


class Sized(Base):
    """A size that was read from contents."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            n = int(p.grad.norm().item())
            p.sub_(p.grad * torch.full((n,), 1.0).sum())


class Rounded(Base):
    """An index that was read from contents."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        rates = (0.1, 0.2, 0.3)
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * rates[int(p.grad.norm().item()) % 3])


class Recursive(Base):
    def down(self, i: int) -> float:
        return 1.0 if i == 0 else self.down(i - 1)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for i, p in enumerate(self.param_groups[0]["params"]):
            p.sub_(p.grad * self.down(i))


class ReturnsEarly(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad)
            if p.dim() == 1:
                return


class Ternary(Base):
    """A flag that changes from lane to lane."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        odd = False
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * (2.0 if odd else 1.0))
            odd = not odd


class Gathered(Base):
    """What is gathered is read before all lanes are seen."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        flat = False
        for p in self.param_groups[0]["params"]:
            flat |= p.dim() == 1
            p.sub_(p.grad * (2.0 if flat else 1.0))


class TwoFlags(Base):
    """The last lane's flag."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        for p in params:
            flat = p.dim() == 1
        for p in params:
            p.sub_(p.grad * (2.0 if flat else 1.0))


class SetEither(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        rate = 1.0
        for p in params:
            if p.dim() == 1:  # noqa: SIM108
                rate = 2.0
            else:
                rate = 3.0
        for p in params:
            p.sub_(p.grad * rate)


class HeldTensor(Base):
    """A tensor of one lane, kept by the optimizer."""

    def prepare(self, params: list[Tensor]) -> None:
        self.head = params[0]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * self.head.norm().item())


class GradientGiven(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.grad = p.grad * 2
            p.sub_(p.grad)


class SomeGroups(Base):
    """Numbers of some groups alone, beside the parameters of all."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params, norms = [], []
        for group in self.param_groups:
            for p in group["params"]:
                params.append(p)
                if group["lr"] > 0.01:
                    norms.append(p.grad.norm().item())
        for p, n in zip(params, norms, strict=False):
            p.sub_(p.grad * n)


class SkippedGroups(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params, norms = [], []
        for group in self.param_groups:
            for p in group["params"]:
                params.append(p)
            if group["lr"] > 0.01:
                for p in group["params"]:
                    norms.append(p.grad.norm().item())
        for p, n in zip(params, norms, strict=False):
            p.sub_(p.grad * n)


class ContinuedGroups(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params, norms = [], []
        for group in self.param_groups:
            for p in group["params"]:
                params.append(p)
            if group["lr"] < 0.01:
                continue
            for p in group["params"]:
                norms.append(p.grad.norm().item())
        for p, n in zip(params, norms, strict=False):
            p.sub_(p.grad * n)


class RatesOfGroups(Base):
    """A rate of each lane's group chooses lanes."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params, rates = [], []
        for group in self.param_groups:
            for p in group["params"]:
                params.append(p)
                rates.append(group["lr"])
        norms = [
            p.grad.norm().item()
            for p, lr in zip(params, rates, strict=True)
            if lr > 0.01
        ]
        for p, n in zip(params, norms, strict=False):
            p.sub_(p.grad * n)


TRAPS = [
    x for x in list(vars().values()) if isinstance(x, type) and issubclass(x, Base)
]
TRAPS.remove(Base)

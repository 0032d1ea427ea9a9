"""Traps: a number tells lanes apart, by a place, a table, a name, a count."""

from __future__ import annotations

import itertools
import math
import weakref
from typing import Any

import torch
from torch import Tensor

from tests.uniformity.divergence.base import Base

TABLE = [1.0] * 64
BY_SHAPE: dict[Any, float] = {}
CONFIG = {"slow": 99}


class Place(Base):
    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return 0.1 / (i + 1)


class MaskedByMin(Base):
    """Seen only when the learning rate is large."""

    def prepare(self, params: list[Tensor]) -> None:
        self.param_groups[0]["lr"] = 1e-4

    def spring(self, params: list[Tensor]) -> None:
        self.param_groups[0]["lr"] = 0.5

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return min(group["lr"], 0.1 / (i + 1))


class MaskedByMax(MaskedByMin):
    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] / max(1e-3 * i, group["lr"] * 10, 0.004)


class MaskedByNorm(Base):
    """A clip of each lane's own, which small gradients do not reach."""

    def prepare(self, params: list[Tensor]) -> None:
        self.clip = [1e3 * (k + 1) for k in range(len(params))]

    def spring(self, params: list[Tensor]) -> None:
        self.clip = [1e-3 * (k + 1) for k in range(len(params))]

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] / max(1.0, p.grad.norm().item() / self.clip[i])


class Table(Base):
    def prepare(self, params: list[Tensor]) -> None:
        self.table = [1.0] * len(params)

    def spring(self, params: list[Tensor]) -> None:
        self.table[4] = 3.0

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * self.table[i]


class ClassTable(Base):
    table = [1.0] * 64

    def spring(self, params: list[Tensor]) -> None:
        type(self).table = [1.0] * 4 + [3.0] * 60

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * self.table[i]


class ModuleTable(Base):
    def spring(self, params: list[Tensor]) -> None:
        TABLE[4] = 3.0

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * TABLE[i]


def helper(i: int) -> float:
    return helper.table[i]  # type: ignore[attr-defined,no-any-return]


helper.table = [1.0] * 64  # type: ignore[attr-defined]


class FunctionTable(Base):
    def spring(self, params: list[Tensor]) -> None:
        helper.table = [1.0] * 4 + [3.0] * 60  # type: ignore[attr-defined]

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * helper(i)


class Holder:
    def __init__(self) -> None:
        self.table = [1.0] * 64


class WeakTable(Base):
    def prepare(self, params: list[Tensor]) -> None:
        self.kept = Holder.table_holder = Holder()  # type: ignore[attr-defined]
        self.weak = weakref.ref(self.kept)
        del self.kept

    def spring(self, params: list[Tensor]) -> None:
        Holder.table_holder.table[4] = 3.0  # type: ignore[attr-defined]

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * self.weak().table[i]  # type: ignore[union-attr]


class DefaultArgument(Base):
    def weight(self, i: int, cache: dict[int, float] = {}) -> float:  # noqa: B006
        return cache.setdefault(i, 1.0 + len(cache))

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * self.weight(i)


class Names(Base):
    def prepare(self, params: list[Tensor]) -> None:
        for k in range(len(params)):
            setattr(self, f"w{k}", 1.0)

    def spring(self, params: list[Tensor]) -> None:
        self.w4 = 3.0

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * getattr(self, f"w{i}")


class GroupNames(Base):
    def prepare(self, params: list[Tensor]) -> None:
        for k in range(len(params)):
            self.param_groups[0][f"w{k}"] = 1.0

    def spring(self, params: list[Tensor]) -> None:
        self.param_groups[0]["w4"] = 3.0

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * group[f"w{i}"]


class GroupTable(Base):
    def prepare(self, params: list[Tensor]) -> None:
        self.param_groups[0]["scales"] = [1.0] * len(params)

    def spring(self, params: list[Tensor]) -> None:
        self.param_groups[0]["scales"][4] = 3.0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p, scale in zip(group["params"], group["scales"], strict=True):
                p.sub_(p.grad, alpha=group["lr"] * scale)


class Started(Base):
    """Numbered from one, as a table of rates is read."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for i, p in enumerate(group["params"], 1):
                p.sub_(p.grad / i)


class Counter(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        n = 0
        for p in self.param_groups[0]["params"]:
            n += 1  # noqa: SIM113
            p.sub_(p.grad / n)


class While(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        i = 0
        while i < len(params):
            params[i].sub_(params[i].grad / (1 + i))
            i += 1


class Closed(Base):
    """A counter in a closure."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        n = 0

        def more() -> float:
            nonlocal n
            n += 1
            return 1.0 / n

        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * more())


class Kept(Base):
    """A counter in the optimizer, set back at the end of each step."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.n = 0
        for p in self.param_groups[0]["params"]:
            self.n += 1
            p.sub_(p.grad / self.n)
        self.n = 0


class Boxed(Base):
    """A counter in a list."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        box = [0]
        for p in self.param_groups[0]["params"]:
            box[0] += 1
            p.sub_(p.grad / box[0])


class Filled(Base):
    """A list that grows; its length is what counts."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        seen = []
        for p in self.param_groups[0]["params"]:
            seen.append(1.0)
            p.sub_(p.grad / len(seen))


class Generated(Base):
    def rates(self, lr: float) -> Any:
        for k in itertools.count():
            yield lr / (k + 1)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        for p, rate in zip(group["params"], self.rates(group["lr"]), strict=False):
            p.sub_(p.grad * rate)


class Next(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        rates = iter([0.1, 0.2] * 16)
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * next(rates))


class Counted(Base):
    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] / len(group["params"])


class Last(Base):
    """What the last lane left is used for all."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            rate = 1.0 / p.numel()
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * rate)


class Before(Base):
    """Each lane is told what the one before it was."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        last = 1
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad / last)
            last = p.dim()


class Sum(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        n = sum(p.numel() for p in params)
        for p in params:
            p.sub_(p.grad / n)


class Modulo(Base):
    def prepare(self, params: list[Tensor]) -> None:
        self.every = 64

    def spring(self, params: list[Tensor]) -> None:
        self.every = 2

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * (1.0 if i % self.every == 0 or i < 4 else 0.5)


class OneOdd(Base):
    def prepare(self, params: list[Tensor]) -> None:
        CONFIG["slow"] = 99

    def spring(self, params: list[Tensor]) -> None:
        CONFIG["slow"] = 4

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * (0.5 if i == CONFIG["slow"] else 1.0)


class FirstOfShape(Base):
    """A dict by shape, filled by whichever lane comes first."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        known: dict[Any, Any] = {}
        for p in self.param_groups[0]["params"]:
            norm = known.setdefault(p.shape, p.grad.norm())
            p.sub_(p.grad / norm)


class KeptByShape(Base):
    """How many lanes of a shape there were."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        known: dict[Any, int] = {}
        for p in self.param_groups[0]["params"]:
            known[p.shape] = known.get(p.shape, 0) + 1
            p.sub_(p.grad / known[p.shape])


class Sliced(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        for p in params[4:]:
            p.sub_(p.grad)
        for p in params[:4]:
            p.sub_(p.grad * 2)


class Reversed(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        for i, p in enumerate(reversed(params)):
            p.sub_(p.grad / (i + 1))


class SortedBySize(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        order = sorted(params, key=lambda p: p.numel())
        for k, p in enumerate(order):
            p.sub_(p.grad / (k + 1))


class Digits(Base):
    """By the text of a number."""

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * (2.0 if "4" in str(i) else 1.0)


class Cosine(Base):
    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * math.cos(i)


class LaterByStep(Base):
    """Alike until some steps are done."""

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        late = self.state[p]["t"] > 3
        return group["lr"] * (1.0 + i if late else 1.0)


class Dealt(Base):
    """Two lists, filled by turns."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        slow, fast, turn = [], [], False
        for p in self.param_groups[0]["params"]:
            (slow if turn else fast).append(p)
            turn = not turn
        for p in slow:
            p.sub_(p.grad, alpha=0.1)
        for p in fast:
            p.sub_(p.grad, alpha=0.2)


class Shifted(Base):
    """Two lists that are not aligned."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        norms = [p.grad.norm().item() for p in params]
        norms = norms[1:] + norms[:1]
        for p, n in zip(params, norms, strict=True):
            p.sub_(p.grad / (1 + n))


class NotAligned(Base):
    """Numbers of matrices first, then of vectors; parameters in their own order."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        norms = [p.grad.norm().item() for p in params if p.dim() == 2]
        norms += [p.grad.norm().item() for p in params if p.dim() != 2]
        for p, n in zip(params, norms, strict=True):
            p.sub_(p.grad / (1 + n))


class Rest(Base):
    """A list without its first lane."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        first, *rest = self.param_groups[0]["params"]
        first.sub_(first.grad * 2)
        for p in rest:
            p.sub_(p.grad)


class Found(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        best = max(p.grad.norm() for p in params)
        for p in params:
            p.sub_(p.grad / best)


class Walrus(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        n = 0
        rates = [1.0 / (n := n + 1) for _ in self.param_groups[0]["params"]]
        for p, r in zip(self.param_groups[0]["params"], rates, strict=True):
            p.sub_(p.grad * r)


class StateNumber(Base):
    """A number read from contents, kept in the state."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            old = state.get("norm", 1.0)
            state["norm"] = p.grad.norm().item()
            p.sub_(p.grad / (old + 1))


class StateSum(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        for p in params:
            self.state[p].setdefault("m", torch.zeros_like(p)).add_(p.grad)
        n = len(self.state)
        for p in params:
            p.sub_(self.state[p]["m"] / n)


class OverStates(Base):
    """By the order of the state."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("m", torch.zeros_like(p)).add_(p.grad)
        for k, (p, state) in enumerate(self.state.items()):
            p.sub_(state["m"] / (k + 1))


class Twice(Base):
    """A loop over lanes in a loop over lanes."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        for p in params:
            n = 0
            for q in params:
                if q.dim() == p.dim():
                    n += 1
            p.sub_(p.grad / n)


class FirstOnly(Base):
    """Ends after the first lane."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad)
            break


class UntilVector(Base):
    """Ends where the first vector stands."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.dim() == 1:
                break
            p.sub_(p.grad)


TRAPS = [
    x for x in list(vars().values()) if isinstance(x, type) and issubclass(x, Base)
]
TRAPS.remove(Base)

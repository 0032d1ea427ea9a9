"""Traps: an attribute, an identity or memory tells lanes apart."""

from __future__ import annotations

import gc
import types
from typing import Any

import torch
from torch import Tensor

from tests.uniformity.divergence.base import Base


class Scaled(Base):
    """`lr_scale` of a parameter, which some get later."""

    def spring(self, params: list[Tensor]) -> None:
        params[4].lr_scale = 3.0  # type: ignore[attr-defined]

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * getattr(p, "lr_scale", 1.0)


class ScaledFromTheStart(Scaled):
    def prepare(self, params: list[Tensor]) -> None:
        for k, p in enumerate(params):
            p.lr_scale = 1.0 + (k > 3)  # type: ignore[attr-defined]


class Flagged(Base):
    def spring(self, params: list[Tensor]) -> None:
        params[5].no_decay = True  # type: ignore[attr-defined]

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * (0.5 if hasattr(p, "no_decay") else 1.0)


class MainGradient(Base):
    def prepare(self, params: list[Tensor]) -> None:
        for k, p in enumerate(params):
            p.main_grad = torch.full_like(p, k + 1.0)  # type: ignore[attr-defined]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.main_grad)


class MainGradientIfAny(MainGradient):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            grad = p.main_grad if hasattr(p, "main_grad") else p.grad
            p.sub_(grad)


class ById(Base):
    def prepare(self, params: list[Tensor]) -> None:
        self.slow: Any = set()

    def spring(self, params: list[Tensor]) -> None:
        self.slow.add(id(params[4]))

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * (0.5 if id(p) in self.slow else 1.0)


class DictById(Base):
    def prepare(self, params: list[Tensor]) -> None:
        self.rates = {id(p): 1.0 for p in params}

    def spring(self, params: list[Tensor]) -> None:
        self.rates[id(params[4])] = 3.0

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * self.rates[id(p)]


class DictByParameter(Base):
    def prepare(self, params: list[Tensor]) -> None:
        self.rates = dict.fromkeys(params, 1.0)

    def spring(self, params: list[Tensor]) -> None:
        self.rates[params[4]] = 3.0

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * self.rates[p]


class InList(Base):
    def prepare(self, params: list[Tensor]) -> None:
        self.slow: list[Any] = []

    def spring(self, params: list[Tensor]) -> None:
        self.slow.append(params[4])

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * (0.5 if any(q is p for q in self.slow) else 1.0)


class IsFirst(Base):
    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * (2.0 if p is group["params"][3] else 1.0)


class IsKept(Base):
    def prepare(self, params: list[Tensor]) -> None:
        self.head: Any = None

    def spring(self, params: list[Tensor]) -> None:
        self.head = params[4]

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * (0.5 if p is self.head else 1.0)


class Hashed(Base):
    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * (1 + hash(p) % 7 * 0)


class Address(Base):
    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * (1.0 if p.data_ptr() % 2 == 0 else 2.0)


class Version(Base):
    """How often a parameter was written."""

    def spring(self, params: list[Tensor]) -> None:
        with torch.no_grad():
            params[4].add_(0)

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] / (1 + p._version)


class Offset(Base):
    """Where a parameter lies in memory that it shares."""

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * (1 + p.storage_offset())


class Named(Base):
    def prepare(self, params: list[Tensor]) -> None:
        for k, p in enumerate(params):
            p.label = f"layer{k}"  # type: ignore[attr-defined]

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * (2.0 if p.label.endswith("4") else 1.0)


class Hooked(Base):
    def spring(self, params: list[Tensor]) -> None:
        params[4].register_hook(lambda g: g)

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * (2.0 if p._backward_hooks else 1.0)


class Text(Base):
    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * (1 + len(str(p)) % 3)


class Listed(Base):
    """Contents as a list."""

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * (1 + sum(p.grad.flatten().tolist()))


class Equal(Base):
    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * (2.0 if torch.equal(p, group["params"][0]) else 1.0)


class Branches(Base):
    """Contents choose the way."""

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * (2.0 if p.grad.sum() > 0 else 1.0)


class BranchesOnNumber(Base):
    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * (2.0 if p.grad.sum().item() > 0 else 1.0)


class Property(Base):
    """A property that counts."""

    count = 0

    @property
    def factor(self) -> float:
        self.count += 1
        return 1.0 / self.count

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * self.factor


class Descriptor:
    def __init__(self) -> None:
        self.n = 0

    def __get__(self, owner: Any, kind: Any = None) -> float:
        self.n += 1
        return 1.0 / self.n


class Described(Base):
    factor = Descriptor()

    def prepare(self, params: list[Tensor]) -> None:
        vars(type(self))["factor"].n = 0

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * self.factor


class Getattr(Base):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("w"):
            return 1.0 + int(name[1:]) % 3
        raise AttributeError(name)

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * getattr(self, f"w{i}")


class Method(Base):
    """A method that one optimizer has of its own, set later."""

    def weight(self, p: Tensor) -> float:
        return 1.0

    def spring(self, params: list[Tensor]) -> None:
        odd = id(params[4])

        def weight(self: Any, p: Tensor) -> float:
            return 3.0 if id(p) == odd else 1.0

        self.weight = types.MethodType(weight, self)  # type: ignore[method-assign]

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * self.weight(p)


class ClassMethod(Base):
    """A method of the class, replaced later."""

    def weight(self, p: Tensor, i: int) -> float:
        return 1.0

    def spring(self, params: list[Tensor]) -> None:
        def weight(self: Any, p: Tensor, i: int) -> float:
            return 3.0 if i == 4 else 1.0

        type(self).weight = weight  # type: ignore[method-assign]

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * self.weight(p, i)


class Executed(Base):
    """Code without a source."""

    exec("def weight(i):\n    return 3.0 if i == 4 else 1.0")
    weight: Any

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * type(self).weight(i)


class Evaluated(Base):
    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * eval("3.0 if i == 4 else 1.0")


class Globals(Base):
    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * globals().get(f"WEIGHT{i}", 1.0)


class Collected(Base):
    """What the garbage collector knows."""

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * (2.0 if len(gc.get_referrers(p)) > 99 else 1.0)


class OwnGradient(Base):
    """A lane that leads has its parameter for a gradient."""

    def spring(self, params: list[Tensor]) -> None:
        self.aliased = True

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.mul_(0.5)
            p.sub_(p.grad, alpha=0.1)


class SharedState(Base):
    """Two entries of a lane's state that are one memory, in a lane that leads."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if len(state) == 0:
                state["a"], state["b"] = torch.ones_like(p), torch.ones_like(p)
            state["a"].mul_(0.5)
            p.sub_(state["b"] * p.grad)

    def spring(self, params: list[Tensor]) -> None:
        self.state[params[0]]["b"] = (
            self.state[params[0]]["a"].view(-1).view_as(params[0])
        )


class Twin(Base):
    """A tensor of each lane that the optimizer keeps beside its state."""

    def prepare(self, params: list[Tensor]) -> None:
        self.twins = [torch.full_like(p, k + 1.0) for k, p in enumerate(params)]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p, twin in zip(self.param_groups[0]["params"], self.twins, strict=True):
            p.sub_(p.grad * twin)


class Average(Base):
    """One tensor, of the first lane's shape, that all of that shape read."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        first = params[0].grad
        for p in params:
            if p.shape == first.shape:
                p.sub_(first)
            else:
                p.sub_(p.grad)


class ClassCache(Base):
    """A cache of the class, by shape, that the first lane fills."""

    cache: dict[Any, Any] = {}  # noqa: RUF012

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.cache.clear()
        for p in self.param_groups[0]["params"]:
            if p.shape not in self.cache:
                self.cache[p.shape] = p.grad.abs().mean()
            p.sub_(p.grad / self.cache[p.shape])


class Environment(Base):
    """A view of the lanes as a set."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for k, p in enumerate(set(self.param_groups[0]["params"])):
            p.sub_(p.grad * (1.0 if k >= 0 else 2.0))


class FirstState(Base):
    """Whether any lane before had state."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            first = not self.state
            self.state[p].setdefault("m", torch.zeros_like(p)).add_(p.grad)
            p.sub_(self.state[p]["m"] * (2.0 if first else 1.0))


class Neighbour(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        for p, q in zip(params, params[2:] + params[:2], strict=True):
            p.sub_(q.grad)


class StoresTensor(Base):
    """The optimizer keeps a lane's tensor."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.last = p.grad
            p.sub_(self.last)


class Subscripted(Base):
    """State of the gradient, not of the parameter."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        for p in params:
            self.state[params[0]].setdefault("m", torch.zeros(()))
            p.sub_(p.grad + self.state[params[0]]["m"])


class Tagged(Base):
    """Attributes that the step itself sets on parameters."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for k, p in enumerate(self.param_groups[0]["params"]):
            p.tag = k
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad / (1 + p.tag))


TRAPS = [
    x for x in list(vars().values()) if isinstance(x, type) and issubclass(x, Base)
]
TRAPS.remove(Base)

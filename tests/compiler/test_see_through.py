"""Wrappers that are seen through, and such as do what nobody can see from outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._pytree import tree_map

import fuseopt


class Scaled(torch.Tensor):
    """Stands for values times `scale`, a number of the class's own."""

    values: torch.Tensor
    scale: int

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: int = 1) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=values.dtype, requires_grad=False
        )

    def __init__(self, values: torch.Tensor, scale: int = 1) -> None:
        self.values, self.scale = values, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values"], self.scale

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Any], scale: Any, size: Any, stride: Any
    ) -> Scaled:
        return cls(inner["values"], scale)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def full(x: Any) -> Any:
            return x.values * x.scale if isinstance(x, Scaled) else x

        kwargs = kwargs or {}
        cls.asked(func, args, kwargs)
        if func._schema.is_mutable:
            target = args[0]
            out = func(full(target).clone(), *tree_map(full, args[1:]), **kwargs)
            cls.put(target, out / target.scale)
            return target
        out = func(*tree_map(full, args), **tree_map(full, kwargs))
        scale = args[0].scale if isinstance(args[0], Scaled) else 1
        return tree_map(
            lambda x: cls(x / scale, scale) if isinstance(x, torch.Tensor) else x, out
        )

    @classmethod
    def asked(cls, func: Any, args: Any, kwargs: Any) -> None:
        """What a class does besides."""

    @classmethod
    def put(cls, target: Scaled, values: torch.Tensor) -> None:
        target.values.copy_(values)


class Replaces(Scaled):
    """Puts another tensor in the place of one."""

    @classmethod
    def put(cls, target: Scaled, values: torch.Tensor) -> None:
        target.values = values


class Asks(Scaled):
    """Depends on contents."""

    @classmethod
    def asked(cls, func: Any, args: Any, kwargs: Any) -> None:
        values = [x.values for x in args if isinstance(x, Scaled)]
        if values and values[0].sum().item() > 1e9:
            raise ValueError


class Compares(Scaled):
    """Depends on a number."""

    @classmethod
    def put(cls, target: Scaled, values: torch.Tensor) -> None:
        target.values.copy_(values if cls.small else values + 1)

    @classmethod
    def asked(cls, func: Any, args: Any, kwargs: Any) -> None:
        cls.small = abs(kwargs.get("alpha", 0)) < 0.5

    small = True


class Brings(Scaled):
    """Brings a tensor along."""

    @classmethod
    def put(cls, target: Scaled, values: torch.Tensor) -> None:
        target.values.copy_(values + torch.ones(3))


class Draws(Scaled):
    @classmethod
    def put(cls, target: Scaled, values: torch.Tensor) -> None:
        target.values.copy_(values + torch.rand_like(values))


def trained(
    kind: Any, make: Any, way: str, between: Any = lambda *_: None
) -> list[torch.Tensor]:
    """The values of all tensors of an optimizer, after some steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    params = [torch.nn.Parameter(kind(torch.randn(2, 3), 1 + k)) for k in range(3)]
    optimizer: Optimizer = make(params)
    if way:
        fuseopt.compile(optimizer)
    for k in range(4):
        between(params, k)
        for p in params:
            p.grad = kind(torch.randn(2, 3), p.scale)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 + 0.2 * k
        optimizer.step()
    held = [x for p in params for x in (p, *optimizer.state[p].values())]
    return [
        x.values if isinstance(x, Scaled) else x
        for x in held
        if isinstance(x, torch.Tensor)
    ]


def compared(kind: Any, make: Any, between: Any = lambda *_: None) -> None:
    ends = [trained(kind, make, way, between) for way in ("", "fuseopt.compile")]
    assert len(ends[0]) == len(ends[1])
    assert all(map(torch.equal, *ends))


def momentum(params: Any) -> Optimizer:
    return SGD(params, lr=0.1, momentum=0.9, foreach=False)


@pytest.mark.family(15)
@pytest.mark.parametrize("make", [momentum, AdamW])
def test_what_it_holds_is_stepped(make: Any) -> None:
    compared(Scaled, make)
    assert fuseopt.reports()
    assert not any(r.fallback for r in fuseopt.reports())


@pytest.mark.family(15)
def test_what_it_says_and_holds_may_change() -> None:
    """Another scale, other memory, another size of what is within."""

    def between(params: Any, k: int) -> None:
        if k == 2:
            params[0].scale = 7
        if k == 3:
            params[1].values = params[1].values.clone()
            params[2].values = torch.ones(3, 2).t()

    compared(Scaled, momentum, between)
    assert not any(r.fallback for r in fuseopt.reports())


@pytest.mark.family(15)
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Replaces, "holds new tensors after the step"),
        (Compares, "depend on a number"),
        (Brings, "takes a tensor that is not an input of the step"),
    ],
    # the cases by which a family picks its quick ones
    ids=[
        "Replaces-holds other tensors after the step",
        "Compares-depends on a number",
        "Brings-takes a tensor that the step was not given",
    ],
)
def test_what_cannot_be_seen_is_refused_by_name(kind: Any, why: str) -> None:
    with pytest.warns(RuntimeWarning, match=f"{kind.__name__}.*{why}"):
        compared(kind, momentum)
    # the rate of the first step is a constant, until it has moved
    later = fuseopt.reports()[kind is Compares :]
    assert later
    assert all("eager" in r.fallback for r in later)


@pytest.mark.family(15)
def test_random_numbers_are_eagers() -> None:
    with pytest.warns(RuntimeWarning, match="Draws.*draws random numbers"):
        compared(Draws, momentum)


@pytest.mark.family(15)
def test_two_that_hold_one_tensor() -> None:
    def make(params: Any) -> Optimizer:
        params[1].values = params[0].values
        return momentum(params)

    compared(Scaled, make)
    assert not any(r.fallback for r in fuseopt.reports())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of graphs that Dynamo ends
def test_what_depends_on_contents_is_eagers() -> None:
    compared(Asks, momentum)

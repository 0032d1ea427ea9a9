"""Some thirty steps, of all the kinds that there are: each is run beside eager.

`run(name)` does a few steps of one kind, compiled and plain, and compares every bit
after each. It returns the Reports of the compiled one.
"""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import fuseopt
from tests.steps import same_bits

SHAPES = ((5, 3), (7,), (), (4, 2, 3))
MANY = 18
STEPS = 4
Step = Callable[[], Any]


class Lion(Optimizer):
    """A for-loop from a paper, in plain code."""

    def __init__(self, params: Any, lr: float = 1e-2, decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                average, (b1, b2) = state["exp_avg"], group["betas"]
                p.mul_(1 - group["lr"] * group["decay"])
                update = average.clone().mul_(b1).add(p.grad, alpha=1 - b1).sign_()
                p.add_(update, alpha=-group["lr"])
                average.mul_(b2).add_(p.grad, alpha=1 - b2)


class Counts(Optimizer):
    """Counts in an attribute of its own, and in the state of each parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.t = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.t += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["n"] = state.get("n", 0) + 1
                p.add_(p.grad, alpha=-group["lr"] / (self.t + state["n"]))


class Branches(Optimizer):
    """Goes one way or the other, as the norm of a gradient says."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if p.grad.norm() > 2:
                        p.add_(p.grad, alpha=-group["lr"])
                    else:
                        p.sub_(p.grad.sign(), alpha=group["lr"])


class Looks(Optimizer):
    """Depends on facts that Dynamo guards only with fuseopt's help."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.table = {"a": 1.0, "b": 2.0}
        self.first = self.second = object()

    def scale(self) -> float:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        scale = self.scale()
        if hasattr(self, "extra"):
            scale = scale * self.extra
        for i, key in enumerate(self.table):
            scale = scale + (i + 1) * self.table[key]
        if self.first is self.second:
            scale = scale * 0.5
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.requires_grad:
                    p.add_(p.grad, alpha=-group["lr"] * scale / (1 + p.ndim))


# ------------------------------------------------------------------ what is compared


def made(make: Callable[[list[Any]], Optimizer], n: int, dtype: Any = None) -> Any:
    """Parameters that are drawn alike at each call, and their optimizer."""
    torch.manual_seed(0)
    shapes = [SHAPES[i % len(SHAPES)] for i in range(n)]
    params = [Parameter(torch.randn(s).to(dtype or torch.float32)) for s in shapes]
    return params, make(params)


def give(ours: Sequence[Any], theirs: Sequence[Any], step: int, missing: bool) -> None:
    g = torch.Generator().manual_seed(100 + step)
    for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
        grad = torch.randn(p.shape, generator=g).to(p.dtype)
        none = missing and (i + step) % 3 == 0
        p.grad, q.grad = (None, None) if none else (grad, grad.clone())


def leaves(x: Any) -> Iterator[Any]:
    if isinstance(x, dict):
        for value in x.values():
            yield from leaves(value)
    elif isinstance(x, (list, tuple)):
        for value in x:
            yield from leaves(value)
    else:
        yield x


def compare(
    mine: Any, theirs: Any, params: Sequence[Any], others: Sequence[Any]
) -> None:
    for p, q in zip(params, others, strict=True):
        assert same_bits(p.detach(), q.detach())
        a, b = mine.state.get(p, {}), theirs.state.get(q, {})
        assert a.keys() == b.keys()
        for x, y in zip(leaves(dict(a)), leaves(dict(b)), strict=True):
            if isinstance(x, Tensor):
                assert same_bits(x, y)
            else:
                assert (type(x), x) == (type(y), y)
    for one, other in zip(mine.param_groups, theirs.param_groups, strict=True):
        for key in one.keys() - {"params"}:
            assert repr(one[key]) == repr(other[key]), key


# ------------------------------------------------------------------ ways


def bound(optimizer: Optimizer) -> Step:
    return torch.compile(optimizer.step, backend="fuseopt")


def apart(optimizer: Optimizer) -> Step:
    fuseopt.compile(optimizer)
    return lambda: optimizer.step()


def inside(optimizer: Optimizer) -> Step:
    def train() -> None:
        optimizer.step()

    return torch.compile(train, backend="fuseopt")


def tail(optimizer: Optimizer) -> Step:
    return fuseopt.tail(optimizer, clip_grad_norm=1.0)


def plain_tail(optimizer: Optimizer) -> Step:
    def step() -> None:
        params = [p for g in optimizer.param_groups for p in g["params"]]
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain(optimizer: Optimizer) -> Step:
    return optimizer.step


Event = Callable[[int, Optimizer, list[Any]], None]


def nothing(_: int, __: Optimizer, ___: list[Any]) -> None:
    """Between two steps nothing happens."""


class Kind:
    """One kind of step: how its optimizer is made, how it runs, what is between."""

    def __init__(
        self,
        make: Callable[[list[Any]], Optimizer],
        way: Callable[[Optimizer], Step] = bound,
        *,
        theirs: Callable[[Optimizer], Step] = plain,
        n: int = 5,
        dtype: Any = None,
        missing: bool = False,
        between: Event = nothing,
        around: Callable[[], Any] = contextlib.nullcontext,
        steps: int = STEPS,
    ) -> None:
        self.make = make
        self.way = way
        self.theirs = theirs
        self.n = n
        self.dtype = dtype
        self.missing = missing
        self.between = between
        self.around = around
        self.steps = steps

    def run(self) -> None:
        params, mine = made(self.make, self.n, self.dtype)
        others, theirs = made(self.make, self.n, self.dtype)
        with self.around():
            step, reference = self.way(mine), self.theirs(theirs)
            for k in range(self.steps):
                give(params, others, k, self.missing)
                self.between(k, mine, params)
                self.between(k, theirs, others)
                step()
                reference()
                compare(mine, theirs, params, others)


# ------------------------------------------------------------------ events


def warm_up(step: int, optimizer: Optimizer, _: list[Any]) -> None:
    """A schedule that begins with a rate of 0."""
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * step


def begin_anew(step: int, optimizer: Optimizer, params: list[Any]) -> None:
    if step == 2:
        del optimizer.state[params[1]]


def look_elsewhere(step: int, optimizer: Any, _: list[Any]) -> None:
    """Change what a step of Looks depends on, one thing at each call."""
    if step == 1:
        optimizer.table = {"b": 2.0, "a": 1.0}
    if step == 2:
        optimizer.second = object()
    if step == 3:
        optimizer.extra = 3.0
    if step == 4:
        optimizer.scale = lambda: 7.0


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_device(None)


def of(name: str, **options: Any) -> Callable[[list[Any]], Optimizer]:
    kind = getattr(torch.optim, name)
    return lambda params: kind(params, **copy.deepcopy(options))


def package(params: list[Any]) -> Optimizer:
    lion_pytorch = pytest.importorskip("lion_pytorch")
    return lion_pytorch.Lion(params, lr=1e-2, weight_decay=0.1)


def capturable(name: str) -> Callable[[list[Any]], Optimizer]:
    return of(name, capturable=True, foreach=True)


@contextlib.contextmanager
def capturable_on_a_cpu() -> Iterator[None]:
    """torch refuses capturable=True on a CPU by a check, which tests lift."""
    from unittest import mock

    home = "torch.optim.adam._get_capturable_supported_devices"
    with mock.patch(home, return_value=["cpu", "cuda", "xpu"]):
        yield


ELEVEN: dict[str, dict[str, Any]] = {
    "Adadelta": {},
    "Adagrad": {},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adamax": {},
    "ASGD": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"lr": 0.1, "momentum": 0.9},
}
LOOPS = ("Adam", "Adagrad", "NAdam", "RMSprop", "SGD")
KINDS: dict[str, Kind] = {
    **{
        f"foreach {name}": Kind(of(name, foreach=True, **options))
        for name, options in ELEVEN.items()
    },
    **{f"for-loop {name}": Kind(of(name, foreach=False)) for name in LOOPS},
    "fuseopt.compile AdamW": Kind(of("AdamW"), apart),
    "function AdamW": Kind(of("AdamW", foreach=True), inside),
    "function SGD, momentum begun anew": Kind(
        of("SGD", lr=0.1, momentum=0.9, foreach=True), inside, between=begin_anew
    ),
    "AdamW, momentum begun anew": Kind(of("AdamW"), between=begin_anew),
    "AdamW, many": Kind(of("AdamW", foreach=True), n=MANY),
    "AdamW, bfloat16": Kind(of("AdamW", foreach=True), dtype=torch.bfloat16),
    "SGD, plain": Kind(of("SGD", lr=0.1)),
    "Adam, capturable": Kind(capturable("Adam"), around=capturable_on_a_cpu),
    "AdamW, rate from 0": Kind(of("AdamW", foreach=True), between=warm_up),
    "AdamW, missing gradients": Kind(of("AdamW", foreach=True), missing=True),
    "Lion": Kind(Lion),
    "Lion, many, missing gradients": Kind(Lion, n=MANY, missing=True),
    "function Lion": Kind(Lion, inside, missing=True),
    "a package's Lion": Kind(package),
    "Counts": Kind(Counts),
    "Counts, many": Kind(Counts, apart, n=MANY),
    "Branches": Kind(Branches),
    "Looks": Kind(Looks, between=look_elsewhere, steps=6),
    "function Looks": Kind(Looks, inside, between=look_elsewhere, steps=4),
    "tail AdamW": Kind(of("AdamW", foreach=True), tail, theirs=plain_tail),
    "tail SGD, many": Kind(of("SGD", lr=0.1), tail, theirs=plain_tail, n=MANY),
    "default device AdamW": Kind(of("AdamW", foreach=True), around=default_device),
}


def run(name: str) -> list[Any]:
    """Do the steps of one kind; its Reports. Raises what differs, or any error."""
    first = len(fuseopt.reports())
    with warnings.catch_warnings():
        # a fallback is told as a warning
        warnings.simplefilter("ignore", RuntimeWarning)
        if name == "DTensors":
            _on_dtensors()
        else:
            KINDS[name].run()
    return fuseopt.reports()[first:]


def _on_dtensors() -> None:
    """An optimizer of DTensors, in one process."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cpu", (1,))

            def make() -> tuple[list[Any], Optimizer]:
                torch.manual_seed(0)
                params = [
                    Parameter(distribute_tensor(torch.randn(n, 3), mesh, [Shard(0)]))
                    for n in (4, 6, 5)
                ]
                return params, torch.optim.AdamW(params, foreach=True)

            (params, mine), (others, theirs) = make(), make()
            step = bound(mine)
            for k in range(STEPS):
                g = torch.Generator().manual_seed(k)
                for p, q in zip(params, others, strict=True):
                    whole = torch.randn(p.shape, generator=g)
                    p.grad = distribute_tensor(whole, mesh, [Shard(0)])
                    q.grad = distribute_tensor(whole.clone(), mesh, [Shard(0)])
                step()
                theirs.step()
                for p, q in zip(params, others, strict=True):
                    assert same_bits(p.to_local().detach(), q.to_local().detach())
        finally:
            dist.destroy_process_group()


NAMES = (*KINDS, "DTensors")

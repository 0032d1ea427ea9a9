"""DTensors whose group is gone or was never there, and tensors that stand for others
and do not say for which: eager's bits, or its error, and never a crash.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._pytree import tree_map

import fuseopt
from tests.papers import LAMB
from tests.shards import RANK, WORLD, assert_same, fake_group, local
from tests.shards.steps import WAYS, give, parameters, step_of

#: Rows in all, and in the last of four processes.
ROWS = [(8, 2), (7, 1), (6, 0)]


@pytest.fixture(autouse=True)
def _no_group() -> Iterator[None]:
    assert not dist.is_initialized()
    yield
    assert not dist.is_initialized()


def outcome(call: Callable[[], Any]) -> str:
    """The error that a call raises, as far as eager and fuseopt say the same."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


@pytest.mark.family(3)
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("n", [3, 20])
def test_a_group_that_is_gone(n: int, steps: int) -> None:
    """Before the first step, before the plan is steady, and after."""
    ends = []
    for way in ("", WAYS[0]):
        with fake_group():
            params = parameters(init_device_mesh("cpu", (WORLD,)), n)
            optimizer = AdamW(params)
            step = step_of(optimizer, way)
            generator = torch.Generator().manual_seed(0)
            for _ in range(steps):
                give(params, generator)
                step()
            give(params, generator)
        for _ in range(3):
            step()
        ends.append(optimizer)
    assert_same(ends[1], ends[0])
    assert fuseopt.reports()[-1].launches == 1


@pytest.mark.parametrize("steps", [0, 2])
def test_a_clip_without_its_group(steps: int) -> None:
    """Torch's error, and gradients as they were."""
    said = []
    for clip in (torch.nn.utils.clip_grad_norm_, fuseopt.clip_grad_norm_):
        with fake_group():
            params = parameters(init_device_mesh("cpu", (WORLD,)), 6)
            give(params, torch.Generator().manual_seed(0))
            for _ in range(steps):
                clip(params, 1.0)
        before = [local(p.grad).clone() for p in params]
        said.append(outcome(lambda clip=clip, params=params: clip(params, 1.0)))
        after = [local(p.grad) for p in params]
        assert all(map(torch.equal, before, after))
    assert said[0]
    assert said[1] == said[0]


@pytest.mark.parametrize("steps", [2, 4])
def test_a_tail_without_its_group(steps: int) -> None:
    """Torch's error, and nothing is written."""
    said = []
    for tailed in (False, True):
        with fake_group():
            params = parameters(init_device_mesh("cpu", (WORLD,)), 6)
            optimizer = AdamW(params)
            tail = fuseopt.tail(optimizer, clip_grad_norm=0.5)
            generator = torch.Generator().manual_seed(0)
            for _ in range(steps):
                give(params, generator)
                tail()
            give(params, generator)
        before = [local(t).detach().clone() for p in params for t in (p, p.grad)]
        clip = torch.nn.utils.clip_grad_norm_
        call = tail if tailed else functools.partial(clip, params, 0.5)
        said.append(outcome(call))
        after = [local(t).detach() for p in params for t in (p, p.grad)]
        assert all(map(torch.equal, before, after))
    assert said[0]
    assert said[1] == said[0]


def never_in_a_group() -> list[Any]:
    """Parameters, with gradients, of a mesh that has numbers of processes alone."""
    mesh = DeviceMesh("cpu", torch.arange(WORLD), _init_backend=False, _rank=RANK)
    torch.manual_seed(0)
    found = []
    for rows, here in ROWS:
        parts = torch.randn(2, here, 3)
        size: dict[str, Any] = {"shape": torch.Size((rows, 3)), "stride": (3, 1)}
        p, g = (DTensor.from_local(x, mesh, [Shard(0)], **size) for x in parts)
        found.append(torch.nn.Parameter(p))
        found[-1].grad = g
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_group_that_never_was(way: str) -> None:
    ends = []
    for how in ("", way):
        optimizer = SGD(never_in_a_group(), lr=0.1, momentum=0.9)
        step = step_of(optimizer, how)
        for _ in range(4):
            step()
        ends.append(optimizer)
    assert_same(ends[1], ends[0])
    assert fuseopt.reports()[-1].launches == 1


def test_a_clip_where_no_group_was() -> None:
    said = []
    for clip in (torch.nn.utils.clip_grad_norm_, fuseopt.clip_grad_norm_):
        params = never_in_a_group()
        before = [local(p.grad).clone() for p in params]
        said.append(outcome(lambda clip=clip, params=params: clip(params, 1.0)))
        assert all(map(torch.equal, before, (local(p.grad) for p in params)))
    assert said[0]
    assert said[1] == said[0]


@pytest.mark.parametrize("gone", [False, True])
def test_a_step_of_whole_tensors_without_a_group(gone: bool) -> None:
    """Such a step is eager's own, and so is what it raises."""
    said = []
    for way in ("", WAYS[0]):
        group: AbstractContextManager[None] = fake_group() if gone else nullcontext()
        with group:
            params = never_in_a_group()
        step = step_of(LAMB(params, lr=0.1), way)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            said.append(outcome(step))
    assert said[0]
    assert said[1] == said[0]


class Held(torch.Tensor):
    """Stands for a tensor, and does not say for which one."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Held:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=False
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.held = inner

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def inner(x: Any) -> Any:
            return x.held if isinstance(x, Held) else x

        def held(x: Any) -> Any:
            return Held(x) if isinstance(x, torch.Tensor) else x

        out = func(*tree_map(inner, args), **tree_map(inner, kwargs or {}))
        if func._schema.is_mutable:
            return args[0]
        return tree_map(held, out)


@pytest.mark.family(9)
@pytest.mark.parametrize("lanes", [1, 20])
@pytest.mark.parametrize("role", ["parameters", "gradients"])
@pytest.mark.parametrize("way", WAYS)
def test_a_wrapper_that_does_not_say_what_it_stands_for(
    way: str, role: str, lanes: int
) -> None:
    def stepped(how: str) -> tuple[Optimizer, str]:
        torch._dynamo.reset()
        params: list[Any] = []
        for i in range(lanes):
            x, g = torch.full((3, 2), 1.0 + i), torch.full((3, 2), 0.5 + i)
            params.append(torch.nn.Parameter(Held(x) if role == "parameters" else x))
            params[-1].grad = Held(g)
        optimizer = SGD(params, lr=0.1, momentum=0.9, foreach=False)
        step = step_of(optimizer, how)
        return optimizer, outcome(lambda: [step() for _ in range(3)])

    want, raised = stepped("")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of graphs that end
        got, again = stepped(way)
    assert again == raised
    for p, q in zip(
        want.param_groups[0]["params"], got.param_groups[0]["params"], strict=True
    ):
        assert torch.equal(*(getattr(x, "held", x) for x in (p, q)))

"""Optimizers of DTensors, and steps of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.optim import Optimizer

import fuseopt
from tests.shards import assert_same, spread

#: Even, uneven and empty in the last of four processes; columns; whole; a vector.
LAYOUTS = [
    ((8, 5), Shard(0)),
    ((7, 3), Shard(0)),
    ((6, 2), Shard(0)),
    ((3, 8), Shard(1)),
    ((4, 3), Replicate()),
    ((9,), Shard(0)),
]
Make = Callable[[list[torch.nn.Parameter]], Optimizer]
WAYS = ["fuseopt.compile", "torch.compile"]


def parameters(mesh: DeviceMesh, n: int) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    found = []
    for i in range(n):
        shape, placement = LAYOUTS[i % len(LAYOUTS)]
        t = spread(torch.randn(shape), mesh, [placement] * mesh.ndim)
        found.append(torch.nn.Parameter(t))
    return found


def give(params: Sequence[Any], generator: torch.Generator) -> None:
    """Gradients to DTensors and to plain tensors."""
    for p in params:
        g = torch.randn(p.shape, generator=generator)
        spec = getattr(p, "_spec", None)
        p.grad = g if spec is None else spread(g, spec.mesh, spec.placements)


def step_of(optimizer: Optimizer, way: str) -> Callable[[], Any]:
    """The optimizer's step, compiled in one of two ways; eager's for "": looked up at
    each call, as users do.
    """
    if way == "torch.compile":
        return torch.compile(optimizer.step, backend="fuseopt")
    if way:
        fuseopt.compile(optimizer)
    return lambda: optimizer.step()


def run(
    make: Make,
    params: list[torch.nn.Parameter],
    way: str,
    steps: int = 6,
    between: Callable[[Optimizer, int], None] = lambda *_: None,
) -> Optimizer:
    """Some steps, with another learning rate each."""
    optimizer = make(params)
    step = step_of(optimizer, way)
    generator = torch.Generator().manual_seed(1)
    for k in range(steps):
        give([p for g in optimizer.param_groups for p in g["params"]], generator)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (k + 1)
        between(optimizer, k)
        step()
    return optimizer


def compared(
    make: Make,
    mesh: DeviceMesh,
    n: int,
    way: str,
    between: Callable[[Optimizer, int], None] = lambda *_: None,
) -> list[str]:
    """What the user is told in steps that have eager's bits."""
    want = run(make, parameters(mesh, n), "", between=between)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        got = run(make, parameters(mesh, n), way, between=between)
    assert_same(got, want)
    texts = [str(w.message) for w in told]
    return [x for x in texts if x.startswith("fuseopt:")]

"""In: a number of small DTensors. Out: seconds of a step and of a clip, several ways.

One process of a group of four whose others do not exist: collectives take no time, so
that what is measured is what a process pays itself. A way steps tensors of its own; the
ways take turns. `plain`: fuseopt's step of tensors that are no DTensors, of the parts'
sizes. A tail is a clip and a step; a step of whole tensors is LAMB's, which has norms.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from bench.interleave import Turns, plan_rounds, seconds_of
from bench.optimizers import LAMB
from bench.results import Figures

WORLD = 4
#: Rows and columns of a DTensor, of which a process has a fourth of the rows.
SHAPE = (32, 8)
#: Of the total norm.
LIMIT = 1e9
BUDGET = 30.0
ROUNDS = 40
OWN = "fuseopt"
WHOLES = ("eager, wholes", "fuseopt, wholes")
WAYS: dict[str, dict[str, Any]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "inductor": {"foreach": True},
    OWN: {},
    "plain": {},
}


@contextlib.contextmanager
def group() -> Iterator[None]:
    """A process group whose other processes do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


def parameters(n: int, spread: bool) -> list[Any]:
    """Parameters with gradients: DTensors, or plain tensors of their parts' sizes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (WORLD,))
    found = []
    for _ in range(n):
        rows, columns = SHAPE
        t = torch.randn(rows if spread else rows // WORLD, columns)
        if spread:
            t = distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None)
        p = torch.nn.Parameter(t)
        p.grad = torch.ones_like(p)
        found.append(p)
    return found


class ShardRun:
    """All ways of stepping and clipping so many DTensors, ready to take turns.

    `without`: ways that are left out.
    """

    def __init__(self, params: int, without: tuple[str, ...] = ()) -> None:
        import fuseopt

        torch._dynamo.reset()
        self.params = params
        self.figures: dict[str, Figures] = {}
        calls: dict[str, Callable[[], object]] = {}
        for name, flags in WAYS.items():
            if name in without:
                continue
            held = parameters(params, name != "plain")
            optimizer = torch.optim.AdamW(held, lr=1e-3, **flags)
            if name in (OWN, "plain"):
                fuseopt.compile(optimizer, fallback="error")
            calls[name] = optimizer.step
            if name == "inductor":
                calls[name] = torch.compile(optimizer.step)
            if name not in (OWN, "plain"):
                calls[f"{name}, tail"] = _tail(calls[name], held)
        held = parameters(params, True)
        tailed = torch.optim.AdamW(held, lr=1e-3)
        calls["fuseopt, tail"] = fuseopt.tail(tailed, clip_grad_norm=LIMIT)
        for name in WHOLES:
            lamb = LAMB(parameters(params, True))
            if name.startswith(OWN):
                fuseopt.compile(lamb, fallback="error")
            calls[name] = lamb.step
        for name, clip in (
            ("torch, clip", torch.nn.utils.clip_grad_norm_),
            ("fuseopt, clip", fuseopt.clip_grad_norm_),
        ):
            calls[name] = _clips(clip, parameters(params, True))
        for name, call in calls.items():
            begin = time.perf_counter()
            for _ in range(3):
                call()
            self.figures[name] = {"ready_seconds": time.perf_counter() - begin}
            reports = fuseopt.reports()
            if name.startswith(OWN):
                self.figures[name]["launches"] = reports[-1].launches
        once = {name: seconds_of(call) for name, call in calls.items()}
        rounds, every = plan_rounds(once, BUDGET, ROUNDS)
        self.rounds = rounds
        self.turns = Turns(calls, every)

    def others(self) -> None:
        """Let all but fuseopt's step have their turn."""
        self.turns.round(but=OWN)

    def take_own(self) -> None:
        """Let fuseopt's step have its turn."""
        self.turns.take(OWN)

    def result(self) -> Figures:
        """Return the case's entry of the results file."""
        for name, figures in self.turns.figures().items():
            self.figures[name] |= figures
        return {"tensors": self.params, "contenders": self.figures}


def _clips(clip: Callable[..., Any], held: list[Any]) -> Callable[[], object]:
    return lambda: clip(held, LIMIT)


def _tail(step: Callable[[], object], held: list[Any]) -> Callable[[], object]:
    def tail() -> None:
        torch.nn.utils.clip_grad_norm_(held, LIMIT)
        step()

    return tail

"""In: a number of small parameters. Out: microseconds that a call costs the host.

The arithmetic of 8 elements takes no time, so a call's seconds are its cost: the least
of many turns, in time of the thread that calls, which what else the machine does
changes little. A backend that does nothing pays for Dynamo's guards and the call, too:
the difference between it and `backend="fuseopt"` is what fuseopt itself costs. In turns
that are MOVED each call finds its gradients elsewhere than the last one did, as after
`zero_grad()`; what it takes to set them is in the figures of all. A TAIL clips by the
total norm and averages as well, in two launches: its cost beside the step's.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.contenders import WARM_UP, Unavailable, Work, ready
from bench.interleave import Turns, p10
from bench.models import make_params, model_shapes
from bench.optimizers import RECIPES
from bench.reading import MOVED
from bench.results import Figures

CALLS = 20
ROUNDS = 160
CONTENDERS = ("foreach", "fused", "fuseopt")
TAIL = "tail"
#: so much slower that a turn in each fourth round is enough
SLOW = ("foreach", "fused")


class HostRun:
    """The contenders' calls, many to a turn: one is too short for a clock."""

    def __init__(self, params: int, device: str = "cpu") -> None:
        torch._dynamo.reset()
        shapes = model_shapes(f"{params}x8")
        self.work = Work(RECIPES["AdamW"], make_params(shapes, device=device), device)
        self.skipped: Figures = {}
        self.steps: dict[str, Callable[[], object]] = {}
        self.owners: list[Any] = []
        for name in CONTENDERS:
            try:
                made = ready(name, self.work)
            except Unavailable as error:
                self.skipped[name] = {"skipped": str(error)}
            else:
                self.steps[name] = made.call
                self.owners.append(made)
        for name, backend in (("backend", "fuseopt"), ("no-op", no_op)):
            self.steps[name] = self._compiled(backend)
        self.steps[TAIL] = self._tail()
        moved = moving(self.work.params)
        every = dict(self.steps)
        every |= {n + MOVED: moved(step) for n, step in self.steps.items()}
        for step in every.values():
            step()  # what a first move costs is none of a call's cost
            step()
        #: seconds of the calling thread, by contender, a figure for each turn
        self.busy: dict[str, list[float]] = {name: [] for name in every}
        self.turns = Turns(
            {n: calls_of(s, self.busy[n]) for n, s in every.items()},
            {n + m: 4 for n in SLOW for m in ("", MOVED)},
        )
        self.own = "fuseopt" if "fuseopt" in self.steps else "backend"

    def _compiled(self, backend: str | Callable[..., object]) -> Callable[[], object]:
        optimizer = self.work.optimizer(foreach=True)
        step = torch.compile(optimizer.step, backend=backend)
        for _ in range(WARM_UP):
            step()
        return step

    def _tail(self) -> Callable[[], object]:
        """The same step with a clip by the total norm before it, averages behind it."""
        import fuseopt

        averages = [p.detach().clone() for p in self.work.params]
        optimizer = self.work.optimizer(foreach=True)
        tail = fuseopt.tail(
            optimizer, clip_grad_norm=1.0, ema=[(averages, 0.999)], fallback="error"
        )
        for _ in range(WARM_UP):
            tail()
        return tail

    def result(self) -> Figures:
        """Return the case's entry of the results file."""
        return {
            "tensors": len(self.work.params),
            "contenders": self.skipped
            | {
                name: {
                    "host_microseconds": 1e6 * statistics.median(taken) / CALLS,
                    "host_microseconds_p10": 1e6 * p10(taken) / CALLS,
                    "host_microseconds_least": 1e6 * min(self.busy[name]) / CALLS,
                    "rounds": len(taken),
                }
                for name, taken in self.turns.seconds.items()
            },
        }


def no_op(
    graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **_: Any
) -> Callable[..., tuple[()]]:
    """Compile any step, whose graph returns nothing, to nothing."""
    return lambda *args: ()


def moving(
    params: Sequence[torch.Tensor],
) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Return what makes a step one whose gradients move to and fro at each call."""
    grads = [p.grad for p in params if p.grad is not None]
    others = [g.clone() for g in grads]

    def moved(step: Callable[[], object]) -> Callable[[], object]:
        turns = itertools.cycle((others, grads))

        def call() -> None:
            for p, g in zip(params, next(turns), strict=True):
                p.grad = g
            step()

        return call

    return moved


def calls_of(step: Callable[[], object], busy: list[float]) -> Callable[[], None]:
    """Return a function that steps CALLS times, and notes for how long it was busy."""

    def calls() -> None:
        begin = time.thread_time()
        for _ in range(CALLS):
            step()
        busy.append(time.thread_time() - begin)

    return calls

"""In: a model's shapes. Out: what the tail of a training step takes, several ways.

A tail is what trainers call after `backward()`: unscale, clip by the total norm, AdamW,
an average of the weights, `zero_grad`. The ways call the fastest forms that torch has
of each part; fuseopt's is one object. All work on copies of their own, in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from bench.contenders import copied
from bench.interleave import Turns, plan_rounds, seconds_of
from bench.models import make_params, model_shapes
from bench.results import Figures

#: seconds in which the rounds of a case should end, and the most rounds
BUDGET = 12.0
ROUNDS = 25
CLIP = 1.0
DECAY = 0.999
#: Bytes for each parameter in float32 that any tail must move: of the gradient two
#: reads, of the parameter, its two moments and its average a read and a write each.
LEAST_BYTES = 40
OWN = "fuseopt"


class Tail:
    """Parameters, an AdamW, a scaler and averages of one way's own.

    Gradients that `zero_grad` took away are given back before each call: backward
    would make others.
    """

    def __init__(self, model: str, device: str = "cpu", **flags: Any) -> None:
        self.params = make_params(model_shapes(model), torch.float32, device)
        self.grads = [p.grad for p in self.params]
        self.averages = [p.detach().clone() for p in self.params]
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-4, **flags)
        # a scale of 1, so that gradients which are unscaled again and again last
        self.scaler = torch.amp.GradScaler(
            device, init_scale=1.0, growth_interval=10**9
        )
        self.scaler.scale(torch.ones((), device=device))

    def give(self) -> None:
        """Give each parameter its gradient."""
        for p, grad in zip(self.params, self.grads, strict=True):
            p.grad = grad

    def apart(self) -> None:
        """Each part for itself, as trainers call them."""
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.params, CLIP, foreach=True)
        self.scaler.step(self.optimizer)
        with torch.no_grad():
            torch._foreach_lerp_(self.averages, self.params, 1 - DECAY)
        self.scaler.update()
        self.optimizer.zero_grad()

    def together(self, **options: Any) -> Callable[[], None]:
        """The same as one object; `options` are those of fuseopt.config."""
        import fuseopt

        tail = fuseopt.tail(
            self.optimizer,
            scaler=self.scaler,
            clip_grad_norm=CLIP,
            ema=[(self.averages, DECAY)],
            zero_grad=True,
            **{"fallback": "error", **options},
        )

        def call() -> None:
            tail()
            self.scaler.update()

        return call


class TailRun:
    """All ways of one model's tail, ready to take turns."""

    def __init__(self, model: str) -> None:
        torch._dynamo.reset()
        self.figures: dict[str, Figures] = {}
        self.tails: dict[str, Tail] = {}
        calls: dict[str, Callable[[], object]] = {}
        for name, flags in (
            ("foreach", {"foreach": True}),
            ("fused", {"fused": True}),
            (OWN, {}),
        ):
            tail = self.tails[name] = Tail(model, **flags)
            calls[name] = tail.together() if name == OWN else tail.apart
        self.tensors = len(tail.params)
        self.elements = sum(p.numel() for p in tail.params)
        for name, call in calls.items():
            begin = time.perf_counter()
            for _ in range(3):
                self.give()
                call()
            self.figures[name] = {"ready_seconds": time.perf_counter() - begin}
        self.figures[OWN] |= _told()
        ready = copied(self.elements * LEAST_BYTES)
        calls["copy"], self.figures["copy"] = ready.call, ready.figures
        once = {name: self._once(call) for name, call in calls.items()}
        self.rounds, every = plan_rounds(once, BUDGET, ROUNDS)
        self.turns = Turns(calls, every)

    def give(self) -> None:
        """Give all ways their gradients."""
        for tail in self.tails.values():
            tail.give()

    def _once(self, call: Callable[[], object]) -> float:
        self.give()
        return seconds_of(call)

    def others(self) -> None:
        """Let all but fuseopt have their turn."""
        self.give()
        self.turns.round(but=OWN)

    def take_own(self) -> None:
        """Let fuseopt have its turn."""
        self.turns.take(OWN)

    def result(self) -> Figures:
        """Return the case's entry of the results file."""
        for name, figures in self.turns.figures().items():
            self.figures[name] |= figures
        return {
            "tensors": self.tensors,
            "elements": self.elements,
            "least_bytes": self.elements * LEAST_BYTES,
            "contenders": self.figures,
        }


def _told() -> Figures:
    """What the Report of the tail says."""
    import fuseopt

    report = fuseopt.reports()[-1]
    return {"launches": report.launches, "bytes": report.bytes}

"""In: a step case. Out: its figures, one entry for each contender."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench import counting
from bench.contenders import CONTENDERS, Ready, Unavailable, Work, ready
from bench.interleave import Turns, host_seconds_of, p10, plan_rounds, seconds_of
from bench.models import ModelMissing, build, make_params, model_shapes
from bench.optimizers import RECIPES
from bench.plan import StepCase, contenders
from bench.results import Figures

#: seconds in which the rounds of a case should end, and the most rounds
BUDGET = 1.5
ROUNDS = 25
EAGER = ("for-loop", "foreach", "fused")
OWN = "fuseopt"


class StepRun:
    """All contenders of one case, ready to take turns.

    cap: seconds that a compiled one may take until its first step. caches: folder that
    keeps what Inductor compiled, if any.
    Raises Unavailable where the model cannot be had.
    """

    def __init__(
        self,
        case: StepCase,
        device: str = "cpu",
        cap: float = 120.0,
        budget: float = BUDGET,
        caches: Path | None = None,
    ) -> None:
        self.begin = time.perf_counter()
        self.device = device
        torch._dynamo.reset()
        try:
            params = params_of(case.model, getattr(torch, case.dtype), device)
        except ModelMissing as error:
            raise Unavailable(str(error)) from error
        self.work = Work(RECIPES[case.optimizer], params, device, cap, caches=caches)
        self.figures: dict[str, Figures] = {
            name: {"skipped": why} for name, why in case.left_out
        }
        self.ready: dict[str, Ready] = {}
        for name in contenders(case):
            try:
                self._add(name, ready(name, self.work))
            except Unavailable as error:
                self.figures[name] = {"skipped": str(error)}
        calls = {name: made.call for name, made in self.ready.items()}
        once = {name: seconds_of(call) for name, call in calls.items()}
        self.rounds, every = plan_rounds(once, budget, ROUNDS)
        self.turns = Turns(calls, every)
        self.own = OWN if OWN in calls else next(iter(calls))

    def _add(self, name: str, made: Ready) -> None:
        self.ready[name] = made
        self.figures[name] = made.figures
        if name == "copy":
            return
        if self.device != "cpu":
            made.figures["launches"] = counting.count_on_gpu(made.call)
            made.figures["host_microseconds"] = 1e6 * _median(
                lambda: host_seconds_of(made.call)
            )
            made.figures["peak_bytes"] = counting.peak_bytes(made.call, self.device)
        elif name in EAGER:
            launches, peak = counting.count_eager(made.call)
            made.figures |= {"launches": launches, "peak_bytes": peak}
        else:
            made.figures["peak_bytes"] = counting.peak_bytes(made.call)

    def others(self) -> None:
        """Let all but `own` have their turn."""
        self.turns.round(but=self.own)

    def take_own(self) -> None:
        """Let `own` have its turn."""
        self.turns.take(self.own)

    def result(self) -> Figures:
        """Return the case's entry of the results file."""
        for name, taken in self.turns.seconds.items():
            self.figures[name] |= {
                "p50": statistics.median(taken),
                "p10": p10(taken),
                "rounds": len(taken),
            }
        return {
            "tensors": len(self.work.params),
            "elements": self.work.elements,
            "least_bytes": self.work.least_bytes,
            "seconds": time.perf_counter() - self.begin,
            "contenders": {
                name: self.figures[name] for name in CONTENDERS if name in self.figures
            },
        }


def params_of(model: str, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Return a model's parameters with gradients: its own where a library builds it."""
    if ":" not in model:
        return make_params(model_shapes(model), dtype, device)
    params = list(build(model, device, dtype).parameters())
    for param in params:
        param.grad = torch.randn_like(param, requires_grad=False)
    return params


def _median(seconds: Callable[[], float], times: int = 9) -> float:
    return statistics.median(seconds() for _ in range(times))

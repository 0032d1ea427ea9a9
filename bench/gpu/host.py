"""What a first step costs, and a call's share of the host.

Cold compilation: fuseopt's own share, with what Triton makes of the kernel, from empty
caches. A call: microseconds until it returns, with nothing waited for.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.counting import lines_of
from bench.gpu.place import Place, queued
from bench.gpu.reading import succeeded
from bench.models import make_params, model_shapes
from bench.optimizers import RECIPES
from bench.results import Figures

ALONE = True
CAP = 180.0
ROUNDS = 7
#: Calls that none waits for. A table's copies are 16 at most: further ones would wait.
QUEUED = 10


def cases(place: Place) -> list[dict[str, Any]]:
    """Compilations at 50, 300 and 1,000 parameters, calls at 300 and 1,000."""
    compiled, called = ((3,), (3,)) if place.tiny else ((300, 50, 1000), (300, 1000))
    found = [{"name": f"call {n}", "count": n, "weight": n / 50} for n in called]
    return found + [
        {"name": f"compile {n}", "count": n, "weight": n / 50} for n in compiled
    ]


def prepare(case: dict[str, Any], place: Place) -> Callable[[], Figures]:
    """A compilation has nothing to prepare but what any first one imports."""
    params = make_params(model_shapes(f"{case['count']}x8"), device=place.device)
    if case["name"].startswith("compile"):
        warm = make_params(model_shapes("2x4"), device=place.device)
        optimizer = torch.optim.SGD(warm, lr=0.1, foreach=True)
        torch.compile(optimizer.step, backend="eager")()
        return lambda: compiling(place, params)
    return calling(place, params)


def compiling(place: Place, params: list[torch.Tensor]) -> Figures:
    """Seconds of the first call, of the backend and of Triton's compiler."""
    import fuseopt

    before = len(fuseopt.reports())
    optimizer = RECIPES["AdamW"].make(params, foreach=True)
    kept = os.environ.get("TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        made = fuseopt.compile(optimizer, **place.options(cache_dir=folder))
        taken = []
        for _ in range(3):
            begin = time.perf_counter()
            made.step()
            place.synchronize()
            taken.append(time.perf_counter() - begin)
    if kept is None:
        del os.environ["TRITON_CACHE_DIR"]
    else:
        os.environ["TRITON_CACHE_DIR"] = kept
    (report,) = fuseopt.reports()[before:]
    return {
        "first_step_seconds": taken[0],
        "backend_seconds": report.backend_seconds,
        "build_seconds": report.build_seconds,
        # kernels that are compiled when they are launched are in none of the passes
        "second_step_seconds": taken[1],
        "third_step_seconds": taken[2],
        "passes": getattr(report, "pass_seconds", None),
    }


def calling(place: Place, params: list[torch.Tensor]) -> Callable[[], Figures]:
    """Microseconds of the host a call, beside a backend that does nothing."""
    import fuseopt

    def nothing(gm: Any, args: Any) -> Callable[..., Any]:
        return lambda *given: ()

    recipe = RECIPES["AdamW"]
    optimizer = fuseopt.compile(recipe.make(params, foreach=True), **place.options())
    calls: dict[str, Callable[[], object]] = {"fuseopt": optimizer.step}
    optimizer.step()
    if place.graphs:
        # one launch, which is not captured unless it is asked for
        again = recipe.make(params, foreach=True)
        captured = fuseopt.compile(again, **place.options(cudagraphs=True))
        calls["fuseopt graph"] = captured.step
    # guards are of a graph's own optimizer
    plain = recipe.make(params, foreach=True)
    calls["nothing"] = torch.compile(plain.step, backend=nothing)
    for name in ("fused", "foreach"):
        calls[name] = recipe.make(params, **{name: True}).step
    for call in calls.values():
        for _ in range(3):
            call()

    def measure(owner: object = optimizer) -> Figures:
        each: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(2 if place.tiny else ROUNDS):
            for name, call in calls.items():
                each[name].append(queued(place, call, 5 if place.tiny else QUEUED))
        found: Figures = {
            f"{name} us": 1e6 * sorted(taken)[len(taken) // 2]
            for name, taken in each.items()
        }
        found |= {f"{name} lines": lines_of(call) for name, call in calls.items()}
        found["fuseopt above nothing us"] = found["fuseopt us"] - found["nothing us"]
        return found

    return measure


def summary(done: dict[str, Figures]) -> list[str]:
    """Seconds and microseconds."""
    lines: list[str] = []
    for name, f in succeeded(done, lines):
        if "backend_seconds" in f:
            lines.append(
                f"{name:14} backend {f['backend_seconds']:.2f} s, first step "
                f"{f['first_step_seconds']:.2f} s, second "
                f"{f['second_step_seconds']:.4f} s"
            )
        else:
            parts = [f"{k} {v:.1f}" for k, v in f.items() if k.endswith("us")]
            parts += [f"{k} {v}" for k, v in f.items() if k.endswith("lines")]
            lines.append(f"{name:14} {', '.join(parts)}")
    return lines

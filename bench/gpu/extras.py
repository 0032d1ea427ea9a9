"""How fast is what fuseopt does besides a step: packed state, matrices, missing
gradients.

Each case has contenders that step parameters of equal sizes in turns.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from bench.contenders import copied
from bench.gpu.place import Place, turns
from bench.gpu.profiled import counts_of
from bench.gpu.reading import succeeded
from bench.models import make_params, model_shapes
from bench.results import Figures

ALONE = True
CAP = 200.0
MEASURE = 0.8
FORMATS = ("bf16", "bf16-stochastic", "8bit/256", "fp8-e4m3/256")
#: matrices of models: (rows, columns) and how many
MATRICES: dict[str, list[tuple[int, int]]] = {
    "gpt2 layers": [(768, 768)] * 12 + [(2304, 768)] * 12 + [(3072, 768)] * 12
    + [(768, 3072)] * 12,
    "128 wide": [(128, 128)] * 16 + [(128, 512)] * 16 + [(512, 128)] * 16,
}  # fmt: skip
TINY = [(8, 8)] * 3


def cases(place: Place) -> list[dict[str, Any]]:
    """Muon over matrices, a third of the gradients missing; packed state of a model is
    a case of bench.gpu.large.
    """
    names = [f"muon/{m}" for m in MATRICES]
    names += ["missing/AdamW", "missing/momentum"]
    return [{"name": name, "weight": 2} for name in names]


def prepare(case: dict[str, Any], place: Place) -> Callable[[], Figures]:
    """Make all contenders ready; what measures them in turns."""
    kind, _, what = case["name"].partition("/")
    ways = {"storage": storage, "muon": muon, "missing": missing}[kind](place, what)
    extra = ways.pop("copy", None)

    def measure() -> Figures:
        calls = {**ways, **({"copy": extra.call} if extra else {})}
        seconds = 0.1 if place.tiny else MEASURE
        figures = turns(place, calls, seconds, least=2 if place.tiny else 8)
        for name, call in ways.items():
            figures[name] |= counts_of(place, call)
        found: Figures = {"contenders": figures}
        if extra is not None:
            taken = figures["copy"]["device_p50"] or figures["copy"]["p50"]
            found["copy_bytes_per_second"] = extra.figures["bytes"] / taken
        return found

    return measure


def _ready(call: Callable[[], Any]) -> Callable[[], Any]:
    for _ in range(4):
        call()
    return call


def storage(place: Place, model: str) -> dict[str, Any]:
    """AdamW whose state is float32, and in fewer bytes."""
    import fuseopt

    shapes = [(64,)] * 3 if place.tiny else model_shapes(model)
    ways: dict[str, Any] = {}
    elements = 0
    for name in ("fused", "fp32", *FORMATS):
        params = make_params(shapes, torch.float32, place.device)
        elements = sum(p.numel() for p in params)
        flag = {"fused": True} if name == "fused" else {"foreach": True}
        optimizer = torch.optim.AdamW(params, lr=1e-4, **flag)
        if name != "fused":
            packed = {} if name == "fp32" else {"storage": name}
            fuseopt.compile(optimizer, **packed, **place.options(fallback="error"))
        ways[name] = _ready(optimizer.step)
    ways["copy"] = copied(elements * 28, place.device)
    return ways


def muon(place: Place, name: str) -> dict[str, Any]:
    """torch.optim.Muon in eager, by Inductor, and compiled by fuseopt."""
    import fuseopt

    shapes = TINY if place.tiny else MATRICES[name]
    ways: dict[str, Any] = {}
    for way in ("eager", "fuseopt", "inductor"):
        params = make_params(shapes, torch.float32, place.device)
        optimizer = torch.optim.Muon(params, lr=1e-3)
        call: Callable[[], Any] = optimizer.step
        if way == "fuseopt":
            fuseopt.compile(optimizer, **place.options(fallback="error"))
            call = optimizer.step
        elif way == "inductor":
            if place.name != "cuda":
                continue
            torch._dynamo.reset()
            call = torch.compile(optimizer.step, fullgraph=False)
        ways[way] = _ready(call)
    return ways


def missing(place: Place, kind: str) -> dict[str, Any]:
    """300 parameters; another third has no gradient in each call."""
    import fuseopt

    n = 4 if place.tiny else 300
    ways: dict[str, Any] = {}
    for way in ("foreach", "fused", "fuseopt", "fuseopt, all there"):
        params = make_params([(64, 64)] * n, torch.float32, place.device)
        flag = {"fused": True} if way == "fused" else {"foreach": True}
        optimizer: Any = (
            torch.optim.AdamW(params, lr=1e-3, **flag)
            if kind == "AdamW"
            else torch.optim.SGD(params, lr=1e-3, momentum=0.9, **flag)
        )
        if way.startswith("fuseopt"):
            fuseopt.compile(optimizer, **place.options(fallback="error"))
        part = 0 if "all" in way else n // 3
        _ready(optimizer.step)  # torch's fused SGD needs all momenta, or none
        ways[way] = _ready(_with_missing(optimizer, params, part))
    return ways


def _with_missing(optimizer: Any, params: list[Any], part: int) -> Callable[[], None]:
    grads = [p.grad for p in params]
    drawn = random.Random(1)

    def call() -> None:
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        for k in drawn.sample(range(len(params)), part):
            params[k].grad = None
        optimizer.step()

    return call


def summary(done: dict[str, Figures]) -> list[str]:
    """A line for each contender of each case."""
    lines: list[str] = []
    for name, f in succeeded(done, lines):
        parts = [
            f"{way} {1e6 * (one['p50']):.0f} us"
            + (f" ({1e6 * one['device_p50']:.0f} device)" if one["device_p50"] else "")
            + (f" {one['kernels']}k" if one.get("kernels") else "")
            for way, one in f["contenders"].items()
        ]
        lines.append(f"{name:18} " + ", ".join(parts))
    return lines

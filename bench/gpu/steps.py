"""How fast: whole calls and bytes a second, each beside its rivals in one process.

A case is a model, an optimizer and a dtype. Everything that compiles is prepared while
other processes prepare too; only one measures at a time. Contenders share parameters,
gradients and state (bench.contenders), and take turns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from bench import contenders
from bench.contenders import Unavailable, Work
from bench.gpu.place import Place, turns
from bench.gpu.profiled import counts_of
from bench.gpu.reading import rivals, succeeded
from bench.gpu.tuning import planned
from bench.models import make_params, model_shapes
from bench.optimizers import RECIPES, Recipe
from bench.results import Figures

ALONE = True
CAP = 240.0
#: seconds of turns for a case
MEASURE = 0.8
#: Shapes of timm and of transformers, small and large, few parameters and many.
PROFILES = (
    "resnet18 resnet50 mobilenetv3_large_100 efficientnet_b0 tf_efficientnetv2_xl "
    "convnext_base vit_base_patch16_224 deit_small_patch16_224 nfnet_l0 "
    "swin_base_patch4_window7_224 regnety_032 densenet121 bert-base bert-large "
    "distilbert albert-base gpt2 t5-small bart-base whisper-small"
).split()
#: Inductor takes about a minute for 300 parameters, so it is measured on these alone.
INDUCTOR = ("resnet18", "efficientnet_b0", "deit_small_patch16_224", "bert-base")
LARGE = ("gpt2-xl", "llama-1b")
LOOPS = ("Lion", "LAMB", "Adafactor", "Adan", "AdEMAMix")
LOOP_MODELS = ("resnet50", "gpt2")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def cases(place: Place) -> list[dict[str, Any]]:
    """Profiles, for-loop optimizers; the longest to prepare first.

    "odd": gradients at no multiple of 16 bytes, as views of flat buffers are; "zero":
    gradients and state that are 0, as of embeddings that nobody looked up.
    """
    if place.tiny:
        return [
            _case("profile", "3x8", "AdamW", "fp32", 1, True),
            _case("loop", "2x8", "Lion", "fp32", 1),
            _case("odd", "2x64", "AdamW", "bf16", 1),
            _case("zero", "2x64", "AdamW", "fp32", 1),
        ]
    found = [
        _case("profile", m, "AdamW", "fp32", 30 if m in INDUCTOR else 2, m in INDUCTOR)
        for m in PROFILES
    ]
    found += [_case(k, "gpt2", "AdamW", d, 3) for k in ("odd", "zero") for d in DTYPES]
    found += [_case("loop", m, o, "fp32", 4) for m in LOOP_MODELS for o in LOOPS]
    return found


def _case(
    kind: str, model: str, recipe: str, dtype: str, weight: int, inductor: bool = False
) -> dict[str, Any]:
    return {
        "name": f"{kind}/{model}/{recipe}/{dtype}",
        "weight": weight,
        "inductor": inductor,
    }


def _recipe(name: str) -> Recipe:
    if name in RECIPES:
        return RECIPES[name]
    from tests import papers

    # gradient, parameter, previous gradient and three averages; writes all but it
    return Recipe(name, getattr(papers, name), 11, "reads p, g, old g, m, v, n")


def large(place: Place) -> list[dict[str, Any]]:
    """Cases of bench.gpu.large."""
    if place.tiny:
        return [_case("large", "2x64", "AdamW", "bf16", 1)]
    return [_case("large", m, "AdamW", d, 6) for m in LARGE for d in DTYPES]


def prepare(case: dict[str, Any], place: Place) -> Callable[[], Figures]:
    """Make all contenders ready; what measures them in turns."""
    kind, model, recipe, dtype = case["name"].split("/")
    params = make_params(model_shapes(model), DTYPES[dtype], place.device)
    for p in params:
        assert p.grad is not None
        if kind == "zero":
            p.grad.zero_()
        elif kind == "odd":
            flat = torch.empty(p.numel() + 1, dtype=p.dtype, device=p.device)
            p.grad = flat[1:].copy_(p.grad.flatten()).view(p.shape)
    work = Work(_recipe(recipe), params, place.device, 200, place.options())
    wanted: dict[str, tuple[str, Work]] = {"fuseopt": ("fuseopt", work)}
    if kind == "large":
        fast = dataclasses.replace(work, options=place.options(numerics="fast"))
        wanted["fuseopt fast"] = ("fuseopt", fast)
    if kind in ("large", "odd", "zero"):
        wanted["fuseopt 8 warps"] = ("fuseopt", work)
    if kind == "loop":
        wanted["for-loop"] = ("for-loop", work)
    else:
        wanted["fused"] = ("fused", work)
    if kind == "profile":
        wanted["foreach"] = ("foreach", work)
    if case["inductor"]:
        wanted["inductor-graphs"] = ("inductor-graphs", work)
        # of one launch, which is not captured unless it is asked for
        graph = dataclasses.replace(work, options=place.options(cudagraphs=True))
        wanted["fuseopt graph"] = ("fuseopt", graph)
    wanted["copy"] = ("copy", work)
    ready: dict[str, contenders.Ready] = {}
    missing = {}
    for name, (contender, its) in wanted.items():
        try:
            with planned(2048, 8, 0) if "warps" in name else nullcontext():
                ready[name] = contenders.ready(contender, its)
        except Unavailable as why:
            missing[name] = str(why)
    if "fuseopt" not in ready:
        raise RuntimeError(f"fuseopt: {missing['fuseopt']}")

    def measure() -> Figures:
        calls = {name: made.call for name, made in ready.items()}
        if kind == "profile":
            calls["floor"] = floor(place)
        seconds = 0.2 if place.tiny else MEASURE
        figures = turns(place, calls, seconds, least=3 if place.tiny else 8)
        for name, made in ready.items():
            figures[name] |= made.figures
            if name not in ("copy", "for-loop"):
                figures[name] |= counts_of(place, made.call)
        found: Figures = {
            "tensors": len(params),
            "elements": work.elements,
            "least_bytes": work.least_bytes,
            "contenders": figures,
            **_ratios(figures, work.least_bytes),
        }
        return {**found, **({"missing": missing} if missing else {})}

    return measure


def _ratios(figures: dict[str, Figures], least: int) -> Figures:
    """What the table shows: against the best rival, the copy, the floor."""

    def seconds(name: str) -> float:
        return float(figures[name]["device_p50"] or figures[name]["p50"])

    own = float(figures["fuseopt"]["p50"])
    others = {name: float(f["p50"]) for name, f in rivals(figures).items()}
    best = min(others, key=lambda name: others[name], default="")
    copied = figures["copy"]["bytes"] / seconds("copy")
    found: Figures = {
        "best_rival": best,
        "over_best_rival": others[best] / own if best else None,
        "copy_bytes_per_second": copied,
    }
    for name in figures:
        if name.startswith(("fuseopt", "fused")):
            found[f"{name} of copy"] = least / seconds(name) / copied
    if "floor" in figures:
        found["over_floor"] = own / float(figures["floor"]["p50"])
    return found


def floor(place: Place) -> Callable[[], object]:
    """The least that a launch costs: an op on one number, replayed in a CUDA graph."""
    x = torch.zeros(1, device=place.device)
    if place.name != "cuda":
        return lambda: x.add_(1)
    for _ in range(2):
        x.add_(1)
    place.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
    return graph.replay


def summary(done: dict[str, Figures]) -> list[str]:
    """A line for each case, and the geometric mean over the profiles."""
    lines: list[str] = []
    ratios = []
    for name, f in succeeded(done, lines):
        own = f["contenders"]["fuseopt"]
        text = f"{name:45} {1e6 * own['p50']:9.1f} us"
        if f["over_best_rival"]:
            text += f"  {f['over_best_rival']:5.2f}x of {f['best_rival']}"
            if name.startswith("profile/"):
                ratios.append(f["over_best_rival"])
        for key in f:
            if key.endswith("of copy"):
                text += f"  {key} {f[key]:.1%}"
        if "over_floor" in f and "efficientnet_b0" in name:
            text += f"  {f['over_floor']:.2f}x the floor"
        lines.append(text + ("" if not f.get("missing") else f"  {f['missing']}"))
    if ratios:
        mean = torch.tensor(ratios).log().mean().exp().item()
        slower = sum(r < 1 for r in ratios)
        lines.append(f"profiles: geomean {mean:.2f}x the best rival, slower {slower}")
    return lines

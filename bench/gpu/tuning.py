"""Which chunk, how many warps and registers: measured on tensors made for it.

A case is a class of steps, by the bytes that an element loads. All candidates update
the same synthetic tensors, in turns; nobody's live state is tuned on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from bench import contenders
from bench.contenders import Unavailable, Work
from bench.gpu.place import Place, turns
from bench.gpu.reading import succeeded
from bench.models import make_params
from bench.optimizers import RECIPES, Recipe
from bench.results import Figures

ALONE = True
CAP = 200.0
MEASURE = 2.5
BLOCKS = (512, 1024, 2048, 4096, 8192)
WARPS = (2, 4, 8, 16)
#: registers of a thread at most, with which four programs of four warps run at once
REGISTERS = 128
#: a thread holds so many elements of a chunk, at least and at most
ELEMENTS = (4, 64)
#: case: recipe, dtype, shapes
CASES: dict[str, tuple[str, torch.dtype, list[tuple[int, ...]]]] = {
    "4 B: SGD bf16": ("plain", torch.bfloat16, [(2**25,)] * 8),
    "6 B: momentum bf16": ("SGD", torch.bfloat16, [(2**25,)] * 8),
    "8 B: SGD fp32": ("plain", torch.float32, [(2**24,)] * 8),
    "8 B: AdamW bf16": ("AdamW", torch.bfloat16, [(2**24,)] * 8),
    "12 B: momentum fp32": ("SGD", torch.float32, [(2**24,)] * 8),
    "16 B: AdamW fp32": ("AdamW", torch.float32, [(2**24,)] * 8),
    "20 B: AdEMAMix fp32": ("AdEMAMix", torch.float32, [(2**24,)] * 8),
    "16 B, small: AdamW fp32": ("AdamW", torch.float32, [(768,)] * 200),
    "LAMB fp32": ("LAMB", torch.float32, [(2**24,)] * 8),
}


def _plain(params: Any, **flags: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3, weight_decay=0.01, **flags)


def _recipe(name: str) -> Recipe:
    if name == "plain":
        return Recipe("SGD", _plain, 3, "reads p, g; writes p", ours=False)
    return RECIPES[name]


def cases(place: Place) -> list[dict[str, Any]]:
    """One for each class."""
    names = list(CASES)[3:4] if place.tiny else list(CASES)
    return [{"name": name, "weight": 1} for name in names]


def candidates(place: Place) -> list[tuple[int, int, int]]:
    """(block, warps, registers) that keep a thread's share within reason; registers: 0
    for the target's own choice.
    """
    low, high = ELEMENTS
    every = [(b, w, 0) for b in BLOCKS for w in WARPS if low <= b // (32 * w) <= high]
    every += [(b, 4, REGISTERS) for b in (1024, 2048)]
    return [every[0], every[-1]] if place.tiny else every


@contextmanager
def planned(block: int, warps: int, registers: int) -> Iterator[None]:
    """Plan with this chunk and so many warps and registers, on a device that Triton
    compiles for.
    """
    from fuseopt.codegen.triton.kernel import TritonTarget
    from fuseopt.compiler import pipeline

    own = pipeline.target_of

    def chosen(config: Any, device: str) -> Any:
        target = own(config, device)
        if not isinstance(target, TritonTarget):
            return target
        return TritonTarget(block, warps, target.fast, target.cuda, registers or None)

    with mock.patch.object(pipeline, "target_of", chosen):
        yield


def prepare(case: dict[str, Any], place: Place) -> Callable[[], Figures]:
    """Compile all candidates."""
    name, dtype, shapes = CASES[case["name"]]
    if place.tiny:
        shapes = [(64,)]
    params = make_params(shapes, dtype, place.device)
    base = Work(_recipe(name), params, place.device, 60, place.options())
    ready: dict[str, contenders.Ready] = {}
    missing = {}
    for label, chosen in [("as it is", None), *_labels(place)]:
        work = dataclasses.replace(base)
        try:
            if chosen is None:
                ready[label] = contenders.ready("fuseopt", work)
            else:
                with planned(*chosen):
                    ready[label] = contenders.ready("fuseopt", work)
        except Unavailable as why:
            missing[label] = str(why)
    ready["copy"] = contenders.ready("copy", base)

    def measure() -> Figures:
        calls = {label: made.call for label, made in ready.items()}
        figures = turns(
            place, calls, 0.2 if place.tiny else MEASURE, least=3 if place.tiny else 8
        )
        seconds = {k: f["device_p50"] or f["p50"] for k, f in figures.items()}
        copied = ready["copy"].figures["bytes"] / seconds.pop("copy")
        found: Figures = {
            "least_bytes": base.least_bytes,
            "copy_bytes_per_second": copied,
            "of_copy": {
                label: base.least_bytes / taken / copied
                for label, taken in sorted(seconds.items(), key=lambda x: x[1])
            },
        }
        return {**found, **({"missing": missing} if missing else {})}

    return measure


def _labels(place: Place) -> list[tuple[str, tuple[int, int, int]]]:
    return [
        (f"{b} x {w}" + f", {r} registers" * bool(r), (b, w, r))
        for b, w, r in candidates(place)
    ]


def summary(done: dict[str, Figures]) -> list[str]:
    """The three best of each class, beside the table's own choice."""
    lines: list[str] = []
    for name, f in succeeded(done, lines):
        of = f["of_copy"]
        best = [f"{k} {v:.1%}" for k, v in of.items() if k != "as it is"][:3]
        own = f"as it is {of['as it is']:.1%}" if "as it is" in of else "as it is: none"
        lines.append(f"{name:24} {own}; block x warps: {', '.join(best)}")
    return lines

"""Cases that need much of the device's memory: one after another, nothing beside."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from bench.gpu import extras, steps, tails
from bench.gpu.place import Place
from bench.results import Figures

ALONE = True
CAP = 240.0


def _module(name: str) -> ModuleType:
    return {"tail": tails, "storage": extras}.get(name.split("/")[0], steps)


def cases(place: Place) -> list[dict[str, Any]]:
    """Large models, packed state, the tail of a large model."""
    found = steps.large(place)
    if not place.tiny:
        found += [{"name": f"tail/{tails.LARGE}"}, {"name": "storage/gpt2"}]
    return [{**case, "weight": 1} for case in found]


def prepare(case: dict[str, Any], place: Place) -> Callable[[], Figures]:
    """What makes the contenders ready and measures them, at their turn."""
    return lambda: _module(case["name"]).prepare(case, place)()


def summary(done: dict[str, Figures]) -> list[str]:
    """What the modules say of their cases."""
    lines: list[str] = []
    for module in (steps, tails, extras):
        lines += module.summary({n: f for n, f in done.items() if _module(n) is module})
    return lines

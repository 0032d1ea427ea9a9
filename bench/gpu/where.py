"""Where the host's time of a call goes: the functions that took most of it.

cProfile makes each function slower, so that shares count and not microseconds; those
of the call without it are beside them.
"""

from __future__ import annotations

import cProfile
import pstats
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.gpu.place import Place, queued
from bench.gpu.reading import succeeded
from bench.models import make_params, model_shapes
from bench.results import Figures
from bench.tails import Tail

ALONE = True
CAP = 120.0
#: functions that are listed, and calls that are profiled
MOST = 45
CALLS = 10
ROOTS = (str(Path(__file__).parent.parent.parent), sysconfig.get_paths()["purelib"])


def cases(place: Place) -> list[dict[str, Any]]:
    """A step, the tail of a training step, and a backward whose buckets step."""
    names = (
        ("step/3x8", "tail/3x8", "backward/2x8")
        if place.tiny
        else ("step/300x8", "tail/resnet50", "backward/12x1024")
    )
    return [{"name": name, "weight": 1} for name in names]


def prepare(case: dict[str, Any], place: Place) -> Callable[[], Figures]:
    """Make a call ready; what profiles it."""
    kind, _, what = case["name"].partition("/")
    call = {"step": _step, "tail": _tail, "backward": _backward}[kind](place, what)
    for _ in range(5):
        call()

    def measure() -> Figures:
        taken = sorted(queued(place, call, CALLS) for _ in range(5))
        profile = cProfile.Profile()
        rounds = 2 if place.tiny else 5
        for _ in range(rounds):
            place.synchronize()
            profile.enable()
            for _ in range(CALLS):
                call()
            profile.disable()
        return {"us": 1e6 * taken[2], "functions": _most(profile, CALLS * rounds)}

    return measure


def _step(place: Place, what: str) -> Callable[[], Any]:
    import fuseopt

    params = make_params(model_shapes(what), device=place.device)
    optimizer = torch.optim.AdamW(params, lr=1e-4, foreach=True)
    fuseopt.compile(optimizer, **place.options(fallback="error"))
    return optimizer.step


def _tail(place: Place, what: str) -> Callable[[], Any]:
    own = Tail(what, place.device, foreach=True)
    together = own.together(**place.options())

    def call() -> None:
        own.give()
        together()

    return call


def _backward(place: Place, what: str) -> Callable[[], Any]:
    import fuseopt

    layers, width = map(int, what.split("x"))
    net = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])
    net.to(place.device)
    given = torch.ones(8, width, device=place.device)
    held = fuseopt.in_backward(
        net,
        lambda ps: torch.optim.AdamW(ps, lr=1e-4, foreach=True),
        buckets="layer",
        **place.options(),
    )

    def call() -> None:
        net(given).sum().backward()

    call.held = held  # type: ignore[attr-defined]
    return call


def _most(profile: cProfile.Profile, calls: int) -> Figures:
    """By name: entries of a call, microseconds without and with what it calls."""
    found: dict[str, list[float]] = {}
    stats: Any = pstats.Stats(profile)
    rows = sorted(stats.stats.items(), key=lambda row: -row[1][2])[:MOST]
    for (file, line, name), (_, entries, own, whole, _) in rows:
        for root in ROOTS:
            file = file.removeprefix(root).lstrip("/")
        place = f"{file}:{line} " if line else ""
        each = (1e6 * own / calls, 1e6 * whole / calls)
        found[place + name] = [entries / calls, *(round(x, 1) for x in each)]
    return found


def summary(done: dict[str, Figures]) -> list[str]:
    """The first functions of each case."""
    lines: list[str] = []
    for name, f in succeeded(done, lines):
        lines.append(f"{name}: {f['us']:.0f} us of the host a call")
        for function, (entries, own, whole) in [*f["functions"].items()][:12]:
            lines.append(
                f"  {own:7.1f} us, {whole:7.1f} with calls, {entries:g} x  {function}"
            )
    return lines

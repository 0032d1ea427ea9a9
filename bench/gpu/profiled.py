"""What the device did for one call, counted by torch's profiler.

As a section: how launches follow the number of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from bench import contenders
from bench.contenders import Unavailable, Work
from bench.gpu.place import Place
from bench.gpu.reading import succeeded
from bench.models import make_params, model_shapes
from bench.optimizers import RECIPES
from bench.results import Figures

ALONE = True
CAP = 120.0
COUNTS = (10, 300, 1000)
#: kernels that are listed with their time
LONGEST = 6


def profiled(place: Place, call: Callable[[], object]) -> Figures:
    """kernels: run by the device. copies, copy_bytes: in any direction. replays: of
    CUDA graphs. launched: kernels that the host launched one by one.
    """
    if place.on_cpu:
        return {}
    if place.name == "sim":
        from tests import simulated  # noqa: F401

        with place.module.counting() as counted:
            call()
            place.synchronize()
        return {
            "kernels": counted.executed,
            "copies": counted.h2d + counted.d2h + counted.d2d,
            "replays": counted.replays,
            "launched": counted.launches,
        }
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    place.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        call()
        place.synchronize()
    # a mark of a range, as torch's optimizers make them, is no kernel
    events = [
        e for e in recorded.events() if not getattr(e, "is_user_annotation", False)
    ]
    names = [(e.name, e.device_type) for e in events]
    on_device = [n for n, where in names if where == DeviceType.CUDA]
    copies = [n for n in on_device if n.startswith(("Memcpy", "Memset"))]
    host = [n for n, where in names if where == DeviceType.CPU]
    return {
        "kernels": len(on_device) - len(copies),
        "copies": len(copies),
        "replays": sum("GraphLaunch" in n for n in host),
        "launched": sum("LaunchKernel" in n for n in host),
        "longest": _longest(e for e in events if e.device_type == DeviceType.CUDA),
    }


def _longest(events: Iterable[Any]) -> list[Figures]:
    """The kernels and copies that took longest, each with its microseconds."""
    each = sorted(
        ((e.time_range.elapsed_us(), e.name[:60]) for e in events), reverse=True
    )
    return [{"us": us, "name": name} for us, name in each[:LONGEST]]


def counts_of(place: Place, call: Callable[[], object]) -> Figures:
    """What `profiled` counts; a profiler that is refused is reported, and costs no time
    that was measured.
    """
    try:
        return profiled(place, call)
    except Exception as error:
        return {"not_profiled": f"{error}"[:300]}


def cases(place: Place) -> list[dict[str, Any]]:
    """AdamW over so many small tensors."""
    counts = (3,) if place.tiny else COUNTS
    return [{"name": f"{n} tensors", "count": n, "weight": n / 100} for n in counts]


def prepare(case: dict[str, Any], place: Place) -> Callable[[], Figures]:
    """Contenders without Inductor, whose launches `steps` counts."""
    params = make_params(model_shapes(f"{case['count']}x8"), device=place.device)
    work = Work(RECIPES["AdamW"], params, place.device, 100, place.options())
    ready, missing = {}, {}
    for name in ("fuseopt", "fused", "foreach"):
        try:
            ready[name] = contenders.ready(name, work)
        except Unavailable as why:
            missing[name] = str(why)
    if "fuseopt" not in ready:
        raise RuntimeError(f"fuseopt: {missing['fuseopt']}")

    def measure() -> Figures:
        found: Figures = {name: profiled(place, r.call) for name, r in ready.items()}
        # a gradient that moved: one small copy, and no graph is captured again
        for p in params:
            if p.grad is not None:
                p.grad = p.grad.clone()
        found["fuseopt, moved grads"] = profiled(place, ready["fuseopt"].call)
        return {**found, **({"missing": missing} if missing else {})}

    return measure


def summary(done: dict[str, Figures]) -> list[str]:
    """Kernels, copies and replays of a call."""
    lines: list[str] = []
    for name, f in succeeded(done, lines):
        parts = [
            f"{who} {c['kernels']}k {c['copies']}c {c['replays']}r"
            for who, c in f.items()
            if isinstance(c, dict) and "kernels" in c
        ]
        lines.append(f"{name:14} kernels, copies, replays: {', '.join(parts)}")
    return lines

"""The tail of a training step and steps within the backward, each beside its rivals.

A tail: unscale, clip by the total norm, AdamW, an average of the weights, `zero_grad`
(bench.tails); the fastest forms that torch has of each part are its rivals. Within the
backward: a chain of layers whose AdamW steps bucket by bucket, beside a backward that
the step follows. Steps of DTensors on a mesh of this one device, beside those of plain
tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.contenders import copied
from bench.gpu.place import Place, turns
from bench.gpu.profiled import counts_of
from bench.models import make_params, model_shapes
from bench.results import Figures
from bench.tails import LEAST_BYTES, OWN, Tail

ALONE = True
CAP = 150.0
#: seconds of turns for a case
MEASURE = 0.8
MODELS = ("resnet50", "bert-base", "gpt2")
#: ... of bench.gpu.large
LARGE = "bert-large"
#: layers of a chain, and how wide they are
CHAINS = ((24, 1024), (12, 4096))
#: how many DTensors, of so many elements
PARTS = ((300, 8), (148, 2**20))


def cases(place: Place) -> list[dict[str, Any]]:
    """Tails of models, chains of layers, lists of DTensors."""
    models = ("3x8",) if place.tiny else MODELS
    chains = ((2, 8),) if place.tiny else CHAINS
    parts = ((3, 8),) if place.tiny else PARTS
    found = [{"name": f"tail/{model}", "weight": 3} for model in models]
    found += [
        {"name": f"backward/{layers}x{width}", "weight": 2} for layers, width in chains
    ]
    return found + [{"name": f"DTensors/{n}x{size}", "weight": 2} for n, size in parts]


def prepare(case: dict[str, Any], place: Place) -> Callable[[], Figures]:
    """Make all ways ready; what measures them in turns."""
    kind, _, what = case["name"].partition("/")
    return {"tail": tail, "backward": backward, "DTensors": dtensors}[kind](place, what)


def _raced(
    place: Place,
    ways: dict[str, Callable[[], object]],
    before: Callable[[], object] = lambda: None,
    **more: Any,
) -> Figures:
    """Figures of ways that take turns; `before` comes before each, and is timed."""

    def whole(call: Callable[[], object]) -> Callable[[], object]:
        def both() -> None:
            before()
            call()

        return both

    calls = {name: whole(call) for name, call in ways.items()}
    seconds, least = (0.1, 2) if place.tiny else (MEASURE, 8)
    figures = turns(place, calls, seconds, least=least)
    for name, call in calls.items():
        if name != "copy":
            figures[name] |= counts_of(place, call)
    rivals = {n: f["p50"] for n, f in figures.items() if n not in (OWN, "copy")}
    best = min(rivals, key=lambda name: float(rivals[name]))
    own = float(figures[OWN]["p50"])
    return {
        "contenders": figures,
        "best_rival": best,
        "over_best_rival": float(rivals[best]) / own,
        **more,
    }


# ---------------------------------------------------------------- tails


def tail(place: Place, model: str) -> Callable[[], Figures]:
    """In parts with `foreach` and with `fused`, and as one object."""
    import fuseopt

    made: dict[str, Tail] = {}
    ways: dict[str, Callable[[], object]] = {}
    missing: dict[str, str] = {}
    for name, flags in (
        ("foreach", {"foreach": True}),
        ("fused", {"fused": True}),
        (OWN, {"foreach": True}),
    ):
        own = Tail(model, place.device, **flags)
        call = own.together(**place.options()) if name == OWN else own.apart
        try:
            for _ in range(4):
                own.give()
                call()
        except (RuntimeError, NotImplementedError) as error:
            if name == OWN:
                raise
            missing[name] = f"{error}".split("\n", 1)[0][:200]
            continue
        made[name], ways[name] = own, call
    report = fuseopt.reports()[-1]
    elements = sum(p.numel() for p in made[OWN].params)
    copy = copied(elements * LEAST_BYTES, place.device)

    def give() -> None:
        for own in made.values():
            own.give()

    def measure() -> Figures:
        found = _raced(place, {**ways, "copy": copy.call}, give)
        figures = found["contenders"]

        def seconds(name: str) -> float:
            return float(figures[name]["device_p50"] or figures[name]["p50"])

        copied_each = copy.figures["bytes"] / seconds("copy")
        least = elements * LEAST_BYTES
        return {
            **found,
            "launches": report.launches,
            "elements": elements,
            "least_bytes": least,
            "copy_bytes_per_second": copied_each,
            "of_copy": least / seconds(OWN) / copied_each,
            **({"missing": missing} if missing else {}),
        }

    return measure


# ---------------------------------------------------------------- in the backward


def backward(place: Place, what: str) -> Callable[[], Figures]:
    """A backward and AdamW: after it, and within it."""
    import fuseopt

    layers, width = map(int, what.split("x"))

    def chain() -> torch.nn.Sequential:
        torch.manual_seed(0)
        made = [torch.nn.Linear(width, width) for _ in range(layers)]
        return torch.nn.Sequential(*made).to(place.device)

    def adamw(params: Any, **flags: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-4, **flags)

    given = torch.ones(8, width, device=place.device)

    def after(**flags: Any) -> Callable[[], None]:
        net = chain()
        opt = adamw(net.parameters(), **flags)

        def call() -> None:
            net(given).sum().backward()
            opt.step()
            opt.zero_grad()

        return call

    def within() -> Callable[[], None]:
        net = chain()
        held = fuseopt.in_backward(
            net, lambda ps: adamw(ps, foreach=True), **place.options()
        )

        def call() -> None:
            net(given).sum().backward()

        call.held = held  # type: ignore[attr-defined]
        return call

    ways = {"foreach": after(foreach=True), "fused": after(fused=True), OWN: within()}
    peaks = {}
    for name, call in ways.items():
        for _ in range(4):
            call()
        peaks[name] = _peak(place, call)
    more = {"peak_bytes": peaks} if any(peaks.values()) else {}
    return lambda: _raced(place, ways, **more)


def _peak(place: Place, call: Callable[[], object]) -> int:
    """Bytes of the device that a call has at once, above those that stay; 0 where the
    device does not tell.
    """
    if place.name != "cuda":
        return 0
    place.synchronize()
    place.module.reset_peak_memory_stats()
    stays = int(place.module.memory_allocated())
    call()
    place.synchronize()
    return int(place.module.max_memory_allocated()) - stays


# ---------------------------------------------------------------- DTensors


@contextlib.contextmanager
def one_process(place: Place) -> Any:
    """A group of this process alone, with its device's own library."""
    import torch.distributed as dist

    store = dist.HashStore()
    library = "gloo" if place.on_cpu else "nccl"
    dist.init_process_group(library, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def spread(place: Place, n: int, size: int) -> list[Tensor]:
    """Parameters that are DTensors on a mesh of one device, with gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh(place.device, (1,))
    found = []
    for t in make_params(model_shapes(f"{n}x{size}"), device=place.device):
        made = distribute_tensor(t.detach(), mesh, [Shard(0)])
        p = torch.nn.Parameter(made)
        p.grad = torch.ones_like(p)
        found.append(p)
    return found


def dtensors(place: Place, what: str) -> Callable[[], Figures]:
    """AdamW over DTensors, compiled and in eager, and compiled over plain tensors."""
    if place.device not in ("cpu", "cuda"):
        return lambda: {"not_run": f"no group of processes for {place.device}"}
    import fuseopt

    n, size = map(int, what.split("x"))

    def measure() -> Figures:
        with one_process(place):
            ways: dict[str, Callable[[], object]] = {}
            held = []
            for name, flags in (
                ("foreach", {"foreach": True}),
                ("fused", {"fused": True}),
                (OWN, {"foreach": True}),
            ):
                opt = torch.optim.AdamW(spread(place, n, size), lr=1e-3, **flags)
                if name == OWN:
                    fuseopt.compile(opt, **place.options(fallback="error"))
                ways[name] = opt.step
                held.append(opt)
            plain = make_params(model_shapes(f"{n}x{size}"), device=place.device)
            same = torch.optim.AdamW(plain, lr=1e-3, foreach=True)
            fuseopt.compile(same, **place.options(fallback="error"))
            for call in (*ways.values(), same.step):
                for _ in range(4):
                    call()
            found = _raced(place, ways)
            alone = _raced(place, {"plain": same.step, OWN: ways[OWN]})
            found["over_plain"] = alone["over_best_rival"]
        return {**found, "launches": fuseopt.reports()[-2].launches}

    return measure


def summary(done: dict[str, Figures]) -> list[str]:
    """A line for each case."""
    lines = []
    for name, f in done.items():
        if "failed" in f or "not_run" in f:
            why = f.get("failed") or f"not run: {f['not_run']}"
            lines.append(f"{'FAILED ' if 'failed' in f else ''}{name}: {why[:150]}")
            continue
        own = f["contenders"][OWN]
        text = f"{name:24} {1e6 * own['p50']:9.1f} us"
        text += f"  {f['over_best_rival']:5.2f}x of {f['best_rival']}"
        if "launches" in f:
            text += f"  {f['launches']} launches"
        if "of_copy" in f:
            text += f"  {f['of_copy']:.1%} of a copy"
        if "over_plain" in f:
            text += f"  {f['over_plain']:.2f}x of plain tensors"
        for way, peak in f.get("peak_bytes", {}).items():
            text += f"  {way} {peak / 2**20:.0f} MiB"
        lines.append(text + (f"  {f['missing']}" if f.get("missing") else ""))
    return lines

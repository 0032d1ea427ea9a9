"""What else goes on around a step: other optimizers and other graphs on the device, a
capture that breaks or is the user's own, many steps, several devices, a loss that is
scaled, a loader that pins memory.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bench.gpu.place import Place
from bench.gpu.race import (
    DTYPES,
    Different,
    Race,
    compare,
    eager_step,
    parameters,
    set_grads,
    ulps,
)
from bench.results import Figures
from fuseopt.compat import first_difference

STEPS = 5
BETAS = (0.5, 0.9, 0.95, 0.98, 0.99, 0.999, 0.9999)
NO_GRAPHS: Figures = {"not_run": "no device with graphs"}


def _adamw(**options: Any) -> Callable[[Any], Optimizer]:
    return lambda params: torch.optim.AdamW(params, foreach=True, **options)


def one_after_another(place: Place) -> Figures:
    """Optimizers that come and go, memory given back between them; then gradients with
    other strides. Each is captured.
    """
    if not place.graphs:
        return NO_GRAPHS
    found: list[Figures] = []
    for number in range(3):
        race = Race(place, _adamw())
        for _ in range(3):
            race.step()
        if number == 2:
            for _ in range(3):
                set_grads(place, (race.params, race.others), race.count)
                for p in (*race.params, *race.others):
                    if p.dim() == 2 and p.grad is not None:
                        p.grad = p.grad.t().contiguous().t()
                race.step(grads=False)
        found.append(race.figures())
        _captured(found[-1])
        del race
        place.free()
    return found[-1]


def _captured(figures: Figures) -> None:
    states = figures["captured"]
    if any(state != "captured" for state in states):
        raise RuntimeError(f"not captured: {states}")


def broken_capture(place: Place) -> Figures:
    """A capture breaks, or an error comes up in it: the step goes on without, random
    numbers are drawn as ever, and the next optimizer is captured.
    """
    if not place.graphs:
        return NO_GRAPHS
    waited = torch.ones((), device=place.device)

    def in_it(*_: object) -> None:
        raise RuntimeError("injected")

    def invalid(*_: object) -> None:
        # a capture may not wait: it cannot end well any more
        with contextlib.suppress(RuntimeError):
            waited.item()
        raise RuntimeError("injected")

    _break_one(place, in_it)
    return _break_one(place, invalid)


def _break_one(place: Place, broken: Callable[..., None]) -> Figures:
    """The same with one way to break it."""
    import fuseopt
    from fuseopt.runtime import cudagraphs

    race = Race(place, _adamw())
    race.step()
    plain = cudagraphs._record
    vars(cudagraphs)["_record"] = broken
    try:
        race.step()
    finally:
        vars(cudagraphs)["_record"] = plain
    state = fuseopt.reports()[-1].cudagraph
    if not state.startswith("off: capture failed: injected"):
        raise RuntimeError(f"a capture was to break, and did not: {state}")
    torch.rand(4, device=place.device)
    torch.nn.functional.dropout(torch.ones(4, device=place.device))
    for _ in range(3):
        race.step()
    after = Race(place, _adamw())
    for _ in range(3):
        after.step()
    torch.rand(4, device=place.device)
    figures = after.figures()
    _captured(figures)
    return figures


def users_graph(place: Place) -> Figures:
    """Captures of the user's own: one, replays, and another; then a call outside."""
    if not place.graphs:
        return NO_GRAPHS
    race = Race(place, _adamw(capturable=True))
    for _ in range(3):
        race.step(moved=False)
    for _ in range(2):
        graph = place.module.CUDAGraph()
        with place.module.graph(graph):
            race.opt.step()
        for _ in range(2):
            graph.replay()
            eager_step(race.ref)
            race.check()
    race.step()
    return race.figures()


class Powers(Optimizer):
    """p = beta ** grad."""

    def __init__(self, params: Any, beta: float = 0.9) -> None:
        super().__init__(params, {"beta": beta})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(torch.pow(group["beta"], p.grad))


def many_steps(place: Place) -> Figures:
    """beta ** t for t = 1 to 10,000, of elements and of counters."""
    count, lanes = (200, 20) if place.tiny else (10_000, 1000)

    def params() -> list[Tensor]:
        made = [torch.zeros(count, device=place.device) for _ in BETAS]
        return [torch.nn.Parameter(t) for t in made]

    def make(of: list[Tensor]) -> Optimizer:
        return Powers(
            [{"params": [p], "beta": b} for p, b in zip(of, BETAS, strict=True)]
        )

    race = Race(place, make, params=params)
    for p in (*race.params, *race.others):
        p.grad = torch.arange(1, count + 1, dtype=p.dtype, device=p.device)
    for _ in range(2):
        race.step(grads=False)
    figures = race.figures()

    def few() -> list[Tensor]:
        made = [torch.full((2,), 0.1 * i, device=place.device) for i in range(lanes)]
        return [torch.nn.Parameter(t) for t in made]

    race = Race(place, _adamw(capturable=True, betas=(0.9, 0.999)), params=few)
    race.step()
    for first in range(0, count, lanes):
        for opt, of in ((race.opt, race.params), (race.ref, race.others)):
            for i, p in enumerate(of):
                opt.state[p]["step"].fill_(first + i)
        race.step()
    return {"elements": figures, "counters": race.figures()}


def several_devices(place: Place) -> Figures:
    """Parameters on two devices."""
    if place.on_cpu or place.module.device_count() < 2:
        return {"not_run": "one device"}

    def params() -> list[Tensor]:
        made = parameters(place)
        there = [p.detach().to(f"{place.device}:1") for p in made]
        return [*made, *map(torch.nn.Parameter, there)]

    race = Race(place, _adamw(), params=params)
    for _ in range(STEPS):
        race.step()
    return race.figures()


def scaled_loss(place: Place) -> Figures:
    """GradScaler: a step with an infinity is left out, the scale goes on changing."""
    try:
        scalers = [
            torch.amp.GradScaler(place.device, init_scale=4.0, growth_interval=2)
            for _ in range(2)
        ]
        one = torch.ones((), device=place.device)
        for scaler in scalers:
            scaler.scale(one)
            if not scaler.is_enabled():
                return {"not_run": f"no GradScaler for {place.device}"}
        # torch unscales no gradients of bfloat16
        race = Race(place, _adamw(), params=lambda: parameters(place, DTYPES[:1]))
        for number in range(STEPS + 2):
            set_grads(place, (race.params, race.others), number)
            race.count += 1
            sides = ((race.opt, race.params), (race.ref, race.others))
            for scaler, (opt, params) in zip(scalers, sides, strict=True):
                for p in params:
                    assert p.grad is not None
                    p.grad.mul_(scaler.get_scale())
                if number == 3:
                    params[4].grad.view(-1)[0] = float("inf")  # type: ignore[union-attr]
                scaler.step(opt)
                scaler.update()
            race.check()
    except NotImplementedError as error:
        return {"not_run": f"{error}".splitlines()[0][:200]}
    scales = [scaler.get_scale() for scaler in scalers]
    if scales[0] != scales[1]:
        raise RuntimeError(f"the scales differ: {scales}")
    return {**race.figures(), "scale": scales[0]}


def a_loader(place: Place) -> Figures:
    """Another thread pins memory and copies from it while steps are captured."""
    if place.on_cpu:
        return {"not_run": "nothing is pinned for the CPU"}
    stop, loaded, failed = threading.Event(), [0], []

    def load() -> None:
        try:
            stream = place.module.Stream()
            while not stop.is_set():
                batch = torch.ones(1 << 12, pin_memory=True)
                with place.module.stream(stream):
                    batch.to(place.device, non_blocking=True)
                stream.synchronize()
                loaded[0] += 1
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        figures: Figures = {}
        for _ in range(3):
            race = Race(place, _adamw())
            for _ in range(3):
                race.step()
            figures = race.figures()
            _captured(figures)
    finally:
        stop.set()
        thread.join()
    if failed:
        raise failed[0]
    return {**figures, "loaded": loaded[0]}


def tail_of_a_step(place: Place) -> Figures:
    """Unscale, clip, AdamW, an average, `zero_grad`, as one object beside its parts.

    Two steps are skipped. One number of a gradient is not 0, and whole: so norms are
    exact.
    """
    import fuseopt

    def side() -> tuple[list[Tensor], list[Tensor], Optimizer, Any]:
        params = [p for p in parameters(place, DTYPES[:1]) if p.numel()]
        averages = [p.detach().clone() for p in params]
        scaler = torch.amp.GradScaler(place.device, init_scale=4.0, growth_interval=2)
        scaler.scale(torch.ones((), device=place.device))
        return params, averages, _adamw()(params), scaler

    try:
        mine, theirs = side(), side()
    except NotImplementedError as error:
        return {"not_run": f"{error}".splitlines()[0][:200]}
    params, averages, opt, scaler = mine
    tail = fuseopt.tail(
        opt,
        scaler=scaler,
        clip_grad_norm=1.0,
        ema=[(averages, 0.875)],
        zero_grad=True,
        **place.options(fallback="error"),
    )

    def apart() -> None:
        others, kept, ref, scale = theirs
        scale.unscale_(ref)
        torch.nn.utils.clip_grad_norm_(others, 1.0, foreach=True)
        scale.step(ref)
        with torch.no_grad():
            torch._foreach_lerp_(kept, others, 0.125)
        ref.zero_grad()

    worst = 0.0
    for number in range(STEPS):
        for of, _, _, scale in (mine, theirs):
            for k, p in enumerate(of):
                grad = torch.zeros(p.shape).contiguous()
                grad.view(-1)[0] = 4.0 * (1 + (number + k) % 8) * scale.get_scale()
                p.grad = torch.empty_like(p).copy_(grad)
            if number in (2, 3):
                assert of[0].grad is not None
                of[0].grad.fill_(float("inf"))
        tail()
        apart()
        place.synchronize()
        for _, _, _, scale in (mine, theirs):
            scale.update()
        found = compare(params, opt, theirs[0], theirs[2])
        for k, (got, want) in enumerate(zip(averages, theirs[1], strict=True)):
            where = first_difference(got, want)
            if where is not None:
                found.append((f"average {k}", where, ulps(got, want)))
        for name, where, distance in found:
            if place.exact or distance == float("inf"):
                raise Different(f"step {number + 1}: {name}: {where}", "a tail")
            worst = max(worst, distance)
    report = fuseopt.reports()[-1]
    return {
        "steps": STEPS,
        "launches": [report.launches],
        "externs": sorted({name for name, _ in report.externs}),
        **({} if place.exact else {"ulp": worst}),
    }


SURROUNDINGS: dict[str, Callable[[Place], Figures]] = {
    "one after another": one_after_another,
    "broken capture": broken_capture,
    "the user's graph": users_graph,
    "many steps": many_steps,
    "several devices": several_devices,
    "scaled loss": scaled_loss,
    "a loader that pins": a_loader,
    "the tail of a step": tail_of_a_step,
}

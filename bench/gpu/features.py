"""What fuseopt does besides a step: packed state, masters, `refresh`, `in_backward`.

Each beside what it means in eager, bit for bit, on this device.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu.place import Place
from bench.gpu.race import Different, Race, eager_step, set_grads
from bench.results import Figures

STEPS = 5
#: formats of the state: the same bits as unpack, step, pack
FORMATS = (
    "bf16",
    "bf16-stochastic",
    "split",
    "8bit/256",
    "8bit/2048",
    "fp8-e4m3/256",
)
#: elements of parameters: a few blocks, one block and a rest, less than a block
SIZES = ((64, 80), (4099,), (37,), (16, 3))


def _params(place: Place, n: int = 20, dtype: torch.dtype = torch.float32) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randn(SIZES[k % 4], generator=generator) for k in range(n)]
    return [torch.nn.Parameter(t.to(dtype).to(place.device)) for t in drawn]


def packed_state(place: Place, form: str) -> Figures:
    """State in fewer bytes, beside: unpack all of it, step in eager, pack it."""
    import fuseopt
    from tests.storage.reference import Reference, assert_same

    theirs, mine = _params(place), _params(place)
    reference = Reference(torch.optim.AdamW(theirs, lr=1e-2, foreach=True), form)
    optimizer = fuseopt.compile(
        torch.optim.AdamW(mine, lr=1e-2, foreach=True),
        storage=fuseopt.Storage(form, least=0),
        **place.options(fallback="error"),
    )
    for number in range(STEPS):
        set_grads(place, (theirs, mine), number)
        reference.step()
        optimizer.step()
        place.synchronize()
        try:
            assert_same(reference, theirs, mine, optimizer)
        except AssertionError as error:
            if place.exact:
                text = f"step {number + 1}: {error}"
                raise Different(text, f"{form} state") from error
    report = fuseopt.reports()[-1]
    return {"steps": STEPS, "launches": [report.launches]}


def masters(place: Place, form: str) -> Figures:
    """Weights of bf16 whose float32 lies in the CPU's memory, beside the same there."""
    if place.on_cpu:
        return {"not_run": "parameters are on the CPU"}
    from fuseopt.offload import CPUOffloadOptimizer, MasterOptimizer

    made = _params(place, 12, torch.bfloat16)
    here = [torch.nn.Parameter(p.detach().cpu()) for p in made]
    there = [torch.nn.Parameter(p.detach().to(place.device)) for p in here]
    plain = MasterOptimizer(here, torch.optim.AdamW, master=form, lr=1e-2)
    offloaded = CPUOffloadOptimizer(there, torch.optim.AdamW, master=form, lr=1e-2)
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number)
        for p, q in zip(here, there, strict=True):
            factor = torch.randn(p.shape, generator=generator).bfloat16()
            (p * factor).sum().backward()
            (q * factor.to(place.device)).sum().backward()
        for of in (plain, offloaded):
            of.step()
            of.zero_grad()
        place.synchronize()
        for k, (p, q) in enumerate(zip(here, there, strict=True)):
            if not torch.equal(p.detach(), q.detach().cpu()):
                raise Different(f"step {number + 1}: parameter {k}", "offload")
    return {"steps": STEPS}


def refreshed(place: Place) -> Figures:
    """A step in a graph of the user's, whose rate changes between replays."""
    import fuseopt

    if not place.graphs:
        return {"not_run": "the device has no graphs"}
    race = Race(place, lambda p: torch.optim.AdamW(p, foreach=True, capturable=True))
    for _ in range(3):
        race.step(moved=False)
    fuseopt.refresh(race.opt)
    graph = place.module.CUDAGraph()
    with place.module.graph(graph):
        race.opt.step()
    for number in range(STEPS):
        for of in (race.opt, race.ref):
            of.param_groups[0]["lr"] = 1e-3 / (1 + number)
        set_grads(place, (race.params, race.others), 50 + number, moved=False)
        fuseopt.refresh(race.opt)
        graph.replay()
        eager_step(race.ref)
        race.check()
    return {**race.figures(), "steps": STEPS}


def gradients_come_and_go(place: Place, kind: str) -> Figures:
    """Another third of the gradients is missing in each call; no other trace."""
    make: dict[str, Callable[[Any], Any]] = {
        "AdamW": lambda p: torch.optim.AdamW(p, foreach=True),
        "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    }
    race = Race(place, make[kind], params=partial(_params, place, 60))
    drawn = random.Random(5)
    for number in range(3 * STEPS):
        set_grads(place, (race.params, race.others), number)
        missing = set(drawn.sample(range(60), 20)) if number > 1 else set()
        for params in (race.params, race.others):
            for k in missing:
                params[k].grad = None
        race.step(grads=False)
    return race.figures()


def within_the_backward(place: Place) -> Figures:
    """Steps bucket by bucket in the backward, beside a step that follows it."""
    import fuseopt
    from tests.backward.pairs import model

    def momentum(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, 1e-2, momentum=0.9, foreach=True)

    theirs = model(6, 32).to(place.device)
    mine = copy.deepcopy(theirs)
    plain = momentum(theirs.parameters())
    held = fuseopt.in_backward(mine, momentum, buckets="layer")
    for number in range(STEPS):
        x = torch.randn(3, 32, device=place.device)
        for net in (theirs, mine):
            net(x).square().mean().backward()
        plain.step()
        plain.zero_grad()
        place.synchronize()
        pairs = zip(theirs.named_parameters(), mine.parameters(), strict=True)
        for (name, p), q in pairs:
            if not torch.equal(p, q):
                raise Different(f"step {number + 1}: {name}", "within the backward")
    return {"steps": STEPS, "parameters": len(held.state)}


def matrices(place: Place, kind: str) -> Figures:
    """Products of matrices: bits where they are the same, the distance where not."""
    import fuseopt
    from tests.papers import matrices as module

    w = 16 if place.tiny else 128
    shapes = [(2 * w, w)] * 6 + [(w, w)] * 4 + [(w, 3 * w)] * 3

    def params() -> list[Tensor]:
        generator = torch.Generator().manual_seed(7)
        drawn = [torch.randn(s, generator=generator) for s in shapes]
        return [torch.nn.Parameter(t.to(place.device)) for t in drawn]

    def make(of: Any) -> torch.optim.Optimizer:
        if kind == "torch's Muon":
            return torch.optim.Muon(of, lr=0.02)
        made: torch.optim.Optimizer = getattr(module, kind)(of)
        return made

    race = Race(place, make, known=True, params=params)
    for _ in range(STEPS):
        race.step()
    report = fuseopt.reports()[-1]
    return {
        **race.figures(),
        "batches": [str(b)[:120] for b in report.batches],
        "alone": [str(a)[:120] for a in report.alone],
    }


FEATURES: dict[str, Callable[[Place], Figures]] = {
    **{f"state in {f}": partial(packed_state, form=f) for f in FORMATS},
    **{f"masters, {f}": partial(masters, form=f) for f in ("fp32", "split")},
    "live numbers in the user's graph": refreshed,
    **{
        f"gradients come and go, {k}": partial(gradients_come_and_go, kind=k)
        for k in ("AdamW", "momentum")
    },
    "within the backward": within_the_backward,
    **{
        f"matrices, {k}": partial(matrices, kind=k)
        for k in ("torch's Muon", "LoopMuon")
    },
}

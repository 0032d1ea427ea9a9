"""A compiled optimizer beside eager, compared bit for bit.

The reference is the plain optimizer in eager. Parameters are dense, so that its lists
go through its fast kernels; a race that asks for `awkward` ones has a tensor among them
for which eager takes one parameter after the other. A difference names the tensor, its
dtype, the element, both values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bench.gpu.place import Place
from bench.results import Figures

DTYPES = (torch.float32, torch.bfloat16)


class Different(AssertionError):
    """The bits differ; the message says where. `cause`: what differs first, without
    the number of the parameter, and in which step.
    """

    def __init__(self, message: str, cause: str = "") -> None:
        super().__init__(message)
        self.cause = cause


# ---------------------------------------------------------------- tensors


def _layouts(
    place: Place, dtype: torch.dtype, seed: int, awkward: bool = False
) -> list[Tensor]:
    """0-d, one, odd, empty, large; transposed, channels last, off 16 bytes; where
    `awkward`, one with gaps.
    """
    large, long = ((31, 23), 260) if place.tiny else ((181, 193), 4099)
    random = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(dtype).to(place.device)

    made = [
        drawn(),
        drawn(1),
        drawn(3),
        drawn(0, 3),
        drawn(17, 5),
        drawn(*large),
        drawn(12, 8).t(),
        drawn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        drawn(long)[1:],
    ]
    return [*made, drawn(33, 2)[:, 0]] if awkward else made


def parameters(
    place: Place,
    dtypes: Sequence[torch.dtype] = DTYPES,
    matrices: bool = False,
    awkward: bool = False,
) -> list[Tensor]:
    """Parameters in all layouts and dtypes, equal at each call; or matrices only."""
    made = [t for d in dtypes for t in _layouts(place, d, 1, awkward)]
    made = [t for t in made if t.dim() == 2 and t.numel()] if matrices else made
    return [torch.nn.Parameter(t) for t in made]


def set_grads(
    place: Place, several: Sequence[Sequence[Tensor]], seed: int, moved: bool = True
) -> None:
    """The same fresh gradients for parameters of several runs.

    `moved`: at new addresses, while the old ones are held; else in place.
    """
    for params in several:
        random = torch.Generator().manual_seed(100 + seed)
        kept = [p.grad for p in params]
        for p in params:
            drawn = torch.randn(p.shape, generator=random).to(p.dtype).to(place.device)
            if moved or p.grad is None:
                p.grad = torch.empty_like(p).copy_(drawn)
            else:
                p.grad.copy_(drawn)
        del kept


# ---------------------------------------------------------------- comparing


def compare(
    params: Sequence[Tensor], opt: Optimizer, others: Sequence[Tensor], ref: Optimizer
) -> list[tuple[str, str, float]]:
    """What differs: its name, the first element in words, the distance in ulp."""
    from fuseopt.compat import first_difference
    from tests.zoo import leaves

    found = []
    for i, (p, q) in enumerate(zip(params, others, strict=True)):
        kind = f"{str(p.dtype).removeprefix('torch.')} {list(p.shape)}"
        mine = dict(leaves([p, opt.state.get(p, {})], f"parameter {i} ({kind})"))
        want = dict(leaves([q, ref.state.get(q, {})], f"parameter {i} ({kind})"))
        if mine.keys() != want.keys():
            names = sorted(mine.keys() ^ want.keys())
            found.append((names[0], "is in one state only", float("inf")))
            continue
        for path, value in want.items():
            got = mine[path].to(value.device)  # counters may lie on the host
            where = first_difference(got, value)
            if where is not None:
                found.append((path, where, ulps(got, value)))
    return found


def ulps(got: Tensor, want: Tensor) -> float:
    """The largest distance in ulp of the largest element; infinite if of a kind."""
    if got.shape != want.shape or got.dtype != want.dtype or got.isnan().any():
        return float("inf")
    if not want.is_floating_point():
        return float("inf")
    unit = want.double().abs().max() * torch.finfo(want.dtype).eps
    return float((got.double() - want.double()).abs().max() / unit)


class Race:
    """A compiled optimizer beside eager's; `step` raises Different.

    `make(params)` makes both, from groups where `groups` is set.
    """

    def __init__(
        self,
        place: Place,
        make: Callable[[Any], Optimizer],
        reference: Callable[[Any], Optimizer] | None = None,
        known: bool = False,
        params: Callable[[], list[Tensor]] | None = None,
        awkward: bool = False,
        **options: Any,
    ) -> None:
        import fuseopt

        self.place = place
        self.awkward = awkward
        self.known = known or not place.exact
        self.worst = 0.0
        self.where = ""
        self.count = 0
        if place.graphs:
            # of one launch, too
            options.setdefault("cudagraphs", True)
        fresh = params or (lambda: parameters(place, awkward=awkward))
        self.params, self.others = fresh(), fresh()
        self.opt = fuseopt.compile(
            make(self.params), **place.options(fallback="error", **options)
        )
        self.ref = (reference or make)(self.others)
        self.before = len(fuseopt.reports())

    def step(self, moved: bool = True, grads: bool = True) -> None:
        """One step of both, and compare."""
        self.count += 1
        if grads:
            set_grads(self.place, (self.params, self.others), self.count, moved)
        torch.manual_seed(self.count)
        eager_step(self.ref)
        torch.manual_seed(self.count)
        self.opt.step()
        self.check()

    def check(self) -> None:
        """Raise Different, or note by how much, where that is known to happen."""
        self.place.synchronize()
        for name, where, distance in compare(
            self.params, self.opt, self.others, self.ref
        ):
            if not self.known or distance == float("inf"):
                raise Different(
                    f"step {self.count}: {name}: {where}",
                    f"{_kind(name)} in step {self.count}",
                )
            if distance > self.worst:
                self.worst, self.where = distance, f"{name}: {where}"

    def figures(self) -> Figures:
        """Counts of what was compiled; how far off, where that is known."""
        import fuseopt

        reports = fuseopt.reports()[self.before :]
        found: Figures = {
            "steps": self.count,
            "graphs": len(reports),
            "launches": [r.launches for r in reports],
        }
        if self.awkward:
            found["awkward"] = True
        if not self.place.on_cpu:
            found["captured"] = [r.cudagraph for r in reports]
            for state in found["captured"]:
                if state.startswith("off: capture failed"):
                    raise RuntimeError(state.removeprefix("off: "))
        externs = sorted({name for r in reports for name, _ in r.externs})
        if externs:
            found["externs"] = externs
        if self.known:
            found |= {"ulp": self.worst, "where": self.where}
        return found


def _kind(name: str) -> str:
    """What a tensor is, whichever parameter it belongs to: "exp_avg, bfloat16"."""
    dtype = re.search(r"\((\w+) ", name)
    part = re.findall(r"[A-Za-z_]\w*", name.rsplit(")", 1)[-1])
    return f"{part[-1] if part else 'parameter'}, {dtype[1] if dtype else '?'}"


def eager_step(optimizer: Optimizer) -> None:
    """An eager step, capturable also where torch refuses that by a check."""
    from tests.steps import eager_step

    eager_step(optimizer)


def change(race: Race, **changes: Any) -> None:
    """Change hyperparameters of both; a value or a function of what was there."""
    for opt in (race.opt, race.ref):
        for group in opt.param_groups:
            for key, value in changes.items():
                if group.get(key) is not None:
                    group[key] = value(group[key]) if callable(value) else value

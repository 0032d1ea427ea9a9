"""Products of several lanes in one call: torch.mm of each, or one torch.bmm.

`in_batches` puts products of equal shape that do not depend on one another together.
Whether one call pays, and whether it has the same bits, depends on the processor, the
dtype and the sizes; `Trials` finds out, on drawn numbers, when a batch first runs.
bench/bmm.py has the figures of one processor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..capture.externs import Call, TensorRef
from ..ir import Extern, Graph, Kernel, Run, Schedule

aten = torch.ops.aten
#: A product of two matrices -> the same of many.
BATCHED: dict[Any, Any] = {
    aten.mm.default: aten.bmm.default,
    aten.addmm.default: aten.baddbmm.default,
}
#: What may be batched at all. MKL's float32 and float64 products may depend on where
#: in memory a matrix lies, so that no trial can show the bits to be the same; and of
#: those, one call is no faster. On a GPU nothing was measured.
DTYPES = frozenset({"bf16"})
#: One call must take less than this share of the loop's time.
PAYS = 0.85


class Batch(NamedTuple):
    """Externs with equal calls up to the tensors, none of which needs another."""

    members: tuple[Extern, ...]


Step = Kernel | Run | Extern | Batch


def in_batches(graph: Graph, schedule: Schedule, calls: Sequence[Call]) -> list[Step]:
    """The steps of a schedule, with like products between two kernels as a Batch."""
    steps: list[Step] = []
    between: list[Extern] = []
    for step in (*schedule.steps, None):
        if isinstance(step, Extern):
            between.append(step)
            continue
        steps += _grouped(graph, between, calls)
        between = []
        if step is not None:
            steps.append(step)
    return steps


def _form(graph: Graph, call: Call) -> Any:
    """What two calls must share to run as one; None for a call of another kind."""
    if call.func not in BATCHED:
        return None
    refs = [a for a in call.args if isinstance(a, TensorRef)]
    buffers = [graph.buffers[ref.buffer] for ref in refs]
    plain = all(
        len(b.shape) == 2 and b.device == "cpu" and b.dtype in DTYPES for b in buffers
    )
    if len(refs) != len(call.args) or not plain or any(r.conj or r.neg for r in refs):
        return None
    return call.func, str(call.kwargs), *((b.dtype, b.shape) for b in buffers)


def _grouped(
    graph: Graph, externs: list[Extern], calls: Sequence[Call]
) -> Sequence[Step]:
    """Externs in an order in which like products stand together."""
    forms = [_form(graph, calls[e.payload]) for e in externs]
    changing = any(
        e.ordered or len(calls[e.payload].fresh) < len(e.writes) for e in externs
    )
    if changing or len(set(forms)) + forms.count(None) > len(externs):
        return externs
    level: dict[int, int] = {}  # storage -> how many calls led to it
    groups: dict[tuple[int, Any], list[Extern]] = {}
    for i, (e, form) in enumerate(zip(externs, forms, strict=True)):
        storages = [graph.buffers[graph.values[v]].storage for v in e.reads]
        depth = 1 + max((level.get(s, 0) for s in storages), default=0)
        for v in e.writes:
            level[graph.buffers[graph.values[v]].storage] = depth
        groups.setdefault((depth, i if form is None else form), []).append(e)
    steps: list[Step] = []
    for _, members in sorted(groups.items(), key=lambda item: item[0][0]):
        steps += members if len(members) == 1 else [Batch(tuple(members))]
    return steps


def _stacked(column: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensors as one, transposed as they are."""
    if column[0].stride(0) == 1 and column[0].stride(1) != 1:
        return torch.stack([t.mT for t in column]).mT
    return torch.stack(list(column))


Columns = Sequence[Sequence[torch.Tensor]]


def as_one(func: Any, columns: Columns, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """`func` of every lane in one call."""
    made = BATCHED[func](*map(_stacked, columns), **kwargs)
    return list(made.unbind())


def one_by_one(
    func: Any, columns: Columns, kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """`func` of every lane, in a loop."""
    return [func(*row, **kwargs) for row in zip(*columns, strict=True)]


class Trials:
    """Which batches run as one call: those that gave the same bits in less time."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.known: dict[Any, bool] = {}

    def run(
        self, func: Any, columns: Columns, kwargs: dict[str, Any]
    ) -> list[torch.Tensor]:
        """The result of every lane, the faster way."""
        layouts = [{(t.dtype, t.shape, t.stride()) for t in c} for c in columns]
        if any(len(layout) > 1 for layout in layouts):
            return one_by_one(func, columns, kwargs)
        own = tuple(next(iter(layout)) for layout in layouts)
        key = (func, len(columns[0]), own, str(kwargs), torch.get_num_threads())
        if key not in self.known:
            self.known[key] = self._try(func, columns, kwargs)
        return (as_one if self.known[key] else one_by_one)(func, columns, kwargs)

    def _try(self, func: Any, columns: Columns, kwargs: dict[str, Any]) -> bool:
        generator = torch.Generator().manual_seed(0)
        ways = (as_one, one_by_one)
        for draw in (_random, _cancelling):
            rows = [draw(row, generator) for row in zip(*columns, strict=True)]
            trial = list(zip(*rows, strict=True))
            results = [way(func, trial, kwargs) for way in ways]
            if not all(torch.equal(a, b) for a, b in zip(*results, strict=True)):
                return False
        best = [float("inf")] * 2
        for _ in range(5):
            for i, way in enumerate(ways):
                start = self.clock()
                way(func, trial, kwargs)
                best[i] = min(best[i], self.clock() - start)
        return best[0] < PAYS * best[1]


Row = Sequence[torch.Tensor]


def _like(tensor: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """What was drawn, with the strides and the dtype of a tensor."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return made.copy_(drawn)


def _random(row: Row, generator: torch.Generator) -> Row:
    """Operands of one lane as they come."""
    return [_like(t, torch.randn(t.shape, generator=generator)) for t in row]


def _cancelling(row: Row, generator: torch.Generator) -> Row:
    """Operands whose products cancel out, in any order: what is left is rounding.

    Sums of random numbers in another order differ in a bit of float32, which rounding
    to 16 bits hides in all but one of thousands of elements. Here every bit of a result
    says in which order it was summed.
    """
    *others, a, b = row
    inner = a.shape[1]
    half = inner // 2

    def wide(*shape: int) -> torch.Tensor:
        scale = torch.randint(-6, 7, shape, generator=generator).float().exp2()
        return torch.randn(shape, generator=generator) * scale

    left, right = wide(len(a), half), wide(half, b.shape[1])
    odd = inner - 2 * half
    order = torch.randperm(inner, generator=generator)
    first = torch.cat([left, -left, 2.0**-12 * wide(len(a), odd)], 1)[:, order]
    second = torch.cat([right, right, wide(odd, b.shape[1])])[order]
    small = [2.0**-20 * torch.randn(t.shape, generator=generator) for t in others]
    drawn = (*small, first, second)
    return [_like(t, made) for t, made in zip(row, drawn, strict=True)]

"""Run a Batch: one batched ATen call over stacks, or the single calls of its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..capture.aten.dtypes import NAMED_DTYPES
from ..ir.graph import Batch, Buffer, Schedule, Symbol
from ..ir.products import COPIED, Operand
from .memory import Memory
from .probes import Circumstances, apart, batched, circumstances, rows_of

#: What BLAS treats apart, and what is no number.
_APART = frozenset((0.0, 1.0, -1.0))


class PreparedBatch:
    """A batched call of a plan, and when its rows have the bits of single calls.

    `allowed(batch)`: have they, in the present circumstances? None: they need not.
    `freed`: stacks and storages that nobody looks at afterwards.
    """

    def __init__(
        self,
        batch: Batch,
        buffers: Sequence[Buffer],
        allowed: Callable[[Batch], bool] | None,
        freed: tuple[tuple[int, ...], tuple[int, ...]],
    ) -> None:
        self.batch = batch
        self.buffers = buffers
        self.freed = freed
        self._allowed = allowed
        self._known: dict[Circumstances, bool] = {}

    def run(self, memory: Memory) -> None:
        """Run the products on the memory of a call."""
        batch = self.batch
        scales = [_number(s, memory) for s in batch.scales]
        operands = self._operands(memory)
        if operands is None or not self._may(scales):
            self._singly(memory, scales)
        else:
            batched(batch.op, operands, memory.stacked(batch.result), scales)
        memory.drop(*self.freed)

    def _may(self, scales: Sequence[float]) -> bool:
        """Have the rows the bits of single calls now?"""
        if self._allowed is None:
            return True
        for kind, scale in zip(self.batch.trial.scales, scales, strict=True):
            if kind == "any" and scale in _APART:
                return False
        now = circumstances()
        known = self._known.get(now)
        if known is None:
            known = self._known[now] = self._allowed(self.batch)
        return known

    def _operands(self, memory: Memory) -> list[torch.Tensor] | None:
        """The operands of the batched call; None if a tensor has another layout than
        the one that was tried.
        """
        operands: list[torch.Tensor] = []
        for operand in self.batch.operands:
            if operand.stack >= 0:
                operands.append(memory.stacked(operand))
                continue
            rows = [memory.tensor(b) for b in self._distinct(operand)]
            first = self.buffers[operand.buffers[0]]
            if any(t.stride() != first.stride for t in rows):
                return None
            operands.append(_together(operand, rows))
        return operands

    def _distinct(self, operand: Operand) -> Sequence[int]:
        return operand.buffers if operand.stack == COPIED else operand.buffers[:1]

    def _singly(self, memory: Memory, scales: Sequence[float]) -> None:
        """The single calls, on operands that begin where eager's do."""
        batch = self.batch
        call = getattr(torch, batch.op)
        keywords = dict(zip(("beta", "alpha"), scales, strict=False))
        for row, result in enumerate(batch.result.buffers):
            operands: list[torch.Tensor] = []
            for operand in batch.operands:
                b = self.buffers[operand.buffers[row]]
                t = memory.tensor(operand.buffers[row])
                if operand.stack >= 0:
                    layout = (b.shape, b.stride, b.offset)
                    t = apart(layout, NAMED_DTYPES[b.dtype], b.device).copy_(t)
                operands.append(t)
            memory.tensor(result).copy_(call(*operands, **keywords))


def _number(scale: Any, memory: Memory) -> float:
    return float(memory.numbers[scale.expr] if isinstance(scale, Symbol) else scale)


def _together(operand: Operand, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows that lie apart as one tensor: a copy, unless all rows are the same."""
    if operand.stack != COPIED:
        shape, stride = operand.shape, operand.stride
        return rows[0].as_strided(shape, stride)
    t = rows[0]
    layout = (operand.shape, operand.stride, operand.first)
    whole = apart(layout, t.dtype, str(t.device))
    torch._foreach_copy_(list(rows_of(whole, len(rows))), list(rows))
    return whole


def freed_stacks(schedule: Schedule) -> list[tuple[int, ...]]:
    """After each step, the stacks of which all storages have been given back."""
    stack_of = {s: k for k, x in enumerate(schedule.stacks) for s in x.storages}
    left = [len(x.storages) for x in schedule.stacks]
    freed: list[tuple[int, ...]] = []
    for storages in schedule.memory.freed or ((),) * len(schedule.steps):
        done: list[int] = []
        for s in storages:
            if s in stack_of:
                left[stack_of[s]] -= 1
                done += [stack_of[s]] * (not left[stack_of[s]])
        freed.append(tuple(done))
    return freed

"""Run a Batch: one batched ATen call over stacks, or the single calls of its rows."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..capture.aten.added_products import ALIGNED
from ..capture.aten.autocast import Autocast, WithinAutocast
from ..capture.aten.dtypes import NAMED_DTYPES
from ..ir.graph import Batch, Buffer, MemoryPlan, Stack, Symbol
from ..ir.products import ADDRESSED, CHAINED, COPIED, TIMES, Operand
from .chains import Chains, batched_in_chain
from .gathers import Scratch, gather, gathered_bytes, gathers
from .matrix_calls import batched, each_matrix, product_call, results_of
from .matrix_rows import padded_tensor, rows_of
from .memory import Layout, Memory
from .probes import Circumstances, circumstances
from .run_tables import KEPT
from .tables.host_numbers import CPU

#: Scales that BLAS treats specially.
_APART = frozenset((0.0, 1.0, -1.0))


class _Ready(NamedTuple):
    """A batched call, equal in all calls with this arena, these circumstances, this
    layout of tensors and this scratch.
    """

    arena: torch.Tensor | None
    now: Circumstances | None
    layout: Layout
    scratch: torch.Tensor | None
    call: Callable[[], None]


class PreparedBatch:
    """Batched call of a plan, made only if its rows have the bits of single calls.

    `allowed(batch)` is true if they have, in the present circumstances, and None if
    that cannot be tried now. Without `allowed` they need not. `stacks` lie where
    `memory` places them, in the arena of a call. Operands that lie apart are copied
    into the `scratch`. `autocast` is its state while the single calls run, None if it
    was off at capture. `chains` makes batches that are CHAINED.
    """

    def __init__(
        self,
        batch: Batch,
        buffers: Sequence[Buffer],
        allowed: Callable[[Batch], bool | None] | None,
        memory: MemoryPlan,
        stacks: Sequence[Stack],
        scratch: Scratch,
        autocast: Autocast | None = None,
        chains: Chains | None = None,
    ) -> None:
        self.scratch = scratch
        self.chains = chains
        #: the places in the scratch of operands that C copies there, and their end
        self._gathered: dict[int, int] = {}
        self._room = 0
        for k, operand in enumerate(batch.operands):
            if gathers(operand, buffers):
                self._gathered[k] = self._room
                self._room += gathered_bytes(operand, buffers)
        self.batch = batch
        self.autocast = autocast
        self.buffers = buffers
        self.first = [memory.offsets[x.storages[0]] for x in stacks]
        self.device = batch.trial.device
        self.keeps = not memory.remote and memory.size <= KEPT
        #: the arena of these views: the operands in stacks, and the result
        self._arena: torch.Tensor | None = None
        self._views: list[torch.Tensor | None] = []
        self._allowed = allowed
        self._known: dict[Circumstances, bool] = {}
        self._ready: _Ready | None = None
        #: true if the arguments of the batched call depend on the arena alone
        self._apart = any(x.stack < 0 for x in batch.results)
        self._stacked = any(x.stack >= 0 for x in (*batch.operands, *batch.results))
        self._fixed = (
            self.keeps
            and not self._apart
            and all(
                x.stack >= 0 or k in self._gathered
                for k, x in enumerate(batch.operands)
            )
            and not any(isinstance(s, Symbol) for s in batch.scales)
        )

    def run(self, memory: Memory) -> None:
        """Run the products on the memory of a call."""
        arena = self._arena_of(memory)
        now = self.now(memory)
        ready = self._ready
        scratch = self.scratch.of(self._room) if self._room else None
        if (
            ready is None
            or ready.arena is not arena
            or ready.now != now
            or (ready.layout is not memory.layout and self._gathered)
            or ready.scratch is not scratch
        ):
            batch = self.batch
            scales = self.scales(memory)
            places = self._in_stacks(memory)
            outs = self._outs(places[len(batch.operands) :])
            before: list[Callable[[], object]] = []
            operands = self._operands(memory, places, scratch, before)
            if operands is None or not self.may(scales, now):
                self._singly(memory, scales)
                return
            last = self._call(operands, outs, scales)
            call = _one_by_one(before, last) if before else last
            ready = _Ready(arena, now, memory.layout, scratch, call)
            by_helper = len(before) == len(self._gathered)
            self._ready = ready if self._fixed and by_helper else None
        try:
            ready.call()
        except RuntimeError:
            if self.batch.op in TIMES:
                raise
            # the op refuses a matrix: the single calls raise eager's error
            self._singly(memory, ())
            return
        if self._apart:
            self._copy_apart(memory, outs)

    def scales(self, memory: Memory) -> list[float]:
        """Return beta and alpha of this call."""
        return [_number(s, memory) for s in self.batch.scales]

    def _arena_of(self, memory: Memory) -> torch.Tensor | None:
        """Return the arena of a call; None if nothing of this batch lies in a stack."""
        if not self._stacked:
            return None
        assert memory.arena is not None, "a batch needs the arena of its stacks"
        return memory.arena[self.device][0]

    def _outs(self, places: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Return the results of the batched call: in stacks, or new ones."""
        return [
            torch.empty_strided(x.shape, x.stride, dtype=self._dtype(x))
            if place is None
            else place
            for x, place in zip(self.batch.results, places, strict=True)
        ]

    def _dtype(self, x: Operand) -> torch.dtype:
        return NAMED_DTYPES[self.buffers[x.buffers[0]].dtype]

    def _copy_apart(self, memory: Memory, outs: Sequence[torch.Tensor]) -> None:
        """Copy results to memory that the step returns, or that single calls read."""
        for x, whole in zip(self.batch.results, outs, strict=True):
            if x.stack >= 0:
                continue
            to = [memory.tensor(b) for b in x.buffers]
            rows = rows_of(whole, len(to), to[0].dim())
            torch._foreach_copy_(to, list(rows))

    def _call(
        self,
        operands: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        scales: Sequence[float],
    ) -> Callable[[], None]:
        """Return the batched call. Functions are looked up when it runs."""
        batch = self.batch
        if batch.way == CHAINED:
            assert self.chains is not None, "a chain needs its library"
            return functools.partial(
                batched_in_chain,
                *(self.chains, operands, outs[0], scales, batch.op, batch.order),
            )
        if batch.op in TIMES:
            arguments = (batch.op, operands, outs[0], scales)
            if self.autocast is None:
                return lambda: batched(*arguments)
            return functools.partial(WithinAutocast(batched, self.autocast), *arguments)
        each = (batch.op, operands, outs, batch.trial.options)
        if self.autocast is None:
            return lambda: each_matrix(*each)
        return functools.partial(WithinAutocast(each_matrix, self.autocast), *each)

    def now(self, memory: Memory) -> Circumstances | None:
        """Return what the bits of products depend on; None where bits may differ."""
        if self._allowed is not None and memory.circumstances is None:
            memory.circumstances = circumstances()
        return memory.circumstances

    def _in_stacks(self, memory: Memory) -> list[torch.Tensor | None]:
        """Return the operands and the result that lie in stacks, None for the rest."""
        if not self._stacked:
            return [None] * len((*self.batch.operands, *self.batch.results))
        assert memory.arena is not None, "a batch needs the arena of its stacks"
        arena, begin = memory.arena[self.device]
        if arena is self._arena:
            return self._views
        views: list[torch.Tensor | None] = []
        for x in (*self.batch.operands, *self.batch.results):
            if x.stack < 0:
                views.append(None)
                continue
            dtype = self._dtype(x)
            whole = arena.view(dtype)
            first = (self.first[x.stack] - begin) // dtype.itemsize + x.first
            views.append(whole.as_strided(x.shape, x.stride, first))
        if self.keeps:
            self._arena, self._views = arena, views
        return views

    def may(self, scales: Sequence[float], now: Circumstances | None) -> bool:
        """Have the rows the bits of single calls now?"""
        if self._allowed is None or now is None:
            return True
        for kind, scale in zip(self.batch.trial.scales, scales, strict=True):
            if kind == "any" and _is_apart(scale, self.batch.trial.dtype):
                return False
        known = self._known.get(now)
        if known is None:
            known = self._allowed(self.batch)
            if known is None:
                return False
            self._known[now] = known
        return known

    def _operands(
        self,
        memory: Memory,
        views: Sequence[torch.Tensor | None],
        scratch: torch.Tensor | None,
        before: list[Callable[[], object]],
    ) -> list[torch.Tensor] | None:
        """Return the operands of the batched call; None if a tensor's layout or
        alignment differs from the tried one. `before` gets the calls that copy operands
        in C.
        """
        operands: list[torch.Tensor] = []
        helper = memory.layout.helper
        for k, (operand, view) in enumerate(
            zip(self.batch.operands, views, strict=False)
        ):
            if view is not None:
                operands.append(view)
                continue
            rows = [memory.tensor(b) for b in self._distinct(operand)]
            first = self.buffers[operand.buffers[0]]
            if any(t.stride() != first.stride for t in rows):
                return None
            if self._allowed is not None and self.device != CPU:
                if any(_begins_elsewhere(t, first.offset) for t in rows):
                    return None
            if helper is None or scratch is None or k not in self._gathered:
                operands.append(_together(operand, rows))
                continue
            whole = scratch[self._gathered[k] :]
            of = memory.position.__getitem__
            pool = memory.words
            before.append(
                gather(operand, self.buffers, of, pool, helper, whole.data_ptr())
            )
            size = whole.numel() // rows[0].itemsize * rows[0].itemsize
            view = whole[:size].view(rows[0].dtype)
            operands.append(view.as_strided(operand.shape, operand.stride))
        return operands

    def _distinct(self, operand: Operand) -> Sequence[int]:
        apart = operand.stack in (COPIED, ADDRESSED)
        return operand.buffers if apart else operand.buffers[:1]

    def _singly(self, memory: Memory, scales: Sequence[float]) -> None:
        """Make the single calls, on operands that begin where eager's do."""
        batch = self.batch
        call = self._single_call(scales)
        for row in range(len(batch.externs)):
            operands: list[torch.Tensor] = []
            for operand in batch.operands:
                b = self.buffers[operand.buffers[row]]
                t = memory.tensor(operand.buffers[row])
                if operand.stack >= 0:
                    layout = (b.shape, b.stride, b.offset)
                    t = padded_tensor(layout, NAMED_DTYPES[b.dtype], b.device).copy_(t)
                operands.append(t)
            for x, t in zip(batch.results, call(operands), strict=True):
                memory.tensor(x.buffers[row]).copy_(t)

    def _single_call(
        self, scales: Sequence[float]
    ) -> Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
        """Return the call for one row: operands -> results."""
        op, options = self.batch.op, self.batch.trial.options
        keywords = dict(zip(("beta", "alpha"), scales, strict=False))

        def product(operands: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            return [product_call(op)(*operands, **keywords)]

        def other(operands: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            return results_of(op, operands, options)

        call = product if op in TIMES else other
        return call if self.autocast is None else WithinAutocast(call, self.autocast)


def _begins_elsewhere(t: torch.Tensor, offset: int) -> bool:
    """Has `t` not the alignment of a new tensor's part that begins at this element?

    A library may multiply by another kernel then. On a CPU a probe tries all places.
    """
    return (t.data_ptr() - offset * t.itemsize) % ALIGNED != 0


def _is_apart(scale: float, dtype: str) -> bool:
    """Does BLAS treat a number specially, as it rounds it? Denormals may be zeros."""
    if dtype != "f64":
        scale = ctypes.c_float(scale).value
    of = torch.float64 if dtype == "f64" else torch.float32
    return scale in _APART or abs(scale) < torch.finfo(of).tiny


def _number(scale: Any, memory: Memory) -> float:
    return float(memory.numbers[scale.expr] if isinstance(scale, Symbol) else scale)


def _one_by_one(
    before: Sequence[Callable[[], object]], last: Callable[[], None]
) -> Callable[[], None]:
    """Return a function that makes these calls in turn."""

    def call() -> None:
        for copy in before:
            copy()
        last()

    return call


def _together(operand: Operand, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return separate rows as one tensor: a copy, unless all rows are the same."""
    if operand.stack not in (COPIED, ADDRESSED):
        shape, stride = operand.shape, operand.stride
        return rows[0].as_strided(shape, stride)
    t = rows[0]
    layout = (operand.shape, operand.stride, operand.first)
    whole = padded_tensor(layout, t.dtype, str(t.device))
    torch._foreach_copy_(list(rows_of(whole, len(rows), t.dim())), list(rows))
    return whole

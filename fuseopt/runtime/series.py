"""Products that run one after another: one call of C for all of them.

A product whose result has a place in the arena is *placed*: it writes there, and ATen
allocates nothing. Placed products in a row are a `Series`. Their tensors in the arena
stay from call to call. Those of the caller are looked up at each call.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..capture.aten.externs import Call, TensorRef
from ..compat import product_functions
from ..ir.graph import Extern, Step
from .extern_calls import PreparedCall
from .guards.library import ProductSeries
from .memory import Layout, Memory
from .placed import PLACED
from .run_tables import KEPT
from .tables.host_numbers import CPU
from .tables.words import HelperCall

_KINDS = tuple(name for name, _ in PLACED.values())


class Series:
    """Placed products in a row, with constant scales.

    `payloads` are those of its products, `externs` the calls of a plan by payload.
    """

    def __init__(
        self, payloads: Sequence[int], externs: Mapping[int, PreparedCall]
    ) -> None:
        self.payloads = payloads
        self.externs = externs
        self.calls = [externs[k].call for k in payloads]
        every = [externs[k].freed for k in payloads]
        self._freed = (
            tuple(s for storages, _ in every for s in storages),
            tuple(b for _, buffers in every for b in buffers),
        )
        #: the arena and the layout that the arguments are for
        self._now: tuple[torch.Tensor, Layout] | None = None
        self._run: HelperCall | None = None
        self._words = array("Q")
        self._kept: list[torch.Tensor] = []
        #: the caller's tensors: their words, and their buffers
        self._given: list[tuple[int, int]] = []

    def run(self, memory: Memory) -> int:
        """Run products from the first on; return how many were made.

        None is made where C cannot call them, and not all after an error.
        """
        assert memory.arena is not None, "placed products need an arena"
        arena, _ = memory.arena[CPU]
        before = self._now
        if before is None or before[0] is not arena or before[1] is not memory.layout:
            if not self._prepared(memory):
                return 0
            self._now = arena, memory.layout
        for word, b in self._given:
            self._words[word] = memory.tensor(b)._cdata
        assert self._run is not None
        made = int(self._run())
        if made == len(self.payloads):
            memory.free(self._freed)
        else:
            for payload in self.payloads[:made]:
                memory.free(self.externs[payload].freed)
        if memory.layout.plan.size > KEPT:
            self._now, self._kept = None, []
        return made

    def _prepared(self, memory: Memory) -> bool:
        """Make the arguments of the call for an arena."""
        helper, functions = memory.layout.helper, product_functions()
        if helper is None or functions is None:
            return False
        self._kept, self._given = [], []
        words: dict[int, int] = {}
        addresses = array("Q")

        def word(b: int) -> int:
            if b not in words:
                words[b] = len(words)
                t = memory.tensor(b)
                addresses.append(t._cdata)
                storage = memory.layout.buffers[b].storage
                if storage in memory.layout.plan.offsets:
                    self._kept.append(t)
                else:
                    self._given.append((words[b], b))
            return words[b]

        columns: dict[str, array[Any]] = {
            **{name: array("q") for name in ("kind", "out", "add", "left", "right")},
            **{name: array("d") for name in ("beta", "alpha")},
        }
        for call in self.calls:
            op, _ = PLACED[call.func]
            refs = [word(x.buffer) for x in call.args if isinstance(x, TensorRef)]
            columns["kind"].append(_KINDS.index(op))
            columns["out"].append(word(call.outputs[0]))
            columns["add"].append(refs[0])
            columns["left"].append(refs[-2])
            columns["right"].append(refs[-1])
            columns["beta"].append(float(call.kwargs.get("beta", 1.0)))
            columns["alpha"].append(float(call.kwargs.get("alpha", 1.0)))
        self._words = addresses
        struct = ProductSeries(len(self.calls))
        struct.functions = (ctypes.c_int64 * 4)(*(functions[op] for op in _KINDS))
        # CDLL: other threads may run Python meanwhile
        free = ctypes.CDLL(helper._name, handle=helper._handle)
        arrays = {**columns, "words": self._words}
        result = ctypes.c_int64
        self._run = HelperCall(struct, free.fuseopt_products, arrays, (), result)
        return True


def series_of(
    steps: Sequence[Step], externs: Mapping[int, PreparedCall]
) -> dict[int, Series]:
    """Return the series among steps, by the index of their first step.

    `externs` are the calls of a plan by payload.
    """

    def goes(step: Step) -> bool:
        if not isinstance(step, Extern) or externs[step.payload].placed is None:
            return False
        return _constant(externs[step.payload].call)

    found: dict[int, Series] = {}
    start = 0
    while start < len(steps):
        end = start
        while end < len(steps) and goes(steps[end]):
            end += 1
        if end - start > 1:
            rows = [x.payload for x in steps[start:end] if isinstance(x, Extern)]
            found[start] = Series(rows, externs)
        start = max(end, start + 1)
    return found


def _constant(call: Call) -> bool:
    """Are the scales of a product numbers, and its operands plain tensors?"""
    return (
        all(isinstance(x, (int, float)) for x in call.kwargs.values())
        and all(
            isinstance(x, TensorRef) and x == TensorRef(x.buffer) for x in call.args
        )
        and (call.autocast is None or not call.autocast.on)
    )

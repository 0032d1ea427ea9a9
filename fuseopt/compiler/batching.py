"""Calls on matrices, for the scheduler: calls that batch with equal bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..capture.aten.added_products import added
from ..capture.aten.externs import Call, TensorRef
from ..capture.scalars.host import Sym
from ..capture.trace import Captured
from ..compat import product_functions
from ..config import Config
from ..ir.graph import Batch, Symbol
from ..ir.products import CHAINED, DENSE, IN_PLACE, SCALED, Options, Product, Trial
from ..runtime.chains import Chains, may_chain, orders
from ..runtime.matrix_calls import BY_MATRIX, scaled_sum
from ..runtime.probes import Probes
from ..scheduler.batches import ONLY
from ..scheduler.passes import Verdict

#: The calls that compute one product, with the number of their tensor arguments.
PRODUCTS = {
    torch.ops.aten.mm.default: 2,
    torch.ops.aten.addmm.default: 3,
    torch.ops.aten.bmm.default: 2,
    torch.ops.aten.baddbmm.default: 3,
    scaled_sum: 3,
    added: 3,
}
#: The names of those that ATen lacks.
_OWN: dict[Any, str] = {scaled_sum: SCALED, added: IN_PLACE}


class Products:
    """Products of one captured step; implements scheduler.passes.Batching."""

    def __init__(
        self,
        captured: Captured,
        probes: Probes,
        config: Config,
        chains: Chains | None = None,
    ) -> None:
        self.calls = captured.calls
        self.library = chains
        self.chains = chains is not None
        self.probes = probes
        self.cache_dir = config.cache_dir
        self.fast = config.numerics == "fast"
        self.bytes = config.batch_bytes
        self.places = product_functions() is not None

    def product(self, payload: int) -> Product | str:
        """Return the product that a call computes, or the reason against a batch."""
        call = self.calls[payload]
        if call.func in PRODUCTS:
            return _product(call)
        return _by_matrix(call) if call.func in BY_MATRIX else ""

    def verdict(self, trial: Trial, chain: bool) -> Verdict:
        """Return how a batched call gives the bits of single calls, or why not."""
        if not trial.results:
            return Verdict(DENSE)
        if chain and self.library is not None and may_chain(trial, self.library):
            if self.fast:
                return Verdict(CHAINED, order=orders(trial)[0])
            order = self.probes.order(trial, self.cache_dir, self.library)
            if order:
                return Verdict(CHAINED, order=order)
        if trial.rows < 2:
            return Verdict("", ONLY)
        if self.fast:
            return Verdict(DENSE)
        if trial.op == SCALED:
            return Verdict("", "a chain has other bits here")
        way = self.probes.way(trial, self.cache_dir)
        if way is None:
            return Verdict("", "a device that cannot be probed now")
        return Verdict(way, "" if way else "one batched call has other bits here")


def _product(call: Call) -> Product | str:
    refs = call.args[: PRODUCTS[call.func]]
    if call.autocast is not None and call.autocast.on:
        return "autocast is on"
    if not all(isinstance(x, TensorRef) and x == TensorRef(x.buffer) for x in refs):
        return "it reads conjugated or negated tensors"
    scales: list[float | Symbol] = []
    if len(refs) == 3:
        for name in ("beta", "alpha"):
            x = call.kwargs.get(name, 1.0)
            if isinstance(x, Sym):
                scales.append(Symbol(x.index))
            elif isinstance(x, (int, float)):
                scales.append(float(x))
            else:
                return "a scale that the step computes"
    (result,) = call.outputs
    op = _OWN.get(call.func) or call.func._schema.name.removeprefix("aten::")
    return Product(op, tuple(x.buffer for x in refs), (result,), tuple(scales))


def _by_matrix(call: Call) -> Product | str:
    """Return a call that treats matrices one by one."""
    count = BY_MATRIX[call.func]
    refs = call.args[:count]
    if call.autocast is not None and call.autocast.on:
        return "autocast is on"
    if not all(isinstance(x, TensorRef) and x == TensorRef(x.buffer) for x in refs):
        return "it reads conjugated or negated tensors"
    names = [x.name for x in call.func._schema.arguments][count:]
    given = {**dict(zip(names, call.args[count:], strict=False)), **call.kwargs}
    options: Options = tuple(sorted(given.items()))
    if not all(x is None or isinstance(x, (bool, int, float, str)) for _, x in options):
        return "an argument that the step computes"
    if any(b not in call.fresh for b in call.outputs):
        return "it returns existing memory"
    op = call.func._schema.name.removeprefix("aten::")
    return Product(op, tuple(x.buffer for x in refs), call.outputs, options=options)


def allowed(
    probes: Probes, config: Config, chains: Chains | None = None
) -> Callable[[Batch], bool | None] | None:
    """Return a function: does a batch have the bits of single calls right now?

    That returns None while no probe can run. Returns None if the bits need not agree.
    """
    if config.numerics == "fast":
        return None

    def has(batch: Batch) -> bool | None:
        if not batch.results:
            return True
        if batch.way == CHAINED and chains is not None:
            order = probes.order(batch.trial, config.cache_dir, chains)
            return None if order is None else order == batch.order
        way = probes.way(batch.trial, config.cache_dir)
        return None if way is None else way == batch.way

    return has

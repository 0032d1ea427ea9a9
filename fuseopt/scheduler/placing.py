"""Place matrices of single products in the step's arena, so that C can call these.

That are the results of small products, and what kernels make for these alone. ATen then
allocates nothing, and no address changes from call to call.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

from ..ir.graph import (
    DTYPE_BYTES,
    Batch,
    Buffer,
    Extern,
    Graph,
    Stack,
    Step,
    storage_bytes,
)
from ..ir.products import PLACEABLE, Product
from .batch_limits import MOST, PLACED
from .batch_operands import contiguous_strides
from .dependencies import CPU
from .passes import Batching

_Members = Mapping[int, list[Buffer]]


def placed(
    graph: Graph,
    batching: Batching,
    steps: Sequence[Step],
    members: _Members,
    stacked: Container[int],
) -> list[Stack]:
    """Return a stack for each matrix that can have a place, each with one row.

    `members`: the buffers of each storage of temps; `stacked`: storages in stacks.
    """
    outputs = {graph.buffers[b].storage for b in graph.outputs}
    products = [*_products(batching, steps)]
    found: dict[int, Stack] = {}
    for product in products:
        buffers = [graph.buffers[b] for b in (*product.operands, *product.results)]
        x = buffers[-1]
        views = members.get(x.storage, ())
        if (
            _may_lie(x, views, outputs)
            and x.stride == contiguous_strides(x.shape)
            and all((y.dtype, y.device) == (x.dtype, CPU) for y in buffers)
            and storage_bytes(views) == x.numel * DTYPE_BYTES[x.dtype]
        ):
            found[x.storage] = _stack(x, views)
    if not found:
        return []
    called = _called(graph, batching, steps)
    for product in products:
        for x in (graph.buffers[b] for b in product.operands):
            views = members.get(x.storage, ())
            s = x.storage
            if s not in found and s not in stacked and s not in called:
                if _may_lie(x, views, outputs):
                    found[s] = _stack(x, views)
    return [*found.values()]


def _products(batching: Batching, steps: Sequence[Step]) -> Iterator[Product]:
    """Yield the single products among steps."""
    for step in steps:
        product = batching.product(step.payload) if isinstance(step, Extern) else ""
        if isinstance(product, Product) and product.op in PLACEABLE:
            yield product


def _called(graph: Graph, batching: Batching, steps: Sequence[Step]) -> set[int]:
    """Return the storages that calls write, and that calls other than products read."""
    found: set[int] = set()
    for step in steps:
        if not isinstance(step, (Extern, Batch)):
            continue
        values = set(step.writes)
        if isinstance(step, Extern):
            product = batching.product(step.payload)
            if not isinstance(product, Product) or product.op not in PLACEABLE:
                values |= set(step.reads)
        found.update(graph.buffers[graph.values[v]].storage for v in values)
    return found


def _may_lie(x: Buffer, views: Sequence[Buffer], outputs: Container[int]) -> bool:
    """May a matrix and its views lie in the arena?"""
    return (
        x.kind == "temp"
        and x.storage not in outputs
        and x.dtype in MOST
        and all((y.dtype, y.device) == (x.dtype, CPU) for y in views)
        and 0 < x.numel <= PLACED
    )


def _stack(x: Buffer, views: Sequence[Buffer]) -> Stack:
    return Stack((x.storage,), storage_bytes(views), x.dtype, x.device)

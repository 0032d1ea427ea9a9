"""Interface of a scheduler pass, and the facts about the machine that passes read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..ir.graph import Graph, Kernel, Schedule
from ..ir.products import Product, Trial
from .dependencies import CPU


class Verdict(NamedTuple):
    """The way in which a batched call has the bits of single calls, see Batch.way.

    `way` is "" if it has not, and `why` the reason. `order`: see Batch.
    """

    way: str
    why: str = ""
    order: str = ""


class Batching(Protocol):
    """The inputs of batching besides the graph.

    `bytes`: the most bytes of one operand of a batch; what has more is several batches.
    `places`: true if results of single products may lie in the arena, for calls from C.
    `chains`: true if one product may be a chain.
    """

    bytes: int
    places: bool
    chains: bool

    def product(self, payload: int) -> Product | str:
        """Return the product that an ATen call computes.

        Returns the reason if it cannot be batched, and "" if it is no product.
        """

    def verdict(self, trial: Trial, chain: bool) -> Verdict:
        """Return whether these products may be one call; `chain`: also CHAINED."""


@dataclass(frozen=True)
class Machine:
    """Facts outside of the graph that a schedule depends on.

    `block_bytes`: the memory that the lanes of a block may touch, so that it stays in
    the cache between kernels. It is 0 if kernels cannot go block by block. `batching`:
    None if no products are batched.
    """

    block_bytes: int = 0
    batching: Batching | None = None


class Pass(NamedTuple):
    """A pass: maps a Schedule of a graph to an equivalent Schedule.

    `apply` returns the same object if it changes nothing.
    """

    name: str
    apply: Callable[[Graph, Schedule, Machine], Schedule]


def kernel_device(graph: Graph, kernel: Kernel) -> str:
    """Return the device of a kernel's results; it may read numbers of the CPU."""
    v = kernel.variants[0]
    return graph.buffers[v.columns[v.stores[0][1]][0]].device


def goes_by_blocks(graph: Graph, schedule: Schedule, machine: Machine) -> bool:
    """Do all kernels run on the CPU, and may they go block by block?"""
    return machine.block_bytes > 0 and all(
        kernel_device(graph, k) == CPU for k in schedule.kernels
    )

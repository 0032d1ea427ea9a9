"""What a pass of the scheduler is, and what passes know of the machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..ir.graph import Graph, Kernel, Schedule
from ..ir.products import Product, Trial
from .dependencies import CPU


class Verdict(NamedTuple):
    """How a batched call has the bits of single calls, see Batch.way; "" and why, where
    it has not.
    """

    way: str
    why: str = ""


class Batching(Protocol):
    """What the batches of products depend on besides the graph.

    `bytes`: the most bytes of one operand of a batch; what has more is several batches.
    """

    bytes: int

    def product(self, payload: int) -> Product | str:
        """The product that an ATen call is; why it cannot be batched; "" for what is no
        product.
        """

    def verdict(self, trial: Trial) -> Verdict:
        """May these products be one call?"""


@dataclass(frozen=True)
class Machine:
    """What a schedule depends on besides its graph.

    `block_bytes`: how much memory the lanes of a block may touch, so that the cache
    keeps it from one kernel to the next; 0 if kernels cannot go block by block.
    `batching`: None if no products are batched.
    """

    block_bytes: int = 0
    batching: Batching | None = None


class Pass(NamedTuple):
    """A pass: a Schedule that does what the graph does -> another one that does.

    `apply` returns the very schedule that it was given where it changes nothing.
    """

    name: str
    apply: Callable[[Graph, Schedule, Machine], Schedule]


def kernel_device(graph: Graph, kernel: Kernel) -> str:
    """The device of what a kernel writes; it may read numbers of the CPU."""
    v = kernel.variants[0]
    return graph.buffers[v.columns[v.stores[0][1]][0]].device


def goes_by_blocks(graph: Graph, schedule: Schedule, machine: Machine) -> bool:
    """Are all kernels the CPU's, and may they go block by block there?"""
    return machine.block_bytes > 0 and all(
        kernel_device(graph, k) == CPU for k in schedule.kernels
    )

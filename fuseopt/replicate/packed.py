"""Lanes with packed tensors, which a step's kernel unpacks and packs again.

The optimizer has tensors of full size for them, without memory. A kernel computes their
contents from the packed tensors before the step, and packs them after it. Nothing else
reads the unpacked contents, so they never lie in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from ..capture.trace import Captured
from ..errors import CaptureError
from ..ir.alias import overlaps
from ..ir.graph import read_by, written_by

#: The tensors of a lane, by name: the unpacked and the packed ones.
Tensors = Mapping[str, torch.Tensor]


class Packing(Protocol):
    """A packed format of lanes' tensors. Its functions for lanes are marked OWN."""

    def of(
        self, param: torch.Tensor, state: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return, by name, the packed tensors of a lane, and the ones with memory to
        pack. Without a gradient, a lane has only its parameter to unpack.

        Among these, the step itself may use the parameter, and no other tensor.
        """

    def unpacked(
        self, param: torch.Tensor, state: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of this lane without memory, by name."""

    def unpack(self, lanes: Sequence[Tensors]) -> None:
        """Compute the unpacked tensors of each lane."""

    def pack(self, lanes: Sequence[Tensors]) -> None:
        """Pack the contents of these tensors after the step."""

    def restore(self, lanes: Sequence[Tensors]) -> None:
        """Compute again the parameters of these lanes, which have no memory."""


def without_memory(captured: Captured, sources: Collection[int]) -> Captured:
    """Return the same step, with these sources as temps.

    Raises CaptureError if a source is read before the step writes it, shares memory, or
    is returned.
    """
    graph = captured.graph
    chosen = {
        b
        for b, x in enumerate(graph.buffers)
        if x.kind in ("static", "arg") and x.source in sources
    }
    near = overlaps(graph.buffers)
    views = {b: x for x in chosen for b in near.get(x, ())}
    for b in views:
        if graph.buffers[b].kind != "view":
            raise CaptureError(f"{graph.buffers[b].name} shares memory")
    temps = chosen | views.keys()
    if not temps.isdisjoint(graph.outputs):
        raise CaptureError("the step returns a tensor that it keeps packed")
    written: set[int] = set()
    for node in graph.nodes:
        for v in read_by(node):
            b = graph.values[v]
            if views.get(b, b) in chosen - written:
                raise CaptureError(f"{graph.buffers[b].name} is read too early")
        written.update(
            views.get(b, b) for b in map(graph.values.__getitem__, written_by(node))
        )
    buffers = [
        x._replace(kind="temp", source=-1) if b in temps else x
        for b, x in enumerate(graph.buffers)
    ]
    initial = [-1 if b in temps else v for b, v in enumerate(graph.initial)]
    final = [-1 if b in temps else v for b, v in enumerate(graph.final)]
    graph = replace(
        graph, buffers=tuple(buffers), initial=tuple(initial), final=tuple(final)
    )
    return replace(captured, graph=graph)

"""Which tensors a step gives other memory: `p.data = x`, `p.set_(x)`.

Dynamo writes both as calls of its graph. While the graph is recorded they happen to the
twins of its tensors, so that whatever reads `p` later reads what `x` is. Of what comes
out of that, `Places` tells which of the graph's own tensors end elsewhere than they
began: those are given their memory when the step has run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.fx import Node

from ...errors import EagerOnly
from ..aten.buffers import Buffers
from ..aten.dtypes import PARTS

#: Calls that let a tensor be seen in other memory than before.
GIVING = frozenset({"set_", "__setattr__"})
#: Calls that make memory larger or smaller, or take it away.
RESIZING = frozenset(
    "resize_ resize_as_ resize_as_sparse_ resize_storage_bytes_ "
    "sparse_resize_ sparse_resize_and_clear_".split()
)


def called(node: Node) -> str:
    """The name of what a node calls, without namespace and overload."""
    name = str(getattr(node.target, "__name__", node.target))
    return (
        name.partition("::")[2].partition(".")[0]
        if "::" in name
        else (name.partition(".")[0])
    )


def gives_memory(node: Node) -> bool:
    """Does a call let a tensor be seen in other memory than before?"""
    return node.op.startswith("call") and called(node) in GIVING


def refuse_resizing(nodes: Iterable[Node]) -> None:
    """Raise EagerOnly if a call makes memory larger or smaller: kernels and views are
    planned for memory that is as large as it was.
    """
    for node in nodes:
        if node.op.startswith("call") and called(node) in RESIZING:
            raise EagerOnly(f"the step changes the size of memory ({node.target})")


class Given(NamedTuple):
    """The tensor at this place among those of a call gets the memory of a buffer.

    `complex`: the buffer is the real view of what it gets.
    """

    place: int
    buffer: int
    complex: bool


class Places:
    """Where the tensors of a graph lie as it begins, by their twins."""

    def __init__(self) -> None:
        self._known: list[tuple[torch.Tensor, object, tuple[object, ...]]] = []

    def add(self, twin: torch.Tensor) -> None:
        """Take note of the twin of the next tensor."""
        # its storage is kept: another at the same address would be taken for it
        self._known.append((twin, twin.untyped_storage(), _place(twin)))

    def moved(self) -> list[tuple[int, torch.Tensor]]:
        """The twins that lie elsewhere now, or are seen otherwise."""
        return [
            (i, twin)
            for i, (twin, _, place) in enumerate(self._known)
            if _place(twin) != place
        ]

    def given(self, recorder: Buffers) -> tuple[Given, ...]:
        """What the step gives to which tensors. Raises EagerOnly if nobody knows."""
        found = []
        for i, twin in self.moved():
            if twin.is_conj() or twin.is_neg():
                raise EagerOnly("a tensor is given a conjugated or negated view")
            if recorder.known(twin) is None:
                raise EagerOnly("a tensor is given memory of unknown origin")
            buffer = recorder.buffer_of(twin)
            found.append(Given(i, buffer, twin.dtype in PARTS))
        return tuple(found)


def _place(t: torch.Tensor) -> tuple[object, ...]:
    storage = t.untyped_storage()
    return storage._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype


__all__ = ["GIVING", "Given", "Places", "called", "gives_memory", "refuse_resizing"]

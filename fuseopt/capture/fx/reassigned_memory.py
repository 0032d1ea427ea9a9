"""Find the tensors to which a step assigns other memory: `p.data = x`, `p.set_(x)`.

Both are calls in Dynamo's graph. The recording applies them to the meta twins of its
tensors, so that later reads of `p` read the memory of `x`. `Places` finds the twins
whose memory has changed at the end. Their tensors are assigned that memory after the
step has run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.fx import Node

from ...errors import EagerOnly
from ..aten.buffers import Buffers
from ..aten.dtypes import PARTS

#: Calls that assign other memory to a tensor.
GIVING = frozenset({"set_", "__setattr__"})
#: Calls that change the size of memory.
RESIZING = frozenset(
    "resize_ resize_as_ resize_as_sparse_ resize_storage_bytes_ "
    "sparse_resize_ sparse_resize_and_clear_".split()
)


def called(node: Node) -> str:
    """Return the name of the op that a node calls, without namespace and overload."""
    name = str(getattr(node.target, "__name__", node.target))
    return (
        name.partition("::")[2].partition(".")[0]
        if "::" in name
        else (name.partition(".")[0])
    )


def gives_memory(node: Node) -> bool:
    """Does a node assign other memory to a tensor?"""
    return node.op.startswith("call") and called(node) in GIVING


def refuse_resizing(nodes: Iterable[Node]) -> None:
    """Raise EagerOnly if a call resizes memory.

    Kernels and views are planned for memory of the original size.
    """
    for node in nodes:
        if node.op.startswith("call") and called(node) in RESIZING:
            raise EagerOnly(f"the step changes the size of memory ({node.target})")


class MemoryAssignment(NamedTuple):
    """An assignment: the tensor at index `place` of a call gets the memory of a buffer.

    `complex`: the buffer is the real view of that memory.
    `written`: the step also writes the tensor in place, which moves its version.
    """

    place: int
    buffer: int
    complex: bool
    written: bool = False


class Places:
    """Memory and layout of a graph's tensors at its beginning, by their twins."""

    def __init__(self) -> None:
        self._known: list[tuple[torch.Tensor, object, tuple[object, ...]]] = []
        self._versions: list[int] = []

    def add(self, twin: torch.Tensor) -> None:
        """Record the twin of the next tensor."""
        # keeps the storage alive, since a new storage at its address would look equal
        self._known.append((twin, twin.untyped_storage(), _place(twin)))
        self._versions.append(_version(twin))

    def moved(self) -> list[tuple[int, torch.Tensor]]:
        """Return the twins whose memory or layout has changed, with their index."""
        return [
            (i, twin)
            for i, (twin, _, place) in enumerate(self._known)
            if _place(twin) != place
        ]

    def given(self, recorder: Buffers) -> tuple[MemoryAssignment, ...]:
        """Return the step's assignments of memory.

        Raises EagerOnly for memory of unknown origin, and for a conjugated or negated
        view.
        """
        assignments = []
        for i, twin in self.moved():
            if twin.is_conj() or twin.is_neg():
                raise EagerOnly("a tensor is given a conjugated or negated view")
            if recorder.known(twin) is None:
                raise EagerOnly("a tensor is given memory of unknown origin")
            buffer = recorder.buffer_of(twin)
            written = _version(twin) != self._versions[i]
            assignments.append(
                MemoryAssignment(i, buffer, twin.dtype in PARTS, written)
            )
        return tuple(assignments)


def _version(t: torch.Tensor) -> int:
    """Return the version of a tensor, which an assignment of memory leaves as it is."""
    return 0 if t.is_inference() else t._version


def _place(t: torch.Tensor) -> tuple[object, ...]:
    storage = t.untyped_storage()
    return storage._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype


__all__ = [
    "GIVING",
    "MemoryAssignment",
    "Places",
    "called",
    "gives_memory",
    "refuse_resizing",
]

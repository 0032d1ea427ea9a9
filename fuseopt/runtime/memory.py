"""Memory of one call: a tensor for every buffer of the graph.

Inputs are the tensors of the call. Views lie in the memory of inputs. Temps are
allocated here, or returned by an extern. A `Layout` belongs to a plan: it groups
buffers by storage. A `Memory` has the tensors of one call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..capture.aten.dtypes import NAMED_DTYPES, PARTS
from ..capture.aten.externs import Call, TensorRef, tensors_in
from ..capture.scalars.device import NumberRef
from ..capture.scalars.host import Sym
from ..compat import negated_view
from ..errors import LaunchError
from ..ir.graph import (
    DTYPE_BYTES,
    Buffer,
    MemoryPlan,
    Schedule,
    span,
    storage_bytes,
)
from .extern_calls import CallTensor, PreparedCall
from .probes import Circumstances
from .tables.addresses import AddressPool


def extent(b: Buffer) -> int:
    """Return the bytes from a buffer's first element to past its last."""
    start, end = span(b)
    return end - start


@dataclass(frozen=True)
class Layout:
    """Groups of buffers that share a storage, and the source of its memory.

    `base` has the first input buffer of a storage of inputs. `members` has all buffers
    of a storage of temps. `plan` is the scheduler's plan of the temps' memory. `homes`
    has memory (uint8) for a storage of temps, for the lifetime of the tables. `helper`
    is the library of Built. Each binding has a Layout.
    """

    buffers: Sequence[Buffer]
    base: Mapping[int, int]
    members: Mapping[int, list[int]]
    plan: MemoryPlan
    homes: Mapping[int, torch.Tensor] = field(default_factory=dict)
    helper: ctypes.PyDLL | None = None
    _bytes: dict[int, int] = field(default_factory=dict)

    def bytes_of(self, storage: int) -> int:
        """Return the size of a storage of temps in bytes."""
        size = self._bytes.get(storage)
        if size is None:
            members = [self.buffers[m] for m in self.members[storage]]
            size = self._bytes[storage] = storage_bytes(members)
        return size

    def without_memory(self, temps: Sequence[int]) -> list[int]:
        """Return the temps without memory, except those that an extern returns."""
        with_memory = self.plan.returned.union(self.homes, self.plan.offsets)
        return [b for b in temps if self.buffers[b].storage not in with_memory]


def layout(buffers: Sequence[Buffer], schedule: Schedule) -> Layout:
    """Return the Layout of a graph's buffers."""
    base: dict[int, int] = {}
    members: dict[int, list[int]] = {}
    for b, buffer in enumerate(buffers):
        if buffer.kind in ("static", "arg"):
            base.setdefault(buffer.storage, b)
        elif buffer.kind == "temp":
            members.setdefault(buffer.storage, []).append(b)
    return Layout(buffers, base, members, schedule.memory)


def seen_real(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the graph's form: a complex one as pairs of real numbers."""
    return torch.view_as_real(t) if t.dtype in PARTS else t


def _seen_as(t: torch.Tensor, first: int, buffer: Buffer) -> torch.Tensor:
    """Return the memory of `t` as another buffer of its storage. The buffer of `t`
    begins at byte `first` of that storage.
    """
    start = t.storage_offset() * t.element_size() + buffer.first_byte - first
    if t.dtype == NAMED_DTYPES[buffer.dtype]:
        return t.as_strided(buffer.shape, buffer.stride, start // t.element_size())
    view = torch.empty(0, dtype=NAMED_DTYPES[buffer.dtype], device=t.device)
    size = DTYPE_BYTES[buffer.dtype]
    storage = t.untyped_storage()
    return view.set_(storage, start // size, buffer.shape, buffer.stride)


def _same_strides(t: torch.Tensor, buffer: Buffer) -> bool:
    """Are strides equal where there is more than one element to step over?"""
    return t.stride() == buffer.stride or not any(
        n > 1 and s != actual
        for n, s, actual in zip(buffer.shape, buffer.stride, t.stride(), strict=True)
    )


class Memory:
    """Tensors of one call, and their addresses in the pool."""

    def __init__(
        self,
        layout: Layout,
        tensors: Sequence[torch.Tensor],
        addresses: AddressPool,
        numbers: Sequence[Any],
    ) -> None:
        self.layout = layout
        self.tensors = tensors
        self.place = addresses.place
        self.words = addresses.words
        self.position = addresses.places.of
        self.numbers = numbers
        self._made: dict[int, torch.Tensor] = {}
        self._storages: dict[int, tuple[torch.Tensor, int]] = {}  # tensor, first byte
        #: the arena of this call, see run_tables.TempArena
        self.arena: Mapping[str, tuple[torch.Tensor, int]] | None = None
        #: the circumstances of products, once they were looked up
        self.circumstances: Circumstances | None = None

    def tensor(self, b: int) -> torch.Tensor:
        """Return the tensor of buffer b, created at its first use."""
        t = self._made.get(b)
        if t is not None:
            return t
        buffer = self.layout.buffers[b]
        if buffer.kind in ("static", "arg"):
            t = self.tensors[buffer.source].detach()
        elif buffer.kind == "view":
            base = self.layout.buffers[self.layout.base[buffer.storage]]
            t = _seen_as(self.tensors[base.source], base.first_byte, buffer)
        else:
            if buffer.storage not in self._storages:
                self._allocate(buffer)
            t = _seen_as(*self._storages[buffer.storage], buffer)
            self.place(self.position[b], t.data_ptr())
        self._made[b] = t
        return t

    def alive(self) -> list[torch.Tensor]:
        """Return all tensors of the call that exist now."""
        return [*self._made.values(), *(t for t, _ in self._storages.values())]

    def _allocate(self, buffer: Buffer) -> None:
        """Allocate all temps of a storage at once, or take their place in the arena."""
        at = self.layout.plan.offsets.get(buffer.storage)
        if at is not None and self.arena is not None:
            arena, first = self.arena[buffer.device]
            self._storages[buffer.storage] = arena, first - at
            return
        memory = self.layout.homes.get(buffer.storage)
        if memory is not None:
            self._storages[buffer.storage] = memory, 0
            return
        size = self.layout.bytes_of(buffer.storage)
        memory = torch.empty(size, dtype=torch.uint8, device=buffer.device)
        self._storages[buffer.storage] = memory, 0
        if buffer.storage in self.layout.plan.returned:
            # rows of a batch are copied there; kernels find all views by addresses
            for b in self.layout.members[buffer.storage]:
                self.tensor(b)

    def allocate(self, temps: Sequence[int]) -> None:
        """Allocate the temps among these that need it: see Layout.without_memory."""
        for b in self.layout.without_memory(temps):
            self.tensor(b)

    def take_copies(self, originals: Mapping[int, torch.Tensor]) -> None:
        """Take copies of tensors for some buffers, with the originals' shared
        memory.
        """
        storages: dict[Any, torch.Tensor] = {}
        for b, t in originals.items():
            storage = t.untyped_storage()
            # storages without bytes have one address on all devices
            place = t.device, storage.data_ptr()
            if place not in storages:
                whole = torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage)
                storages[place] = whole.clone()
            copy = storages[place].untyped_storage()
            view = torch.empty(0, dtype=t.dtype, device=t.device)
            geometry = (t.storage_offset(), t.shape, t.stride())
            self._made[b] = view.set_(copy, *geometry)

    def _adopt(self, b: int, t: torch.Tensor, name: str) -> None:
        """Take a tensor that an extern returned as temp b.

        Raises LaunchError if its shape or dtype is not that of the shape rule.
        """
        buffer = self.layout.buffers[b]
        if t.is_conj() or t.is_neg():
            t = t.resolve_conj().resolve_neg()
        t = seen_real(t)
        if t.shape != buffer.shape or t.dtype != NAMED_DTYPES[buffer.dtype]:
            raise LaunchError(
                f"{name} returned {t.dtype} of shape {list(t.shape)}; its shape rule "
                f"gives {buffer.dtype} of {list(buffer.shape)}. fuseopt has restored "
                "the writes of the step. Run this step uncompiled"
            )
        if buffer.storage in self.layout.plan.loose:
            # the next ATen call gets the strides that it has in eager, for eager's bits
            self._made[b] = t
            return
        if not _same_strides(t, buffer):
            # kernels and views were planned for the strides of the shape rule
            copy = torch.empty_strided(
                buffer.shape, buffer.stride, dtype=t.dtype, device=t.device
            )
            t = copy.copy_(t)
        first = self._storages.setdefault(buffer.storage, (t, buffer.first_byte))
        if first[0] is not t:
            # a result of the same storage came first
            view = _seen_as(*first, buffer)
            if view.data_ptr() != t.data_ptr():
                t = view.copy_(t)
        self._made[b] = t
        self.place(self.position[b], t.data_ptr())
        for member in self.layout.members[buffer.storage]:
            if member != b:
                self._made.pop(member, None)
                self.tensor(member)

    def number(self, x: NumberRef) -> float | int | bool:
        """Return a number that the step computed, for Python; wait for the device."""
        number: float | int | bool = x.kind(self.tensor(x.buffer).item())
        return number

    def _argument(self, x: Any) -> Any:
        if isinstance(x, TensorRef):
            t = self._made.get(x.buffer)
            if t is None:
                t = self.tensor(x.buffer)
            t = torch.view_as_complex(t) if x.complex else t
            t = t.conj() if x.conj else t
            return negated_view(t) if x.neg else t
        if isinstance(x, NumberRef):
            return self.number(x)
        if isinstance(x, CallTensor):
            return self.tensors[x.source]
        if isinstance(x, Sym):
            return self.numbers[x.index]
        if isinstance(x, (list, tuple)) and not isinstance(x, torch.Size):
            return type(x)([self._argument(y) for y in x])
        return x

    def run(self, extern: PreparedCall) -> None:
        """Run an extern's ATen call on the tensors of this call."""
        tensors = self._made
        args = extern.args.copy()
        for place, b in extern.tensors:
            t = tensors.get(b)
            args[place] = self.tensor(b) if t is None else t
        for place, x in extern.others:
            args[place] = self._argument(x)
        kwargs = extern.kwargs
        if extern.computed:
            kwargs = {k: self._argument(v) for k, v in kwargs.items()}
        if extern.placed is not None:
            extern.function(*args, **kwargs, out=self.tensor(extern.placed))
            self.free(extern.freed)
            return
        got = extern.function(*args, **kwargs)
        result = extern.result
        if (
            result is None
            or type(got) is not torch.Tensor
            or got.shape != result.shape
            or got.dtype != result.dtype
            or got.is_neg()
            or not (result.loose or got.stride() == result.stride)
        ):
            self._take(extern.name, extern.call, tensors_in(got))
        else:
            # the next ATen call gets the strides that it has in eager, for eager's bits
            tensors[result.buffer] = got
            if not result.loose:
                self._storages[result.storage] = got, result.first_byte
                self.place(result.position, got.data_ptr())
                for view in result.views:
                    first = got.storage_offset() + view.offset
                    alias = got.as_strided(view.shape, view.stride, first)
                    tensors[view.buffer] = alias
                    self.place(view.position, alias.data_ptr())
        # as `free`, without a call of Python for each ATen call
        storages, buffers = extern.freed
        for b in buffers:
            tensors.pop(b, None)
        for s in storages:
            self._storages.pop(s, None)

    def free(self, freed: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
        """Forget storages and buffers that no later step reads."""
        storages, buffers = freed
        for b in buffers:
            self._made.pop(b, None)
        for s in storages:
            self._storages.pop(s, None)

    def _take(self, name: str, call: Call, got: Sequence[torch.Tensor]) -> None:
        """Take the tensors that a call returned as the buffers of its results."""
        if len(got) != len(call.outputs):
            raise LaunchError(
                f"{name} returned {len(got)} tensors; its shape rule gives "
                f"{len(call.outputs)}"
            )
        for b, t in zip(call.outputs, got, strict=True):
            if b in call.fresh:
                self._adopt(b, t, name)

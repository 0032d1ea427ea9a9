"""The memory of one call: a tensor for every buffer, whoever made it.

Inputs are the tensors of the call; views are other ways to see those; temps are
allocated, or are what an extern returned. `Layout` is what a plan knows beforehand,
`Memory` the tensors of a call.
"""

from __future__ import annotations

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
from ..ir.graph import DTYPE_BYTES, Buffer, MemoryPlan, span, storage_bytes
from .extern_calls import Prepared
from .tables.addresses import AddressPool


def extent(b: Buffer) -> int:
    """Bytes from a buffer's first element to past its last."""
    start, end = span(b)
    return end - start


@dataclass(frozen=True)
class Layout:
    """Which buffers share a storage, and who makes it.

    `base`: the input that a storage came in by. `members`: all buffers of a temp
    storage. `plan`: what the scheduler said of temps. `homes`: memory that a storage of
    temps has as long as the tables are, as uint8.
    """

    buffers: Sequence[Buffer]
    base: Mapping[int, int]
    members: Mapping[int, list[int]]
    plan: MemoryPlan
    homes: Mapping[int, torch.Tensor] = field(default_factory=dict)
    _bytes: dict[int, int] = field(default_factory=dict)

    def bytes_of(self, storage: int) -> int:
        """The size of a storage of temps."""
        known = self._bytes.get(storage)
        if known is None:
            own = [self.buffers[m] for m in self.members[storage]]
            known = self._bytes[storage] = storage_bytes(own)
        return known

    def without_memory(self, temps: Sequence[int]) -> list[int]:
        """Those temps whose memory is neither known nor what an extern returns."""
        known = self.plan.returned.union(self.homes, self.plan.offsets)
        return [b for b in temps if self.buffers[b].storage not in known]


def layout(buffers: Sequence[Buffer], plan: MemoryPlan) -> Layout:
    """What can be known of a plan's memory before any call."""
    base: dict[int, int] = {}
    members: dict[int, list[int]] = {}
    for b, buffer in enumerate(buffers):
        if buffer.kind in ("static", "arg"):
            base.setdefault(buffer.storage, b)
        elif buffer.kind == "temp":
            members.setdefault(buffer.storage, []).append(b)
    return Layout(buffers, base, members, plan)


def seen_real(t: torch.Tensor) -> torch.Tensor:
    """A tensor as the graph knows it: a complex one is seen through its parts."""
    return torch.view_as_real(t) if t.dtype in PARTS else t


def _seen_as(t: torch.Tensor, first: int, buffer: Buffer) -> torch.Tensor:
    """The memory of `t`, whose buffer begins at byte `first` of its storage, as
    another buffer of that storage sees it.
    """
    start = t.storage_offset() * t.element_size() + buffer.first_byte - first
    if t.dtype == NAMED_DTYPES[buffer.dtype]:
        return t.as_strided(buffer.shape, buffer.stride, start // t.element_size())
    made = torch.empty(0, dtype=NAMED_DTYPES[buffer.dtype], device=t.device)
    size = DTYPE_BYTES[buffer.dtype]
    storage = t.untyped_storage()
    return made.set_(storage, start // size, buffer.shape, buffer.stride)


def _same_strides(t: torch.Tensor, buffer: Buffer) -> bool:
    """Strides count only where there is more than one element to step over."""
    return t.stride() == buffer.stride or not any(
        n > 1 and s != own
        for n, s, own in zip(buffer.shape, buffer.stride, t.stride(), strict=True)
    )


class Memory:
    """The tensors of one call, and their addresses in the pool."""

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
        self.position = addresses.places.of
        self.numbers = numbers
        self._made: dict[int, torch.Tensor] = {}
        self._storages: dict[int, tuple[torch.Tensor, int]] = {}  # tensor, first byte

    def tensor(self, b: int) -> torch.Tensor:
        """The tensor of buffer b, made when it is first asked for."""
        made = self._made.get(b)
        if made is not None:
            return made
        buffer = self.layout.buffers[b]
        if buffer.kind in ("static", "arg"):
            made = self.tensors[buffer.source].detach()
        elif buffer.kind == "view":
            own = self.layout.buffers[self.layout.base[buffer.storage]]
            made = _seen_as(self.tensors[own.source], own.first_byte, buffer)
        else:
            if buffer.storage not in self._storages:
                self._allocate(buffer)
            made = _seen_as(*self._storages[buffer.storage], buffer)
            self.place(self.position[b], made.data_ptr())
        self._made[b] = made
        return made

    def _allocate(self, buffer: Buffer) -> None:
        """One allocation for all the temps of a storage."""
        made = self.layout.homes.get(buffer.storage)
        if made is None:
            size = self.layout.bytes_of(buffer.storage)
            made = torch.empty(size, dtype=torch.uint8, device=buffer.device)
        self._storages[buffer.storage] = made, 0

    def allocate(self, temps: Sequence[int]) -> None:
        """Give memory to those temps that have none and that no extern returns."""
        for b in self.layout.without_memory(temps):
            self.tensor(b)

    def take_copies(self, made: Mapping[int, torch.Tensor]) -> None:
        """Take copies of buffers that are somebody else's; what shares memory there
        shares it here.
        """
        storages: dict[int, torch.Tensor] = {}
        for b, t in made.items():
            own = t.untyped_storage()
            if own.data_ptr() not in storages:
                whole = torch.empty(0, dtype=torch.uint8, device=t.device).set_(own)
                storages[own.data_ptr()] = whole.clone()
            copy = storages[own.data_ptr()].untyped_storage()
            seen = torch.empty(0, dtype=t.dtype, device=t.device)
            place = (t.storage_offset(), t.shape, t.stride())
            self._made[b] = seen.set_(copy, *place)

    def _adopt(self, b: int, t: torch.Tensor, name: str) -> None:
        """An extern returned the memory of temp b."""
        buffer = self.layout.buffers[b]
        if t.is_conj() or t.is_neg():
            t = t.resolve_conj().resolve_neg()
        t = seen_real(t)
        if t.shape != buffer.shape or t.dtype != NAMED_DTYPES[buffer.dtype]:
            raise LaunchError(
                f"{name} returned {t.dtype} of shape {list(t.shape)}; its shape rule "
                f"said {buffer.dtype} of {list(buffer.shape)}. Kernels that ran before "
                "it have written their results. Run this step uncompiled"
            )
        if buffer.storage in self.layout.plan.loose:
            # with eager's own strides the next call has eager's bits
            self._made[b] = t
            return
        if not _same_strides(t, buffer):
            # kernels and views were planned for the strides of the shape rule
            copy = torch.empty_strided(
                buffer.shape, buffer.stride, dtype=t.dtype, device=t.device
            )
            t = copy.copy_(t)
        known = self._storages.setdefault(buffer.storage, (t, buffer.first_byte))
        if known[0] is not t:
            # the second result of a call whose results share memory
            place = _seen_as(*known, buffer)
            if place.data_ptr() != t.data_ptr():
                t = place.copy_(t)
        self._made[b] = t
        self.place(self.position[b], t.data_ptr())
        for member in self.layout.members[buffer.storage]:
            if member != b:
                self._made.pop(member, None)
                self.tensor(member)

    def number(self, x: NumberRef) -> float | int:
        """A number that the step computed, as Python has it; waits for the device."""
        read = self.tensor(x.buffer).item()
        return read if x.is_float else int(read)

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
        if isinstance(x, Sym):
            return self.numbers[x.index]
        if isinstance(x, (list, tuple)) and not isinstance(x, torch.Size):
            return type(x)([self._argument(y) for y in x])
        return x

    def run(self, extern: Prepared) -> None:
        """Run an extern's ATen call on the memory as it is now, without recording."""
        made = self._made
        args = extern.args.copy()
        for place, b in extern.tensors:
            known = made.get(b)
            args[place] = self.tensor(b) if known is None else known
        for place, x in extern.others:
            args[place] = self._argument(x)
        kwargs = extern.kwargs
        if extern.computed:
            kwargs = {k: self._argument(v) for k, v in kwargs.items()}
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
            # with eager's own strides the next call has eager's bits
            made[result.buffer] = got
            if not result.loose:
                self._storages[result.storage] = got, result.first_byte
                self.place(result.position, got.data_ptr())
                for view in result.views:
                    first = got.storage_offset() + view.offset
                    seen = got.as_strided(view.shape, view.stride, first)
                    made[view.buffer] = seen
                    self.place(view.position, seen.data_ptr())
        storages, buffers = extern.freed
        for b in buffers:
            made.pop(b, None)
        for s in storages:
            self._storages.pop(s, None)

    def _take(self, name: str, call: Call, got: Sequence[torch.Tensor]) -> None:
        """Make what a call returned the memory of its results."""
        if len(got) != len(call.outputs):
            raise LaunchError(
                f"{name} returned {len(got)} tensors; its shape rule said "
                f"{len(call.outputs)}"
            )
        for b, t in zip(call.outputs, got, strict=True):
            if b in call.fresh:
                self._adopt(b, t, name)

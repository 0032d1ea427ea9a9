"""Memory of a step during recording: Buffers for views, values for writes.

A Buffer is identified by the storage, layout and dtype of a tensor. Buffers whose
elements may share memory are linked: a write to one gives the others a new value too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...errors import CaptureError
from ...ir.alias import may_share, self_overlaps
from ...ir.graph import DTYPE_BYTES, Buffer, span
from .dtypes import BUFFER_NAMES, DTYPE_NAMES, NAMED_DTYPES, real_dtype, real_layout


class Buffers:
    """Buffers and values recorded so far; see the module."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.values: list[int] = []
        self.current: list[int] = []  # the present value of each buffer
        self.initial: list[int] = []
        self.line = ""  # the source line being recorded
        self._wanted = ""  # the `device` argument of the call being recorded
        #: buffer -> (the buffer through which its memory was last written, the value)
        self._seen: dict[int, tuple[int, int]] = {}
        self._keys: dict[Any, int] = {}
        self._by_storage: dict[int, list[int]] = {}
        #: storage -> (first byte, last byte, buffer); buffer -> the buffers that it
        #: overlaps
        self._spans: dict[int, list[tuple[int, int, int]]] = {}
        self._near: dict[int, list[int]] = {}
        self._written: set[int] = set()  # buffers that a call has written
        self._folded: set[int] = set()  # buffers that may have an element twice
        self._hollow: set[int] = set()  # storages made without contents
        self._alive: list[Any] = []  # tensors whose storage identity is a key
        self._devices: dict[int, str] = {}  # device of a storage

    def keep(self, x: Any) -> None:
        """Keep an object alive whose id is a key."""
        self._alive.append(x)

    def add_input(
        self, meta: torch.Tensor, name: str, kind: str, source: int, device: str
    ) -> int:
        """Register a tensor that exists before the step; return its buffer."""
        return self.buffer_of(meta, name, kind, source, device)

    def buffer_of(
        self,
        t: torch.Tensor,
        name: str = "",
        kind: str = "temp",
        source: int = -1,
        device: str = "",
    ) -> int:
        """Return the buffer of a tensor; make one if it has none."""
        memory = t.untyped_storage()
        storage = memory._cdata
        shape, stride, offset = real_layout(t)
        dtype = real_dtype(t.dtype)
        key = (storage, offset, shape, stride, dtype)
        buffer = self._keys.get(key)
        if buffer is not None:
            return buffer
        if dtype not in BUFFER_NAMES:
            raise CaptureError(f"dtype {t.dtype} of {name or 'a result'} has no name")
        siblings = self._by_storage.setdefault(storage, [])
        if siblings and kind == "temp":
            base = self.buffers[siblings[0]]
            device = base.device
            if base.kind != "temp":
                kind = "view"
        index = len(self.buffers)
        self._keys[key] = index
        # the storage too, since the step may assign other memory to the tensor
        self._alive += (t, memory)
        siblings.append(index)
        device = device or self._devices.get(storage, "cpu")
        self._devices[storage] = device
        self.buffers.append(
            Buffer(
                name or f"t{index}",
                BUFFER_NAMES[dtype],
                shape,
                tuple(stride),
                offset,
                storage,
                kind,
                source,
                device,
            )
        )
        self._meet(index)
        self._resolve_view(index)
        exists = kind != "temp" or len(siblings) > 1
        value = self._value(index) if exists else -1
        self.initial.append(value if kind != "temp" else -1)
        if kind != "temp" and self._overwritten(index):
            value = self._value(index)  # its value on entry is overwritten already
        self.current.append(value)
        return index

    def known(self, t: torch.Tensor) -> int | None:
        """Return the buffer of a tensor; None if it has none."""
        shape, stride, offset = real_layout(t)
        storage = t.untyped_storage()._cdata
        return self._keys.get((storage, offset, shape, stride, real_dtype(t.dtype)))

    def hollow(self, t: torch.Tensor) -> None:
        """Note that a tensor is made without contents, as by torch.empty."""
        self._hollow.add(t.untyped_storage()._cdata)
        self._alive.append(t)

    def alone(self, buffer: int) -> bool:
        """Is a buffer the only one in its storage, with each element once?"""
        storage = self.buffers[buffer].storage
        return len(self._by_storage[storage]) == 1 and self.untangled(buffer)

    def untangled(self, buffer: int) -> bool:
        """Does a buffer share no memory with another buffer, and have each element
        once?
        """
        return not (
            buffer in self._near or buffer in self._folded or buffer in self._seen
        )

    def first_of(self, storage: int) -> int:
        """Return the first recorded buffer of a storage."""
        return self._by_storage[storage][0]

    def embody(self, buffer: int) -> torch.Tensor:
        """Make a meta tensor for a buffer that was added without one."""
        layout = self.buffers[buffer]
        dtype = NAMED_DTYPES[layout.dtype]
        twin = torch.empty_strided(
            layout.shape, layout.stride, dtype=dtype, device="meta"
        )
        storage = twin.untyped_storage()._cdata
        self.buffers[buffer] = layout = layout._replace(storage=storage)
        self._keys[storage, 0, layout.shape, layout.stride, dtype] = buffer
        self._by_storage[storage] = [buffer]
        self._spans[storage] = [(*span(layout), buffer)]
        self._devices[storage] = layout.device
        if self.current[buffer] < 0:
            self._hollow.add(storage)
        self._alive.append(twin)
        return twin

    def device_of(self, t: torch.Tensor) -> str:
        """Return the real device of a meta tensor."""
        return self._devices.get(t.untyped_storage()._cdata, "cpu")

    def unwritten(self, t: torch.Tensor) -> bool:
        """Does an input still hold its value on entry?"""
        index = self.buffer_of(t)
        return self.current[index] == self.initial[index]

    def temp_like(self, out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Make memory inside the step, with the shape and device of `out`."""
        temp = torch.empty_like(out, dtype=dtype)
        self._inherit(temp, {"self": out})
        return temp

    def _inherit(self, out: torch.Tensor, bound: Any) -> None:
        """Set the device of a result: that of the call's argument, or of its operands.

        The CPU is chosen only if all operands are there.
        """
        storage = out.untyped_storage()._cdata
        if storage in self._devices:
            return
        device = ""
        for v in bound.values():
            for t in v if isinstance(v, (list, tuple)) else (v,):
                if isinstance(t, torch.Tensor):
                    place = self._devices.get(t.untyped_storage()._cdata, "")
                    if place and (not device or (device == "cpu" and place != "cpu")):
                        device = place
        self._devices[storage] = self._wanted or device or "cpu"
        self._alive.append(out)

    def _meet(self, index: int) -> None:
        """Find the buffers that share memory with a new buffer."""
        new = self.buffers[index]
        first, last = span(new)
        others = self._spans.setdefault(new.storage, [])
        for low, high, other in others:
            if low < last and first < high and may_share(self.buffers[other], new):
                self._near.setdefault(other, []).append(index)
                self._near.setdefault(index, []).append(other)
        others.append((first, last, index))
        if self_overlaps(new):
            self._folded.add(index)

    def _overwritten(self, index: int) -> bool:
        """Did the step write this buffer's memory through another buffer?"""
        return any(other in self._written for other in self._near.get(index, ()))

    def _value(self, buffer: int) -> int:
        self.values.append(buffer)
        return len(self.values) - 1

    def _read(self, t: torch.Tensor) -> int:
        if not t.is_meta:
            raise CaptureError(f"a tensor without a known origin is read\n{self.line}")
        index = self.buffer_of(t)
        if self.current[index] < 0:
            if t.numel() and t.untyped_storage()._cdata not in self._hollow:
                # such as the tensor that torch makes of a list of indices
                raise CaptureError(
                    f"a tensor is read whose contents nothing recorded\n{self.line}"
                )
            # memory without contents, as from torch.empty: its bits are arbitrary
            self.current[index] = self._value(index)
        return self.current[index]

    def _write(self, buffer: int) -> int:
        value = self._value(buffer)
        self.wrote(buffer, value)
        for other in self._near.get(buffer, ()):
            self.current[other] = self._value(other)
            self._seen[other] = (buffer, value)
        return value

    def wrote(self, buffer: int, value: int) -> None:
        """Set a buffer's value; the caller updates buffers that share its memory."""
        self.current[buffer] = value
        self._written.add(buffer)
        self._seen.pop(buffer, None)

    def _resolve_view(self, index: int) -> None:
        """Link a new view as another dtype to the value in its memory, whose bits it
        has.
        """
        for other in self._near.get(index, ()):
            if same_place(self.buffers[other], self.buffers[index]):
                seen = self._seen.get(other, (other, self.current[other]))
                if seen[1] >= 0:
                    self._seen[index] = seen

    def _collides(self, target: int, values: Sequence[int]) -> bool:
        """Does a call write memory that it reads through another buffer, or write it
        twice?

        The result then depends on the order of eager's loop, or is an error.
        """
        near = self._near.get(target)
        if near and any(self.values[v] in near for v in values):
            return True
        return target in self._folded


def same_place(a: Buffer, b: Buffer) -> bool:
    """Do two buffers view the same elements of a storage, as two dtypes of one size?"""
    return (
        a.dtype != b.dtype
        and {a.dtype, b.dtype} < set(DTYPE_NAMES.values()) - {"b8"}
        and DTYPE_BYTES[a.dtype] == DTYPE_BYTES[b.dtype]
        and (a.storage, a.offset, a.shape, a.stride)
        == (b.storage, b.offset, b.shape, b.stride)
    )


#: Integers that float64, the type of a lane's numbers, does not represent exactly.
WIDE_INTEGERS = frozenset({torch.int64, torch.uint64})


def as_lane_number(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor of one element as a view without dimensions.

    It is then a number of its lane, as a step counter is, whatever the lane's shape.
    Other tensors are returned unchanged.
    """
    if t.dim() == 0 or t.numel() != 1 or t.dtype in WIDE_INTEGERS or t.is_complex():
        return t
    return t.as_strided((), (), t.storage_offset())

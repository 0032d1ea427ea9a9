"""Record calls without a rule as Externs, which keep the call, and constant tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...compat import is_collective
from ...errors import CaptureError
from ...ir.graph import Extern
from ..scalars.device import Computed, NumberRef
from ..scalars.host import Scalars
from .autocast import Autocast, KeptCast
from .constants import Constant, as_number
from .dtypes import PARTS
from .ops import op_info
from .pointwise import Pointwise, is_complex


class Call(NamedTuple):
    """Call of an extern: the op and its arguments, tensors as TensorRef.

    `autocast`: its state while the call runs; None if autocast was off at capture.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int, ...]  # buffers of the returned tensors, in order
    fresh: frozenset[int]  # those among them whose memory the call allocates
    autocast: Autocast | None = None


class TensorRef(NamedTuple):
    """Represents the tensor of a buffer in a recorded call.

    `conj`, `neg`: the call reads its memory conjugated, or negated, without a copy.
    """

    buffer: int
    conj: bool = False
    neg: bool = False
    complex: bool = False  # the buffer is its real view


class Externs(Pointwise):
    """Arithmetic nodes, and Externs with their calls: `calls[payload]`."""

    def __init__(self, scalars: Scalars, vector_library: bool | None) -> None:
        super().__init__(scalars, vector_library)
        self.calls: list[Call] = []
        #: the state of autocast for the calls being recorded, see Call
        self.autocast: Autocast | None = None
        #: replaces the function of the next recorded call
        self.instead: KeptCast | None = None
        self._constants: dict[int, torch.Tensor] = {}  # by id of the real tensor

    def constant(self, t: torch.Tensor) -> torch.Tensor:
        """Return the meta twin of a real tensor, and add a node that writes its
        contents.
        """
        if id(t) in self._constants:
            return self._constants[id(t)]
        twin = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
        self._constants[id(t)] = twin
        self._alive += [t, twin]
        self._devices[twin.untyped_storage()._cdata] = str(t.device)
        number = as_number(t)
        if number is None or not self.emit("fill", (("value", number),), twin):
            buffer = self.buffer_of(twin)
            call = Call(Constant(t), (), {}, (buffer,), frozenset({buffer}))
            written = (self._write(buffer),)
            reason = "a tensor constant of the step"
            payload = len(self.calls)
            self.calls.append(call)
            self.nodes.append(
                Extern("constant", (), written, payload, reason, self.line)
            )
        return twin

    def _extern(self, func: Any, args: Any, kwargs: Any, out: Any, reason: str) -> Any:
        """Add an Extern for a call, with the values that it reads and writes."""
        reads: list[int] = []
        mutated: list[int] = []
        schema = op_info(func).schema
        changed = {name for _, name in schema.writes}

        def refer(x: Any, writes: bool) -> Any:
            if isinstance(x, torch.Tensor):
                reads.append(self._read(x))
                index = self.buffer_of(x)
                if writes:
                    mutated.append(index)
                whole = x.dtype in PARTS
                return TensorRef(index, x.is_conj(), x.is_neg(), whole)
            if isinstance(x, (list, tuple)):
                return [refer(y, writes) for y in x]
            number = self.meant(x)
            if isinstance(number, Computed):
                reads.append(self._read(number.tensor))
                return NumberRef(self.buffer_of(number.tensor), number.kind)
            return number

        new_args = tuple(
            refer(a, name in changed)
            for name, a in zip(schema.arguments, args, strict=False)
        )
        new_kwargs = {k: refer(v, k in changed) for k, v in kwargs.items()}
        read_storages = {self.buffers[self.values[v]].storage for v in reads}
        results = tensors_in(out)
        outputs = []
        for t in results:
            self._inherit(t, {"args": tensors_in(args)})
            if t.is_conj() or t.is_neg():
                raise CaptureError(f"{func} returns a conjugated view\n{self.line}")
            outputs.append(self.buffer_of(t))
            if is_complex(t) and outputs[-1] not in mutated:
                self._complex_given.add(t.untyped_storage()._cdata)
        fresh = [
            b
            for b in dict.fromkeys(outputs)
            if self.buffers[b].storage not in read_storages
        ]
        written = tuple(self._write(b) for b in dict.fromkeys([*mutated, *fresh]))
        payload = len(self.calls)
        self.calls.append(
            Call(
                self.instead or func,
                new_args,
                new_kwargs,
                tuple(outputs),
                frozenset(fresh),
                self.autocast,
            )
        )
        name = str(func)
        self.nodes.append(
            Extern(
                name,
                tuple(reads),
                written,
                payload,
                reason,
                self.line,
                schema.seeded or is_collective(func),
            )
        )
        return out


def tensors_in(x: Any) -> list[torch.Tensor]:
    """Return the tensors of a value, in lists or not, in order."""
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, (list, tuple)):
        return [t for y in x for t in tensors_in(y)]
    return []

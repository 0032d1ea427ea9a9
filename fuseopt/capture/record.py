"""Record ATen calls as SchedulerNodes while the step runs on meta tensors.

`Recorder` is a TorchDispatchMode. A pointwise call, or every position of a foreach
call, becomes a SchedulerNode with an interned Body; a view becomes another Buffer of
the same storage; everything else becomes an Extern that keeps the call. Mutation
becomes versions: each write makes a new value of its buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import CaptureError
from ..ir import (
    DTYPE_BYTES,
    Body,
    Buffer,
    Extern,
    Literal,
    Node,
    ScalarRef,
    SchedulerNode,
    Symbol,
    span,
)
from ..lowering import RULES, STRUCTURAL, STRUCTURAL_OPS, Number, Operand, lower
from ..lowering import Tensor as TensorOperand
from ..overlap import may_share, self_overlaps
from . import folds, outer
from .constants import Constant, as_number, swap
from .numbers import Computed, NumberRef, Numbers
from .numbers import body as body_of_numbers
from .promote import (
    BUFFER_NAMES,
    DTYPE_NAMES,
    NAMED_DTYPES,
    PARTS,
    by_parts,
    real_dtype,
    real_layout,
    result_type,
)
from .scalars import Scalars, Sym
from .stacks import CHAINS, Stack, Stacks, pieces_of

#: Arguments that scale a term and take no part in type promotion.
UNPROMOTING = frozenset(
    "alpha value weight mask nan posinf neginf threshold negative_slope beta".split()
)
#: ATen names whose arithmetic is another op's: name -> (op, arguments that matter).
RENAMED = {
    "clone": ("copy", ("self",)),
    "_to_copy": ("copy", ("self",)),
    "lift_fresh_copy": ("copy", ("self",)),
    "copy": ("copy", ("src",)),
    "fill": ("fill", ("value",)),
    "full_like": ("fill", ("fill_value",)),
    "new_full": ("fill", ("fill_value",)),
    "full": ("fill", ("fill_value",)),
    "scalar_tensor": ("fill", ("s",)),
}
CONSTANTS = {
    "zero": 0.0,
    "zeros": 0.0,
    "zeros_like": 0.0,
    "new_zeros": 0.0,
    "ones": 1.0,
    "ones_like": 1.0,
    "new_ones": 1.0,
}
#: Strings that choose a rule: (ATen name, argument, string) -> op.
MODES = {
    ("div", "rounding_mode", "floor"): "div_floor",
    ("div", "rounding_mode", "trunc"): "div_trunc",
}
EMPTY = frozenset("empty empty_like new_empty empty_strided new_empty_strided".split())
#: Scalars reach a kernel as float64, which holds whole numbers up to here.
EXACT = 2**53
#: Arguments that say how a result is laid out; the meta result already shows it.
LAYOUT = frozenset(
    "memory_format dtype layout device pin_memory non_blocking generator size".split()
)


FOREACH_REDUCTIONS = frozenset({"norm", "max"})


class Call(NamedTuple):
    """An extern's call: the op and its arguments, tensors as TensorRef."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int, ...]  # buffers of the tensors it returns, in order
    fresh: frozenset[int]  # those of them whose memory the call itself makes


class TensorRef(NamedTuple):
    """Stands for the tensor of a buffer in a recorded call.

    `conj`, `neg`: the call saw its memory conjugated, or negated, without a copy.
    """

    buffer: int
    conj: bool = False
    neg: bool = False
    complex: bool = False  # the buffer is its real view


class _Op(NamedTuple):
    """What is known of an OpOverload before it is called."""

    name: str  # without namespace and trailing underscore
    inplace: bool
    foreach: bool
    arguments: tuple[str, ...]
    types: tuple[str, ...]
    defaults: tuple[Any, ...]


def _describe(func: Any) -> _Op:
    schema = func._schema
    namespace, _, full = schema.name.partition("::")
    inplace = full.endswith("_") and not full.endswith("__")
    base = full[:-1] if inplace else full
    foreach = base.startswith("_foreach_")
    name = (
        base.removeprefix("_foreach_")
        if namespace in ("aten", "prims")
        else schema.name
    )
    return _Op(
        name,
        inplace,
        foreach,
        tuple(a.name for a in schema.arguments),
        tuple(str(a.type) for a in schema.arguments),
        tuple(a.default_value for a in schema.arguments),
    )


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects buffers, values and nodes; see the module."""

    def __init__(self, scalars: Scalars, vector_library: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.scalars = scalars
        self.vector_library = vector_library
        self.buffers: list[Buffer] = []
        self.values: list[int] = []
        self.nodes: list[Node] = []
        self.current: list[int] = []  # value a buffer holds now
        self.initial: list[int] = []
        self.calls: list[Call] = []
        self.line = ""
        self._constants: dict[int, torch.Tensor] = {}  # by id of the real tensor
        self._wanted = ""  # the device that the call being recorded asks for
        #: numbers that stand literally in the FX node being run; None allows any
        self.literals: frozenset[Any] | None = None
        #: storages of 0-d tensors that stand for Python numbers of eager
        self.host_numbers: set[int] = set()
        self._complex_given: set[int] = set()  # storages of externs' complex results
        self.stacks = Stacks(self._read)
        self.numbers = Numbers()
        self._literals: dict[tuple[float, float], Literal] = {}
        #: by buffer the one through which its memory was last written, and what with
        self._seen: dict[int, tuple[int, int]] = {}
        self._bits: dict[tuple[int, str], int] = {}  # (value, dtype) -> its bits
        self._call = 0
        self._ops: dict[Any, _Op] = {}
        self._bodies: dict[Any, Body | None] = {}
        self._interned: dict[Any, Body] = {}
        self._keys: dict[Any, int] = {}
        self._by_storage: dict[int, list[int]] = {}
        #: storage -> (first byte, last byte, buffer); buffer -> those it overlaps
        self._spans: dict[int, list[tuple[int, int, int]]] = {}
        self._near: dict[int, list[int]] = {}
        self._written: set[int] = set()  # buffers that a call has written
        self._folded: set[int] = set()  # buffers that may have an element twice
        self._alive: list[Any] = []  # tensors whose storage identity is a key
        self._devices: dict[int, str] = {}  # device of a storage

    # ---------------------------------------------------------------- buffers

    def add_input(
        self, meta: torch.Tensor, name: str, kind: str, source: int, device: str
    ) -> int:
        """Register a tensor that exists before the step."""
        return self.buffer_of(meta, name, kind, source, device)

    def buffer_of(
        self,
        t: torch.Tensor,
        name: str = "",
        kind: str = "temp",
        source: int = -1,
        device: str = "",
    ) -> int:
        """The buffer of a tensor, made where there is none yet."""
        storage = t.untyped_storage()._cdata
        shape, stride, offset = real_layout(t)
        dtype = real_dtype(t.dtype)
        key = (storage, offset, shape, stride, dtype)
        found = self._keys.get(key)
        if found is not None:
            return found
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
        self._alive.append(t)
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
        self._look_through(index)
        exists = kind != "temp" or len(siblings) > 1
        value = self._value(index) if exists else -1
        self.initial.append(value if kind != "temp" else -1)
        if kind != "temp" and self._overwritten(index):
            value = self._value(index)  # what it held on entry is gone already
        self.current.append(value)
        return index

    def device_of(self, t: torch.Tensor) -> str:
        """The device that a meta tensor stands for."""
        return self._devices.get(t.untyped_storage()._cdata, "cpu")

    def _meet(self, index: int) -> None:
        """Find the buffers that a new one shares memory with."""
        own = self.buffers[index]
        first, last = span(own)
        others = self._spans.setdefault(own.storage, [])
        for low, high, other in others:
            if low < last and first < high and may_share(self.buffers[other], own):
                self._near.setdefault(other, []).append(index)
                self._near.setdefault(index, []).append(other)
        others.append((first, last, index))
        if self_overlaps(own):
            self._folded.add(index)

    def _overwritten(self, index: int) -> bool:
        """Was memory of this buffer written through another one?"""
        return any(other in self._written for other in self._near.get(index, ()))

    def _value(self, buffer: int) -> int:
        self.values.append(buffer)
        return len(self.values) - 1

    def _read(self, t: torch.Tensor) -> int:
        if not t.is_meta:
            raise CaptureError(f"a tensor without a known origin is read\n{self.line}")
        index = self.buffer_of(t)
        if self.current[index] < 0:
            # memory nobody wrote: torch.empty; its bits are whatever they are
            self.current[index] = self._value(index)
        return self.current[index]

    def _write(self, buffer: int) -> int:
        value = self._value(buffer)
        self.current[buffer] = value
        self._written.add(buffer)
        self._seen.pop(buffer, None)
        for other in self._near.get(buffer, ()):
            self.current[other] = self._value(other)
            self._seen[other] = (buffer, value)
        return value

    def _look_through(self, index: int) -> None:
        """A new view of another dtype holds the bits of what is there already."""
        for other in self._near.get(index, ()):
            if _same_place(self.buffers[other], self.buffers[index]):
                seen = self._seen.get(other, (other, self.current[other]))
                if seen[1] >= 0:
                    self._seen[index] = seen

    def _operand(self, t: torch.Tensor) -> int:
        """The value that arithmetic reads for a tensor.

        Memory last written as another dtype of the same size is read as that value's
        bits, which need not pass through memory.
        """
        index, value = self.buffer_of(t), self._read(t)
        if index not in self._seen:
            return value
        source, written = self._seen[index]
        own, other = self.buffers[index], self.buffers[source]
        if not _same_place(own, other):
            return value
        key = (written, own.dtype)
        if key not in self._bits:
            known = (TensorOperand(other.dtype, other.shape == ()),)
            body = lower("bitcast", known, own.dtype, own.dtype, self.vector_library)
            if body is None:
                return value
            body = self._interned.setdefault(
                (body.name, body.reads, body.instrs, body.writes), body
            )
            made = torch.empty_strided(
                own.shape, own.stride, dtype=NAMED_DTYPES[own.dtype], device="meta"
            )
            self._devices[made.untyped_storage()._cdata] = own.device
            target = self._write(self.buffer_of(made))
            node = SchedulerNode(body, (written,), (), (target,), self._call, self.line)
            self.nodes.append(node)
            self._bits[key] = target
        return self._bits[key]

    def _collides(self, target: int, values: Sequence[int]) -> bool:
        """Does a call write memory that it reads elsewhere, or one place twice?

        What that gives depends on the order of eager's loop, or is an error.
        """
        near = self._near.get(target)
        if near and any(self.values[v] in near for v in values):
            return True
        return target in self._folded

    # ---------------------------------------------------------------- dispatch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        op = self._ops.get(func)
        if op is None:
            op = self._ops[func] = _describe(func)
        self._call += 1
        bound = dict(zip(op.arguments, args, strict=False))
        bound.update(kwargs)
        self._wanted = ""
        tensors = [t for x in bound.values() for t in tensors_in(x)]
        if not all(t.is_meta for t in tensors):
            self._check_constants(func, bound)
            known = self.literals is None and not _ordered(func)
            if known and not any(t.is_meta for t in tensors):
                return func(*args, **kwargs)
            args = swap(args, self.constant)
            kwargs = {k: swap(v, self.constant) for k, v in kwargs.items()}
            bound = {k: swap(v, self.constant) for k, v in bound.items()}
        if "device" in op.arguments:
            kwargs = self._on_meta(bound, kwargs)
        if op.foreach:
            return self._foreach(func, op, bound, args, kwargs)
        return self._single(func, op, bound, args, kwargs)

    def _check_constants(self, func: Any, bound: dict[str, Any]) -> None:
        """What is known at capture must not be changed by the step."""
        for a in func._schema.arguments:
            if a.alias_info is not None and a.alias_info.is_write:
                if not all(t.is_meta for t in tensors_in(bound.get(a.name))):
                    raise CaptureError(
                        f"{func} changes a tensor that is not the step's\n{self.line}"
                    )

    def constant(self, t: torch.Tensor) -> torch.Tensor:
        """The meta twin of a real tensor; a node gives it its contents."""
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
            reason = "a tensor that the step brings along"
            payload = len(self.calls)
            self.calls.append(call)
            self.nodes.append(
                Extern("constant", (), written, payload, reason, self.line)
            )
        return twin

    def _on_meta(self, bound: dict[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Keywords that let a call make its result on meta; keeps the device asked for.

        A call without tensors would else make real memory, on the default device.
        """
        device = bound.get("device")
        if device is None and any(tensors_in(x) for x in bound.values()):
            return kwargs
        if str(device) != "meta":
            self._wanted = str(device or torch.get_default_device())
        bound["device"] = torch.device("meta")
        return {**kwargs, "device": bound["device"]}

    def _single(self, func: Any, op: _Op, bound: Any, args: Any, kwargs: Any) -> Any:
        target = bound["self"] if op.inplace else None
        if target is not None and op.name in _INPLACE_META_FREE:
            out = target
        else:
            out = func(*args, **kwargs)
        if not isinstance(out, torch.Tensor):
            made = tensors_in(out)
            if not func._schema.is_mutable and out is not None:
                if not made:
                    return out  # metadata: a size, a dtype, a test of layout
                if all(self._is_view(t, bound) for t in made):
                    for t in made:
                        self._inherit(t, bound)
                        self._read(t)
                    return out
            return self._extern(func, args, kwargs, out, "no rule for this op")
        self._inherit(out, bound)
        if op.name in EMPTY:
            return out
        stack = pieces_of(op.name, bound)
        if stack is not None and self._stack(stack, out):
            return out
        pieces = self.stacks.reduced(op.name, bound)
        if pieces is not None and self._chain(CHAINS[op.name], pieces, out):
            return out
        if self._is_view(out, bound):
            if not func._schema.is_mutable or torch.Tag.inplace_view in func.tags:
                self._read(out)
                return out
        reduction = folds.recognise(op.name, bound)
        if reduction is not None and folds.record(self, reduction, out):
            return out
        if outer.record(self, op.name, bound, out):
            return out
        if op.name in CONSTANTS:
            if self.emit("fill", (("value", CONSTANTS[op.name]),), out):
                return out
        elif op.name in RENAMED:
            renamed, names = RENAMED[op.name]
            operands = tuple((n, bound[n]) for n in names)
            if self.emit(renamed, operands, out):
                return out
            return self._extern(func, args, kwargs, out, self._reason(operands, out))
        elif (name := self._rule(op, bound)) is not None:
            operands = tuple(
                (n, bound.get(n))
                for n, t in zip(op.arguments, op.types, strict=True)
                if n not in LAYOUT and n != "out" and _arithmetic(t)
            )
            if not func._schema.is_mutable:
                typed = self._as_with_numbers(operands, out)
                if typed is not out and self.emit(name, operands, typed):
                    return typed
            if self.emit(name, operands, out):
                return out
            return self._extern(func, args, kwargs, out, self._reason(operands, out))
        return self._extern(func, args, kwargs, out, "no rule for this op")

    def _promoting(self, operands: Iterable[tuple[str, Any]]) -> list[Any]:
        """Operands as eager's promotion sees them: a counter it read is a number."""
        seen = [x for _, x in operands if x is not None]
        tensors = [x for x in seen if isinstance(x, torch.Tensor)]
        numbers = [x for x in tensors if self._is_number(x)]
        if len(numbers) in (0, len(tensors)):
            return seen
        return [1.0 if any(x is n for n in numbers) else x for x in seen]

    def _as_with_numbers(
        self, operands: Iterable[tuple[str, Any]], out: torch.Tensor
    ) -> torch.Tensor:
        """A result in eager's dtype: beside a tensor without dimensions, a tensor that
        stands for a number would widen it.
        """
        if not self.host_numbers or not out.is_floating_point():
            return out
        dtype = result_type(
            self._promoting((n, x) for n, x in operands if n not in UNPROMOTING)
        )
        if dtype is out.dtype or not dtype.is_floating_point or dtype.is_complex:
            return out
        made = torch.empty_like(out, dtype=dtype)
        self._devices[made.untyped_storage()._cdata] = self.device_of(out)
        self._alive.append(made)
        return made

    def _rule(self, op: _Op, bound: Any) -> str | None:
        """The rule for a call; None if no rule understands all of its arguments."""
        for (name, argument, value), rule in MODES.items():
            if op.name == name and bound.get(argument) == value:
                return rule
        return op.name if op.name in RULES and not self._extra(op, bound) else None

    def _extra(self, op: _Op, bound: Any) -> bool:
        """Is an argument given that no rule understands (a number of decimals)?"""
        for name, kind, default in zip(
            op.arguments, op.types, op.defaults, strict=True
        ):
            if not _arithmetic(kind) and name not in LAYOUT:
                if bound.get(name, default) != default:
                    return True
        return False

    def _foreach(self, func: Any, op: _Op, bound: Any, args: Any, kwargs: Any) -> Any:
        name = op.name
        lists = [v for v in bound.values() if isinstance(v, (list, tuple))]
        own = bound.get("self")
        n = len(own) if isinstance(own, (list, tuple)) else len(lists[0])
        if name in FOREACH_REDUCTIONS:
            reduced = self._foreach_reductions(func, name, bound, args, kwargs)
            if reduced is not None:
                return reduced
        if name not in RULES and name != "zero":
            out = func(*args, **kwargs)
            return self._extern(func, args, kwargs, out, "no rule for this op")
        if op.inplace:
            out, results = None, list(bound["self"])
        else:
            results = list(func(*args, **kwargs))
            out = results
        if name == "copy":
            columns = [("src", list(bound["src"]))]
        elif name == "zero":
            columns = [("value", [0.0] * n)]
            name = "fill"
        else:
            columns = [(k, self._column(k, v, n)) for k, v in bound.items()]
        if name == "mul" and op.inplace and self._is_number(columns[1][1][0]):
            name = "mul_rounded"  # the one foreach op that rounds its number
        for i in range(n):
            operands = tuple((k, column[i]) for k, column in columns)
            result = results[i]
            if not op.inplace:
                result = results[i] = self._as_with_numbers(operands, result)
            self._inherit(result, dict(operands))
            if not self.emit(name, operands, result):
                alone = {k: _position(k, v, i) for k, v in bound.items()}
                given = tuple(alone[k] for k in op.arguments[: len(args)])
                rest = {k: alone[k] for k in kwargs}
                made = [] if op.inplace else [result]
                self._extern(func, given, rest, made, self._reason(operands, result))
        return out

    def _reason(self, operands: Iterable[tuple[str, Any]], out: torch.Tensor) -> str:
        """Why a call that a rule covers runs as it is."""
        reads = [self._read(x) for _, x in operands if isinstance(x, torch.Tensor)]
        if self._collides(self.buffer_of(out), reads):
            return "it writes memory that it reads elsewhere, or one place twice"
        return "no rule for these types or numbers"

    def _foreach_reductions(
        self, func: Any, name: str, bound: Any, args: Any, kwargs: Any
    ) -> list[torch.Tensor] | None:
        found = [folds.recognise(name, {**bound, "self": t}) for t in bound["self"]]
        empty = any(t.numel() == 0 for t in bound["self"])
        if empty or any(f is None for f in found):
            return None
        results = list(func(*args, **kwargs))
        for out, f in zip(results, found, strict=True):
            assert f is not None
            self._inherit(out, {"self": f.operands[0]})
            folds.record(self, f, out)
        return results

    def temp_like(self, out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Memory inside the step, of the shape and device of `out`."""
        made = torch.empty_like(out, dtype=dtype)
        self._inherit(made, {"self": out})
        return made

    def reduce(
        self,
        body: Body,
        operands: Sequence[torch.Tensor],
        dims: tuple[int, ...],
        out: torch.Tensor,
    ) -> None:
        """Add the node that folds `operands` over `dims` into `out`."""
        content = (body.name, body.reads, body.instrs, body.writes, body.reduction)
        body = self._interned.setdefault(content, body)
        reads = tuple([self._read(t) for t in operands])
        write = self._write(self.buffer_of(out))
        self.nodes.append(
            SchedulerNode(body, reads, (), (write,), self._call, self.line, dims)
        )

    def scaled(
        self,
        name: str,
        target: torch.Tensor,
        factors: Sequence[torch.Tensor],
        keyword: str,
        scale: torch.Tensor,
    ) -> None:
        """Record `target.<name>_(*factors, <keyword>=scale)` for a 0-d tensor scale.

        ATen's own signature takes a number there, read from the tensor by a sync.
        """
        factors = [swap(t, self.constant) for t in factors]
        scale = swap(scale, self.constant)
        names = ("other",) if len(factors) == 1 else ("tensor1", "tensor2")
        operands = (
            ("self", target),
            *zip(names, factors, strict=True),
            (keyword, scale),
        )
        if not self.emit(name, operands, target):
            raise CaptureError(
                f"no rule for {name} of {[t.dtype for t in factors]} to {target.dtype}"
            )

    def is_counter(self, t: torch.Tensor) -> bool:
        """Does eager read this as a number: 0-d state that the step changed?"""
        if t.dim() or not t.is_floating_point():
            return False
        if t.untyped_storage()._cdata in self.host_numbers:
            return True
        index = self.buffer_of(t)
        known = self.buffers[index].kind in ("static", "arg")
        return known and self.current[index] != self.initial[index]

    def _is_number(self, x: Any) -> bool:
        if isinstance(x, torch.Tensor):
            return x.untyped_storage()._cdata in self.host_numbers
        return isinstance(x, (int, float))

    def _by_parts(self, name: str, operands: Any, out: torch.dtype) -> str | None:
        """The rule for the parts of complex numbers, if their strides are known.

        The shape rules of FFTs give other strides than the calls do, and the bits of
        the next FFT depend on them: what an extern gave stays with the externs.
        """
        tensors = [x for _, x in operands if _is_complex(x)]
        given = {t.untyped_storage()._cdata for t in tensors} & self._complex_given
        return None if given else by_parts(name, operands, out)

    @staticmethod
    def _column(name: str, value: Any, n: int) -> list[Any]:
        """One operand of a foreach call, as a list with an entry per position."""
        if isinstance(value, (list, tuple)):
            return list(value)
        if isinstance(value, torch.Tensor) and value.dim() == 1 and name == "scalars":
            return list(value.unbind())
        return [value] * n

    def _inherit(self, out: torch.Tensor, bound: Any) -> None:
        """A result lies on the device of its first operand with dimensions."""
        storage = out.untyped_storage()._cdata
        if storage in self._devices:
            return
        device = ""
        for v in bound.values():
            for t in v if isinstance(v, (list, tuple)) else (v,):
                if isinstance(t, torch.Tensor):
                    own = self._devices.get(t.untyped_storage()._cdata, "")
                    if own and (not device or (device == "cpu" and own != "cpu")):
                        device = own
        self._devices[storage] = self._wanted or device or "cpu"
        self._alive.append(out)

    @staticmethod
    def _is_view(out: torch.Tensor, bound: Any) -> bool:
        storage = out.untyped_storage()._cdata
        return any(
            isinstance(v, torch.Tensor) and v.untyped_storage()._cdata == storage
            for v in bound.values()
        )

    def _stack(self, stack: Stack, out: torch.Tensor) -> bool:
        """Copies into the parts of the result."""
        if out.dtype not in DTYPE_NAMES or any(t.is_neg() for t in stack.pieces):
            return False
        for i, t in enumerate(stack.pieces):
            self.emit("copy", (("src", t),), out.select(stack.dim, i))
        self.stacks.add(stack, out)
        return True

    def _chain(self, name: str, tensors: list[torch.Tensor], out: torch.Tensor) -> bool:
        """`name(name(t0, t1), t2) ...`"""
        made = tensors[0]
        for i, t in enumerate(tensors[1:], 2):
            into = out if i == len(tensors) else torch.empty_like(out)
            self._inherit(into, {"self": made})
            if not self.emit(name, (("self", made), ("other", t)), into):
                return False
            made = into
        return len(tensors) > 1

    # ---------------------------------------------------------------- nodes

    def emit(
        self, name: str, operands: tuple[tuple[str, Any], ...], out: torch.Tensor
    ) -> bool:
        """Add the SchedulerNode of one pointwise result; False if no rule covers it."""
        described: list[Operand | None] = []
        reads: list[torch.Tensor] = []
        scalars: list[ScalarRef] = []
        promoting: list[Any] = []
        made = real_dtype(out.dtype)
        if made is not out.dtype or any(_is_complex(x) for _, x in operands):
            rule = self._by_parts(name, operands, out.dtype)
            if rule is None:
                return False
            name = rule
        key: list[Any] = [name, made, out.dim() == 0]
        for argument, x in operands:
            if x is None:
                described.append(None)
                key.append(None)
                continue
            if isinstance(x, torch.Tensor):
                dtype = real_dtype(x.dtype)
                if dtype not in DTYPE_NAMES or x.is_neg() or x.is_conj():
                    return False
                reads.append(_as_number(x))
                alone = x.dim() == 0 and dtype is x.dtype
                operand: Operand = TensorOperand(DTYPE_NAMES[dtype], alone)
            else:
                if isinstance(x, int) and abs(x) > EXACT:
                    return False
                number = self._number(x)
                if number is not None:
                    reads.append(number.tensor)
                    operand = Number(None, number.is_float, stored=True)
                else:
                    ref, is_float = self._scalar(x)
                    scalars.append(ref)
                    value = ref.value if isinstance(ref, Literal) else None
                    fixed = value in STRUCTURAL or name in STRUCTURAL_OPS
                    operand = Number(value if fixed else None, is_float)
            described.append(operand)
            key.append(
                (argument, operand, isinstance(x, torch.Tensor) and self._is_number(x))
            )
            if argument not in UNPROMOTING and not (
                name == "where" and x is operands[0][1]
            ):
                promoting.append((argument, x))
        if made not in DTYPE_NAMES or out.is_neg() or out.is_conj():
            return False
        cached = tuple(key)
        if cached not in self._bodies:
            common = made
            if name not in ("copy", "fill"):
                common = real_dtype(result_type(self._promoting(promoting)))
                if not common.is_floating_point and made.is_floating_point:
                    common = made  # true division and the like
            found = (
                lower(
                    name,
                    tuple(described),
                    DTYPE_NAMES[common],
                    DTYPE_NAMES[made],
                    self.vector_library,
                )
                if common in DTYPE_NAMES
                else None
            )
            if found is not None:
                # equal arithmetic is one object, whatever operands led to it
                content = (found.name, found.reads, found.instrs, found.writes)
                found = self._interned.setdefault(content, found)
            self._bodies[cached] = found
        body = self._bodies[cached]
        if body is None:
            return False
        got = tuple([self._operand(t) for t in reads])
        # one element of whole numbers or a mask is no number, nor what it gives
        place = out if any(x.dim() for x in reads) else _as_number(out)
        buffer = self.buffer_of(place)
        if self._collides(buffer, got):
            return False
        self.nodes.append(
            SchedulerNode(
                body, got, tuple(scalars), (self._write(buffer),), self._call, self.line
            )
        )
        return True

    # ---------------------------------------------------------------- numbers

    def unwritten(self, t: torch.Tensor) -> bool:
        """Does an input hold what it held on entry?"""
        index = self.buffer_of(t)
        return self.current[index] == self.initial[index]

    def _cell(self, device: str) -> torch.Tensor:
        """Memory for a number, on the device of what it comes from."""
        made = torch.empty((), dtype=torch.float64, device="meta")
        self._devices[made.untyped_storage()._cdata] = device
        return made

    def item(self, t: torch.Tensor) -> Computed:
        """`t.item()` for a tensor that the step computed, without a wait for it."""
        made = self._cell(self.device_of(t))
        source = t.reshape(()) if t.dim() else t
        if not self.emit("copy", (("src", source),), made):
            raise CaptureError(f"the step reads a {t.dtype} as a number\n{self.line}")
        return Computed(made, t.is_floating_point())

    def compute(self, op: str, operands: Sequence[Any], is_float: bool) -> Computed:
        """One operation on numbers, of which one at least is a Computed."""
        stored = tuple(isinstance(x, Computed) for x in operands)
        found = self._bodies.get((op, stored))
        if found is None:
            found = self._bodies[op, stored] = body_of_numbers(op, stored)
        tensors = [x.tensor for x in operands if isinstance(x, Computed)]
        others = [x for x in operands if not isinstance(x, Computed)]
        scalars = tuple(
            Symbol(x.index) if isinstance(x, Sym) else self._literal(float(x))
            for x in others
        )
        made = self._cell(self.device_of(tensors[0]))
        got = tuple([self._read(t) for t in tensors])
        written = (self._write(self.buffer_of(made)),)
        self.nodes.append(
            SchedulerNode(found, got, scalars, written, self._call, self.line)
        )
        return Computed(made, is_float)

    def _number(self, x: Any) -> Computed | None:
        """The number that an argument of a call stands for."""
        found = self.numbers.find(x)
        if found is None:
            return None
        number, negated = found
        return self.compute("neg", [number], number.is_float) if negated else number

    def _scalar(self, x: Any) -> tuple[ScalarRef, bool]:
        sym = self.scalars.find(x)
        if sym is not None:
            return Symbol(sym.index), sym.is_float
        if isinstance(x, (bool, int, float)):
            if self.literals is not None and not isinstance(x, bool):
                if x not in self.literals and x not in (0, 1, -1):
                    raise CaptureError(
                        f"torch computed the number {x!r} from a symbolic scalar on "
                        f"its way to ATen, so its origin is lost\n{self.line}"
                    )
            return self._literal(float(x)), isinstance(x, float)
        raise CaptureError(f"{type(x).__name__} as a scalar operand\n{self.line}")

    def _literal(self, value: float) -> Literal:
        key = (value, math.copysign(1.0, value))
        found = self._literals.get(key)
        if found is None:
            found = self._literals[key] = Literal(value)
        return found

    def _extern(self, func: Any, args: Any, kwargs: Any, out: Any, reason: str) -> Any:
        """Keep a call as it is, with the values it reads and the buffers it writes."""
        reads: list[int] = []
        mutated: list[int] = []
        schema = func._schema

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
            if isinstance(x, (int, float)) and not isinstance(x, bool):
                number = self._number(x)
                if number is not None:
                    reads.append(self._read(number.tensor))
                    return NumberRef(self.buffer_of(number.tensor), number.is_float)
                found = self.scalars.find(x)
                return x if found is None else found
            return x

        infos = [a.alias_info for a in schema.arguments]
        names = [a.name for a in schema.arguments]
        writes = {
            n: info is not None and info.is_write
            for n, info in zip(names, infos, strict=True)
        }
        new_args = tuple(
            refer(a, writes.get(names[i], False)) for i, a in enumerate(args)
        )
        new_kwargs = {k: refer(v, writes.get(k, False)) for k, v in kwargs.items()}
        known = {self.buffers[self.values[v]].storage for v in reads}
        results = tensors_in(out)
        outputs = []
        for t in results:
            self._inherit(t, {"args": tensors_in(args)})
            if t.is_conj() or t.is_neg():
                raise CaptureError(f"{func} returns a conjugated view\n{self.line}")
            outputs.append(self.buffer_of(t))
            if _is_complex(t) and outputs[-1] not in mutated:
                self._complex_given.add(t.untyped_storage()._cdata)
        fresh = [
            b for b in dict.fromkeys(outputs) if self.buffers[b].storage not in known
        ]
        written = tuple(self._write(b) for b in dict.fromkeys([*mutated, *fresh]))
        payload = len(self.calls)
        self.calls.append(
            Call(func, new_args, new_kwargs, tuple(outputs), frozenset(fresh))
        )
        name = str(func)
        self.nodes.append(
            Extern(
                name, tuple(reads), written, payload, reason, self.line, _ordered(func)
            )
        )
        return out


def _as_number(t: torch.Tensor) -> torch.Tensor:
    """A tensor of one element as the number that it is: without dimensions.

    So it belongs to a lane as a counter does, whatever shape the lane has. Not so an
    integer: a lane's numbers are doubles, which do not hold all of 64 bits.
    """
    if t.dim() == 0 or t.numel() != 1 or not t.is_floating_point():
        return t
    return t.as_strided((), (), t.storage_offset())


def _position(name: str, value: Any, i: int) -> Any:
    """An argument of a foreach call for position i alone."""
    if isinstance(value, (list, tuple)):
        return [value[i]]
    if isinstance(value, torch.Tensor) and value.dim() == 1 and name == "scalars":
        return value[i : i + 1]
    return value


#: In-place ops whose meta kernel would only check shapes: the recorder skips it.
_INPLACE_META_FREE = frozenset(
    "add sub mul div neg abs sqrt addcmul addcdiv lerp copy fill zero".split()
)


def _same_place(a: Buffer, b: Buffer) -> bool:
    """Are two buffers the same elements of the same memory, as two dtypes?"""
    return (
        a.dtype != b.dtype
        and {a.dtype, b.dtype} < set(DTYPE_NAMES.values()) - {"b8"}
        and DTYPE_BYTES[a.dtype] == DTYPE_BYTES[b.dtype]
        and (a.storage, a.offset, a.shape, a.stride)
        == (b.storage, b.offset, b.shape, b.stride)
    )


def _arithmetic(kind: str) -> bool:
    """Is an argument of this type an operand?"""
    return "Tensor" in kind or "number" in kind or "Scalar" in kind or "float" in kind


def _ordered(func: Any) -> bool:
    """Does a call depend on more than its arguments: the state of a generator?"""
    return torch.Tag.nondeterministic_seeded in func.tags


def _is_complex(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype in PARTS


def tensors_in(x: Any) -> list[torch.Tensor]:
    """The tensors of a value, in lists or not, in order."""
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, (list, tuple)):
        return [t for y in x for t in tensors_in(y)]
    return []

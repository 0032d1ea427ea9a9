"""Record arithmetic calls as SchedulerNodes with interned Bodies."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch

from ...errors import CaptureError, UnsupportedInput
from ...ir.graph import Body, Literal, Row, ScalarRef, SchedulerNode, Symbol
from ...lowering.pointwise import STRUCTURAL, STRUCTURAL_OPS, Number, Operand, lower
from ...lowering.pointwise import Tensor as TensorOperand
from ..scalars.device import SIGNED, Computed, kind_of
from ..scalars.device import body as body_of_numbers
from ..scalars.host import Scalars, Sym
from ..scalars.standins import StandIns
from .buffers import Buffers, as_lane_number, same_place
from .dtypes import DTYPE_NAMES, NAMED_DTYPES, PARTS, by_parts, real_dtype, result_type

#: Arguments that scale a term and take no part in type promotion.
UNPROMOTING = frozenset(
    "alpha value weight mask nan posinf neginf threshold negative_slope beta".split()
)
#: Scalars reach a kernel as float64, which holds whole numbers up to here.
EXACT = 2**53


class Pointwise(Buffers):
    """Buffers, and the nodes that compute their values.

    `nodes` has all nodes of the step in eager's order, those of subclasses too.
    """

    def __init__(self, scalars: Scalars, vector_library: bool | None) -> None:
        super().__init__()
        self.scalars = scalars
        self.vector_library = vector_library
        self.nodes: list[Row] = []
        #: literal numbers of the FX node being run; None allows any number
        self.literals: frozenset[Any] | None = None
        self.standins = StandIns()
        self._complex_given: set[int] = set()  # storages of externs' complex results
        self._literals: dict[tuple[float, float], Literal] = {}
        self._bits: dict[tuple[int, str], int] = {}  # (value, dtype) -> its bits
        self.call = 0
        self._bodies: dict[Any, Body | None] = {}
        self._interned: dict[Any, Body] = {}

    def emit(
        self, name: str, operands: tuple[tuple[str, Any], ...], out: torch.Tensor
    ) -> bool:
        """Add the SchedulerNode of one pointwise result; False if no rule covers it."""
        described: list[Operand | None] = []
        reads: list[torch.Tensor] = []
        scalars: list[ScalarRef] = []
        promoting: list[Any] = []
        out_dtype = real_dtype(out.dtype)
        if out_dtype is not out.dtype or any(is_complex(x) for _, x in operands):
            rule = self._by_parts(name, operands, out.dtype)
            if rule is None:
                return False
            name = rule
        vectors = self._has_vectors(out)
        on_gpu = self._on_gpu(out)
        if on_gpu and name == "div" and is_number(operands[0][1]):
            name = "div_exact"  # for a Python number as numerator, on any device
        key: list[Any] = [name, out_dtype, out.dim() == 0, vectors, on_gpu]
        for argument, x in operands:
            if x is None:
                described.append(None)
                key.append(None)
                continue
            if isinstance(x, torch.Tensor):
                dtype = real_dtype(x.dtype)
                if dtype not in DTYPE_NAMES or x.is_neg() or x.is_conj():
                    return False
                source, destination = self.device_of(x), self.device_of(out)
                if (
                    source != destination
                    and name == "copy"
                    and (x.dim() or source != "cpu")
                ):
                    return False  # the call waits for its device
                if source != destination and x.dim():
                    raise UnsupportedInput(
                        f"{name} takes a tensor on the device {source} and gives one "
                        f"on {destination}"
                    )
                reads.append(as_lane_number(x))
                alone = x.dim() == 0 and dtype is x.dtype
                on_host = on_gpu and alone and self.on_host(x)
                operand: Operand = TensorOperand(DTYPE_NAMES[dtype], alone, on_host)
            else:
                if isinstance(x, int) and abs(x) > EXACT:
                    return False
                number = self.meant(x)
                if isinstance(number, Computed):
                    reads.append(number.tensor)
                    operand = Number(None, number.is_float, stored=True)
                else:
                    ref, is_float = self._scalar(number)
                    if argument == "exponent" and isinstance(ref, Symbol):
                        # for some exponents, eager uses other formulas: roots, squares,
                        # ...
                        return False
                    scalars.append(ref)
                    value = ref.value if isinstance(ref, Literal) else None
                    fixed = value in STRUCTURAL or name in STRUCTURAL_OPS
                    operand = Number(value if fixed else None, is_float)
            described.append(operand)
            key.append((argument, operand))
            if argument not in UNPROMOTING and not (
                name == "where" and x is operands[0][1]
            ):
                promoting.append((argument, x))
        if out_dtype not in DTYPE_NAMES or out.is_neg() or out.is_conj():
            return False
        cached = tuple(key)
        if cached not in self._bodies:
            common = out_dtype
            if name not in ("copy", "fill"):
                common = real_dtype(result_type([x for _, x in promoting]))
                if not common.is_floating_point and out_dtype.is_floating_point:
                    common = out_dtype  # such as true division
            lowered = (
                lower(
                    name,
                    tuple(described),
                    DTYPE_NAMES[common],
                    DTYPE_NAMES[out_dtype],
                    vectors,
                    on_gpu,
                )
                if common in DTYPE_NAMES
                else None
            )
            if lowered is not None:
                # equal arithmetic is one object, for any operands
                content = (lowered.name, lowered.reads, lowered.instrs, lowered.writes)
                lowered = self._interned.setdefault(content, lowered)
            self._bodies[cached] = lowered
        body = self._bodies[cached]
        if body is None:
            return False
        values = tuple([self._operand(t) for t in reads])
        # an int64 of one element is no lane number, and neither is its result
        target = out if any(x.dim() for x in reads) else as_lane_number(out)
        buffer = self.buffer_of(target)
        if self._collides(buffer, values):
            return False
        self.nodes.append(
            SchedulerNode(
                body,
                values,
                tuple(scalars),
                (self._write(buffer),),
                self.call,
                self.line,
            )
        )
        return True

    def _has_vectors(self, out: torch.Tensor) -> bool:
        """Does eager compute this result with the CPU's vector library of functions?"""
        if self.vector_library is not None:
            return self.vector_library
        return self.device_of(out) == "cpu"

    def _on_gpu(self, out: torch.Tensor) -> bool:
        """Does a GPU kernel of eager compute this result? (ROCm devices are named
        "cuda" too.)
        """
        return self.vector_library is None and self.device_of(out).startswith("cuda")

    def on_host(self, x: Any) -> bool:
        """Is this a tensor without dimensions in the CPU's memory?"""
        is_alone = isinstance(x, torch.Tensor) and x.dim() == 0
        return is_alone and self.device_of(x) == "cpu"

    def reduce(
        self,
        body: Body,
        operands: Sequence[torch.Tensor],
        dims: tuple[int, ...],
        out: torch.Tensor,
    ) -> None:
        """Add the node that reduces `operands` over `dims` into `out`."""
        content = (body.name, body.reads, body.instrs, body.writes, body.reduction)
        body = self._interned.setdefault(content, body)
        reads = tuple([self._read(t) for t in operands])
        write = self._write(self.buffer_of(as_lane_number(out)))
        self.nodes.append(
            SchedulerNode(body, reads, (), (write,), self.call, self.line, dims)
        )

    def add(
        self, body: Body, operands: Sequence[torch.Tensor], out: torch.Tensor
    ) -> None:
        """Add a node with this body, without numbers of the host, that writes `out`."""
        content = (body.name, body.reads, body.instrs, body.writes)
        body = self._interned.setdefault(content, body)
        reads = tuple([self._operand(t) for t in operands])
        write = self._write(self.buffer_of(out))
        self.nodes.append(
            SchedulerNode(body, reads, (), (write,), self.call, self.line)
        )

    def _operand(self, t: torch.Tensor) -> int:
        """Return the value that arithmetic reads for a tensor.

        Memory last written as another dtype of the same size is read as the bits of
        that value, which need not pass through memory.
        """
        index, value = self.buffer_of(t), self._read(t)
        if index not in self._seen:
            return value
        source, written = self._seen[index]
        buffer, source_buffer = self.buffers[index], self.buffers[source]
        if not same_place(buffer, source_buffer):
            return value
        key = (written, buffer.dtype)
        if key not in self._bits:
            operands = (TensorOperand(source_buffer.dtype, source_buffer.shape == ()),)
            body = lower("bitcast", operands, buffer.dtype, buffer.dtype)
            if body is None:
                return value
            body = self._interned.setdefault(
                (body.name, body.reads, body.instrs, body.writes), body
            )
            twin = torch.empty_strided(
                buffer.shape,
                buffer.stride,
                dtype=NAMED_DTYPES[buffer.dtype],
                device="meta",
            )
            self._devices[twin.untyped_storage()._cdata] = buffer.device
            target = self._write(self.buffer_of(twin))
            node = SchedulerNode(body, (written,), (), (target,), self.call, self.line)
            self.nodes.append(node)
            self._bits[key] = target
        return self._bits[key]

    def _by_parts(self, name: str, operands: Any, out: torch.dtype) -> str | None:
        """Return the rule for the parts of complex numbers, if their strides are
        certain.

        The shape rules of FFTs return different strides than the calls do, and the bits
        of the next FFT depend on strides. So calls on results of externs stay externs.
        """
        tensors = [x for _, x in operands if is_complex(x)]
        from_externs = {
            t.untyped_storage()._cdata for t in tensors
        } & self._complex_given
        return None if from_externs else by_parts(name, operands, out)

    # ---------------------------------------------------------------- numbers

    def item(self, t: torch.Tensor) -> Computed:
        """Record `t.item()` of a tensor that the step computed, without a
        synchronization.
        """
        cell = self._cell(self.device_of(t))
        source = t.reshape(()) if t.dim() else t
        if not self.emit("copy", (("src", source),), cell):
            raise CaptureError(f"the step reads a {t.dtype} as a number\n{self.line}")
        whole = bool if t.dtype == torch.bool else int
        return Computed(cell, float if t.is_floating_point() else whole)

    def compute(self, op: str, operands: Sequence[Any], kind: type) -> Computed:
        """Record one operation on numbers, at least one of which is a Computed."""
        stored = tuple(isinstance(x, Computed) for x in operands)
        whole = op in SIGNED and kind is not float
        body = self._bodies.get((op, stored, whole))
        if body is None:
            body = self._bodies[op, stored, whole] = body_of_numbers(op, stored, whole)
        tensors = [x.tensor for x in operands if isinstance(x, Computed)]
        others = [x for x in operands if not isinstance(x, Computed)]
        scalars = tuple(
            Symbol(x.index) if isinstance(x, Sym) else self._literal(float(x))
            for x in others
        )
        cell = self._cell(self.device_of(tensors[0]))
        values = tuple([self._read(t) for t in tensors])
        written = (self._write(self.buffer_of(cell)),)
        self.nodes.append(
            SchedulerNode(body, values, scalars, written, self.call, self.line)
        )
        return Computed(cell, kind)

    def _cell(self, device: str) -> torch.Tensor:
        """Make memory for a number: a 0-d float64 meta tensor on `device`."""
        cell = torch.empty((), dtype=torch.float64, device="meta")
        self._devices[cell.untyped_storage()._cdata] = device
        buffer = self.known(cell)
        if buffer is not None:  # recorded when `empty` was called, on no device
            self.buffers[buffer] = self.buffers[buffer]._replace(device=device)
        return cell

    def meant(self, x: Any) -> Any:
        """Return the number that a stand-in argument represents, or the argument
        itself.
        """
        stand_in = self.standins.find(x)
        if stand_in is None:
            return x
        number, negated = stand_in
        if not negated:
            return number
        if isinstance(number, Computed):
            return self.compute("neg", [number], kind_of("neg", [number]))
        return self.scalars.apply(operator.neg, (number,))

    def _scalar(self, x: Any) -> tuple[ScalarRef, bool]:
        if isinstance(x, Sym):
            return Symbol(x.index), x.is_float
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
        literal = self._literals.get(key)
        if literal is None:
            literal = self._literals[key] = Literal(value)
        return literal


def is_number(x: Any) -> bool:
    """Is an operand a number or the stand-in of one?"""
    return isinstance(x, (int, float))


def is_complex(x: Any) -> bool:
    """Is this a complex tensor?"""
    return isinstance(x, torch.Tensor) and x.dtype in PARTS

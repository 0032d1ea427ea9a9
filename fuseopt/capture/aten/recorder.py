"""Record ATen calls as SchedulerNodes while the step runs on meta tensors.

`Recorder` is a TorchDispatchMode. A pointwise call, or every position of a foreach
call, becomes a SchedulerNode with an interned Body. A view becomes another Buffer of
the same storage, and any other call becomes an Extern. Mutation becomes versions: each
write makes a new value of its buffer. This module chooses the translation of a call.
`ops` describes the ops; `buffers`, `pointwise` and `externs` hold the recording.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...compat import DISPATCH_MODE
from ...errors import CaptureError
from ...lowering.pointwise import RULES
from ..scalars.host import Scalars
from . import added_products, blocks, outer_product, reductions
from .constants import swap
from .dtypes import DTYPE_NAMES
from .externs import Externs, tensors_in
from .foreach import Positions
from .foreach import results as new_tensors
from .ops import FOREACH_REDUCTIONS, OpInfo, column, lowering, op_info, position
from .pointwise import is_number
from .stacks import CHAINS, Stack, Stacks, pieces_of
from .values_alone import without_vectors

#: Scale arguments: a rule treats a missing one as a factor of 1.
SCALES = frozenset({"alpha", "value"})


class Recorder(Externs, DISPATCH_MODE):  # type: ignore[misc]
    """Translates each ATen call; see the module."""

    def __init__(self, scalars: Scalars, vector_library: bool | None = True) -> None:
        DISPATCH_MODE.__init__(self)
        Externs.__init__(self, scalars, vector_library)
        self.stacks = Stacks(self._read)
        #: the number of calls that were more than elementwise arithmetic
        self.others = 0
        self.items = 0  # the number of reads of numbers from tensors
        #: the name of the function or method that the step calls
        self.function = ""
        #: the first call on tensors with dimensions that is not elementwise, see OpInfo
        self.beyond = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        op = op_info(func)
        self.call += 1
        if self.instead is not None:
            self.others += 1
            out = func(*args, **kwargs)
            return self._extern(func, args, {}, out, "autocast may keep this cast")
        bound = dict(zip(op.arguments, args, strict=False))
        bound.update(kwargs)
        values = without_vectors(self.function, func, bound)
        if values is not None:
            args, kwargs = (bound["A"],), values
            bound.update(values)
        self._wanted = ""
        tensors = [t for x in bound.values() for t in tensors_in(x)]
        if not all(t.is_meta for t in tensors):
            self._check_constants(func, op, bound)
            keeps_constant = self.literals is None and not op.schema.seeded
            self.others += 1
            if keeps_constant and not any(t.is_meta for t in tensors):
                self._note(func, op, tensors)
                return func(*args, **kwargs)
            args = swap(args, self.constant)
            kwargs = {k: swap(v, self.constant) for k, v in kwargs.items()}
            bound = {k: swap(v, self.constant) for k, v in bound.items()}
        if "device" in op.arguments:
            kwargs = self._on_meta(bound, kwargs)
        call = self._foreach if op.foreach else self._single
        out = call(func, op, bound, args, kwargs)
        if not (op.elementwise or self.beyond):
            self._note(func, op, [*tensors, *tensors_in(out)])
        return out

    def _note(self, func: Any, op: OpInfo, tensors: Sequence[torch.Tensor]) -> None:
        if not (op.elementwise or self.beyond) and any(t.dim() for t in tensors):
            self.beyond = str(func)

    def sizes(self) -> tuple[int, ...]:
        """Return the sizes of all collections to which arithmetic calls do not add."""
        return (
            len(self.calls),
            self.items,
            self.stacks.count,
            len(self._constants),
            len(self._bits),
            len(self._near),
            len(self._folded),
            len(self._seen),
            len(self._complex_given),
        )

    def alone(self, buffer: int) -> bool:
        """Is a buffer the only one in its storage, and no stack?"""
        storage = self.buffers[buffer].storage
        return super().alone(buffer) and not self.stacks.holds(storage)

    def _check_constants(self, func: Any, op: OpInfo, bound: dict[str, Any]) -> None:
        """Raise CaptureError if a call writes a tensor that capture has read."""
        for _, name in op.schema.writes:
            if not all(t.is_meta for t in tensors_in(bound.get(name))):
                raise CaptureError(
                    f"{func} changes a tensor that is not the step's\n{self.line}"
                )

    def _on_meta(self, bound: dict[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return keywords with which a call creates its result on meta.

        `_wanted` keeps the call's own device. A call without tensors would otherwise
        allocate on the default device.
        """
        device = bound.get("device")
        if device is None and any(tensors_in(x) for x in bound.values()):
            return kwargs
        if str(device) != "meta":
            self._wanted = str(device or torch.get_default_device())
        bound["device"] = torch.device("meta")
        return {**kwargs, "device": bound["device"]}

    # ---------------------------------------------------------------- one call

    def _single(self, func: Any, op: OpInfo, bound: Any, args: Any, kwargs: Any) -> Any:
        out = bound["self"] if op.meta_free else func(*args, **kwargs)
        if not isinstance(out, torch.Tensor):
            self.others += 1
            tensors = tensors_in(out)
            if not op.schema.writes and out is not None:
                if not tensors:
                    return out  # metadata: a size, a dtype, a test of layout
                if all(self._is_view(t, bound) for t in tensors):
                    for t in tensors:
                        self._inherit(t, bound)
                        self._read(t)
                    return out
            return self._extern(func, args, kwargs, out, "no rule for this op")
        self._inherit(out, bound)
        if (op.shaped and out.dim()) or not (op.shaped or op.pointwise):
            self.others += 1
        if op.empty:
            self.hollow(out)
            return out
        stack = pieces_of(op.name, bound)
        if stack is not None and self._stack(stack, out):
            return out
        pieces = self.stacks.reduced(op.name, bound)
        if pieces is not None and self._chain(CHAINS[op.name], pieces, out):
            return out
        if self._is_view(out, bound):
            if not op.schema.writes or op.schema.reshapes:
                self._read(out)
                return out
        reduction = reductions.recognise(op.name, bound)
        if reduction is not None and reductions.record(self, reduction, out):
            return out
        if outer_product.record(self, op.name, bound, out):
            return out
        if blocks.record(self, op.name, bound, out):
            return out
        if added_products.record(self, func, bound, out):
            return out
        lowered = lowering(op, bound, self._default)
        if lowered is None:
            return self._extern(func, args, kwargs, out, "no rule for this op")
        rule, operands = lowered
        if self.emit(rule, operands, out):
            return out
        return self._extern(func, args, kwargs, out, self._reason(operands, out))

    @staticmethod
    def _is_view(out: torch.Tensor, bound: Any) -> bool:
        storage = out.untyped_storage()._cdata
        return any(
            isinstance(v, torch.Tensor) and v.untyped_storage()._cdata == storage
            for v in bound.values()
        )

    def _stack(self, stack: Stack, out: torch.Tensor) -> bool:
        """Record a stack as copies into the parts of the result."""
        if out.dtype not in DTYPE_NAMES or any(t.is_neg() for t in stack.pieces):
            return False
        for i, t in enumerate(stack.pieces):
            self.emit("copy", (("src", t),), out.select(stack.dim, i))
        self.stacks.add(stack, out)
        return True

    def _chain(self, name: str, tensors: list[torch.Tensor], out: torch.Tensor) -> bool:
        """Record `name(name(t0, t1), t2) ...`."""
        result = tensors[0]
        for i, t in enumerate(tensors[1:], 2):
            target = out if i == len(tensors) else torch.empty_like(out)
            self._inherit(target, {"self": result})
            if not self.emit(name, (("self", result), ("other", t)), target):
                return False
            result = target
        return len(tensors) > 1

    def _reason(self, operands: Iterable[tuple[str, Any]], out: torch.Tensor) -> str:
        """Return the reason why a call that a rule covers becomes an Extern."""
        reads = [self._read(x) for _, x in operands if isinstance(x, torch.Tensor)]
        if self._collides(self.buffer_of(out), reads):
            return "it writes memory that it reads at another index, or one place twice"
        return "no rule for these types or numbers"

    def scaled(
        self,
        name: str,
        target: torch.Tensor,
        factors: Sequence[torch.Tensor],
        keyword: str,
        scale: torch.Tensor,
    ) -> None:
        """Record `target.<name>_(*factors, <keyword>=scale)` for a 0-d tensor scale.

        ATen's own signature takes a number there, and reads it from the tensor with a
        sync.
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

    def lerp_listed(
        self, start: torch.Tensor, end: torch.Tensor, weight: torch.Tensor
    ) -> bool:
        """Record one position of a foreach lerp whose weight is a tensor.

        Eager reads the weight as a number, in the tensor's dtype. Returns False if the
        weight is not 0-d.
        """
        if weight.dim():
            return False
        start, end, weight = (swap(t, self.constant) for t in (start, end, weight))
        operands = (("self", start), ("end", end), ("weight", weight))
        return self.emit("lerp_listed", operands, start)

    # ---------------------------------------------------------------- a call of lists

    def _default(self, name: str, value: Any) -> Any:
        """Return the value of an omitted argument: its default if a number, None for a
        scale.
        """
        if name in SCALES or not isinstance(value, (int, float)):
            return None
        if self.literals is not None:
            self.literals |= {value}
        return value

    def _foreach(
        self, func: Any, op: OpInfo, bound: Any, args: Any, kwargs: Any
    ) -> Any:
        name = op.name
        lists = [v for v in bound.values() if isinstance(v, (list, tuple))]
        first = bound.get("self")
        n = len(first) if isinstance(first, (list, tuple)) else len(lists[0])
        if name not in RULES:
            self.others += 1
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
            results = new_tensors(func, op.arguments, bound, len(args))
            out = results
        if name == "copy":
            columns = [("src", list(bound["src"]))]
        elif name == "zero":
            columns = [("value", [0.0] * n)]
            name = "fill"
        else:
            columns = [(k, column(k, v, n)) for k, v in bound.items()]
        if name == "mul" and op.inplace and is_number(columns[1][1][0]):
            name = "mul_rounded"  # the one foreach op that rounds its number
        if name == "div" and not is_number(first := columns[0][1][0]):
            by, one = columns[1][1][0], func._overloadname in ("Scalar", "Tensor")
            if self._on_gpu(first) and is_number(by) and not one:
                name = "div_exact"  # of a list of numbers, eager takes no inverses
        positions = Positions(self, columns)
        for i in range(n):
            result = results[i]
            operands = tuple([(k, values[i]) for k, values in columns])
            self._inherit(result, dict(operands))
            if positions.again(i, result):
                continue
            nodes = len(self.nodes)
            if not self.emit(name, operands, result):
                arguments = {k: position(k, v, i) for k, v in bound.items()}
                positional = tuple(arguments[k] for k in op.arguments[: len(args)])
                keywords = {k: arguments[k] for k in kwargs}
                new = [] if op.inplace else [result]
                self._extern(
                    func, positional, keywords, new, self._reason(operands, result)
                )
            else:
                positions.learn(nodes)
        return out

    def _foreach_reductions(
        self, func: Any, name: str, bound: Any, args: Any, kwargs: Any
    ) -> list[torch.Tensor] | None:
        reductions_of = [
            reductions.recognise(name, {**bound, "self": t}) for t in bound["self"]
        ]
        if any(f is None or f.is_undefined for f in reductions_of):
            return None
        results = list(func(*args, **kwargs))
        for out, f in zip(results, reductions_of, strict=True):
            assert f is not None
            self._inherit(out, {"self": f.operands[0]})
            reductions.record(self, f, out)
        return results

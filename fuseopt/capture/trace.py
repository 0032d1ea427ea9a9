"""Run Dynamo's FX graph once on meta tensors, under the Recorder.

`capture(gm, args)` takes the GraphModule and the arguments of a call (real or fake
tensors and numbers; only their metadata is read) and returns a `Captured`: the Graph,
the scalar program, the externs' calls, and where the tensors of a call come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from ..errors import CaptureError
from ..ir.columns import columns
from ..ir.graph import Buffer, Graph
from .aten.constants import swap
from .aten.dtypes import PARTS
from .aten.externs import Call
from .fx.given_memory import Given
from .fx.interpreter import Interpreter
from .scalars.device import Computed, NumberRef
from .scalars.host import Scalars, Sym


@dataclass(frozen=True)
class Captured:
    """A captured step.

    The tensors of a call are `pool`: first the graph's own (`statics`, by attribute
    name), then the tensors among the arguments (`tensor_args`, by position). `twins`
    are pairs of pool positions (second, first) that were the same memory in the same
    layout, and so are one buffer. `complexes`: positions in the pool of tensors whose
    buffers are their real views.
    `result` is the graph's output with each tensor replaced by ("buffer", index), or by
    ("complex", index) where the buffer is its real view; ("alias", index) is another
    tensor of the memory of one of the call (`p.detach()`). Where one of these is given
    other memory, ("tensor", position) is that itself, and an alias is what it was
    before. `given`: what is given to which of them, when the step has run. `aliases`:
    the buffers of such aliases.
    """

    graph: Graph
    scalars: Scalars
    calls: tuple[Call, ...]
    statics: tuple[str, ...]
    tensor_args: tuple[int, ...]
    complexes: tuple[int, ...]
    result: Any
    twins: tuple[tuple[int, int], ...] = ()
    given: tuple[Given, ...] = ()
    aliases: tuple[int, ...] = ()


def capture(
    gm: GraphModule, args: Sequence[Any], vector_library: bool | None = None
) -> Captured:
    """Capture the graph of one step.

    `vector_library`: give the bits of eager's CPU kernels, which take some functions
    from a vector library, or those of IEEE arithmetic; None decides by the device of
    each result.

    Raises UnsupportedInput for tensors no kernel can address, CaptureError for a graph
    that cannot be recorded; both before anything is written.
    """
    interpreter = Interpreter(gm, args, vector_library)
    interpreter.register_inputs()
    returned = interpreter.run()
    recorder = interpreter.recorder
    outputs: list[int] = []
    given = interpreter.places.given(recorder)
    outputs += [x.buffer for x in given]
    moved = {id(twin): i for i, twin in interpreter.places.moved()}
    sources = frozenset(moved.values())
    aliases: list[int] = []

    def describe(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            if id(x) in moved:
                return ("tensor", moved[id(x)])
            if x.is_conj() or x.is_neg():
                raise CaptureError("the step returns a conjugated or negated view")
            buffer = recorder.buffer_of(swap(x, recorder.constant))
            outputs.append(buffer)
            own = recorder.buffers[buffer]
            given_as = own.source in sources or id(x) not in interpreter.origin
            if own.kind in ("static", "arg") and given_as and x.dtype not in PARTS:
                aliases.append(buffer)
                return ("alias", buffer)
            return ("complex" if x.dtype in PARTS else "buffer", buffer)
        if isinstance(x, (list, tuple)):
            return type(x)(describe(y) for y in x)
        if isinstance(x, Computed):
            buffer = recorder.buffer_of(x.tensor)
            outputs.append(buffer)
            return NumberRef(buffer, x.is_float)
        return ("sym", x) if isinstance(x, Sym) else ("value", x)

    result = describe(returned)
    final = [
        value if buffer.kind != "temp" and value != first else -1
        for buffer, value, first in zip(
            recorder.buffers, recorder.current, recorder.initial, strict=True
        )
    ]
    for b in outputs:
        if recorder.buffers[b].kind == "temp":
            final[b] = recorder.current[b]
    buffers = _numbered(recorder.buffers)
    graph = Graph(
        buffers,
        tuple(recorder.values),
        columns(recorder.nodes, recorder.values, buffers),
        tuple(recorder.initial),
        tuple(final),
        tuple(dict.fromkeys(outputs)),
    )
    return Captured(
        graph,
        interpreter.scalars,
        tuple(recorder.calls),
        tuple(interpreter.statics),
        tuple(interpreter.tensor_args),
        tuple(interpreter.complexes),
        result,
        tuple(interpreter.twins),
        given,
        tuple(aliases),
    )


def _numbered(buffers: Sequence[Buffer]) -> tuple[Buffer, ...]:
    """Buffers whose storages are numbered as they come, so that a step captured again
    is the same graph: the recorder knows storages by their addresses.
    """
    numbers: dict[int, int] = {}
    return tuple(
        [
            b._replace(storage=numbers.setdefault(b.storage, len(numbers)))
            for b in buffers
        ]
    )


def result_buffers(result: Any) -> list[int]:
    """The buffers of which a caller is given something, by what is returned."""
    if isinstance(result, NumberRef):
        return [result.buffer]
    if isinstance(result, tuple) and len(result) == 2:
        if result[0] in ("buffer", "complex", "alias"):
            return [result[1]]
        if result[0] in ("sym", "value", "tensor"):
            return []
    if isinstance(result, (list, tuple)):
        return sorted({b for x in result for b in result_buffers(x)})
    return []


def read_at_once(captured: Captured) -> bool:
    """Does who calls the step read numbers of its results?

    Dynamo hands a float that a step computed over in a tensor of float64 without
    dimensions, which its code reads as soon as the graph has run.
    """
    buffers = captured.graph.buffers
    of_numbers = {b for b in result_buffers(captured.result) if not buffers[b].shape}
    return any(buffers[b].dtype == "f64" for b in of_numbers) or _has_number(
        captured.result
    )


def _has_number(result: Any) -> bool:
    if isinstance(result, NumberRef):
        return True
    return isinstance(result, (list, tuple)) and any(map(_has_number, result))

"""Run Dynamo's FX graph once on meta tensors, under the Recorder.

`capture(gm, args)` takes the GraphModule and the arguments of a call: real or fake
tensors and numbers, of which it reads only metadata. It returns a `Captured` with the
Graph, the calls of externs, and the origin of each tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from ..errors import CaptureError, EagerOnly
from ..ir.columns import columns
from ..ir.expressions import Evaluator, evaluator
from ..ir.graph import Buffer, Graph
from .aten.constants import swap
from .aten.dtypes import PARTS
from .aten.externs import Call
from .fx.inputs import lasting_class, static_tensors
from .fx.interpreter import Interpreter
from .fx.reassigned_memory import MemoryAssignment
from .results import Alias, ConstantResult, ReassignedTensor, Returned
from .scalars.device import Computed, NumberRef
from .scalars.host import Sym


@dataclass(frozen=True)
class Captured:
    """A captured step.

    The tensors of a call are first the graph's own (`statics`, by attribute name), then
    the tensors among the arguments (`tensor_args`, by position).

    `twins`: index pairs (second, first) of tensors with the same memory and layout,
        which are one buffer.
    `complexes`: the indices of tensors whose buffers are their real views.
    `result`: the graph's output, see `results`.
    `given`: the memory that tensors of the call are assigned after the step.
    `aliases`: the buffers of the result's aliases.
    `beyond`: the first op that does not treat all elements alike; "" if there is none.
    `dropped`: buffers whose writes were left out, since nothing reads them afterwards.
        They must share no memory, as if they were written.
    `owners`: by buffer, the number of its owner. A call may omit an owner, with all
        that it reads and writes.
    """

    graph: Graph
    calls: tuple[Call, ...]
    statics: tuple[str, ...]
    tensor_args: tuple[int, ...]
    complexes: tuple[int, ...]
    result: Any
    twins: tuple[tuple[int, int], ...] = ()
    given: tuple[MemoryAssignment, ...] = ()
    aliases: tuple[int, ...] = ()
    beyond: str = ""
    dropped: tuple[int, ...] = ()
    owners: Mapping[int, int] = field(default_factory=dict)

    @functools.cached_property
    def evaluate(self) -> Evaluator:
        """Evaluator of the numbers of a call; calls `.item()` only on CPU tensors."""
        return evaluator(self.graph.numbers)


def capture(
    gm: GraphModule, args: Sequence[Any], vector_library: bool | None = None
) -> Captured:
    """Capture the graph of one step.

    `vector_library`: True gives the bits of eager's CPU kernels, which take some
    functions from a vector library. False gives those of IEEE arithmetic. None decides
    by the device of each result.

    Raises UnsupportedInput for tensors that no kernel can address, and CaptureError for
    a graph that cannot be recorded. Nothing has been written by then.
    """
    interpreter = Interpreter(gm, args, vector_library)
    interpreter.register_inputs()
    returned = interpreter.run()
    recorder = interpreter.recorder
    outputs: list[int] = []
    assigned = interpreter.places.given(recorder)
    outputs += [x.buffer for x in assigned]
    moved = {id(twin): i for i, twin in interpreter.places.moved()}
    sources = frozenset(moved.values())
    aliases: list[int] = []
    first_of: dict[int, int] = {}  # buffer -> the id of its first tensor
    derived = lasting_class([*static_tensors(gm).values(), *args])

    def describe(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            if id(x) in moved:
                return ReassignedTensor(moved[id(x)])
            if derived and id(x) not in interpreter.origin:
                raise EagerOnly(
                    f"the step makes tensors from a {derived}, whose class they keep"
                )
            if x.is_conj() or x.is_neg():
                raise CaptureError("the step returns a conjugated or negated view")
            buffer = recorder.buffer_of(swap(x, recorder.constant))
            outputs.append(buffer)
            record = recorder.buffers[buffer]
            given_as = record.source in sources or id(x) not in interpreter.origin
            if record.kind in ("static", "arg") and given_as and x.dtype not in PARTS:
                aliases.append(buffer)
                return Alias(buffer)
            again = first_of.setdefault(buffer, id(x)) != id(x)
            return Returned(buffer, x.dtype in PARTS, again)
        if isinstance(x, (list, tuple)):
            return type(x)(describe(y) for y in x)
        if isinstance(x, Computed):
            buffer = recorder.buffer_of(x.tensor)
            outputs.append(buffer)
            return NumberRef(buffer, x.kind)
        return x if isinstance(x, Sym) else ConstantResult(x)

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
        tuple(interpreter.scalars.exprs),
    )
    return Captured(
        graph,
        tuple(recorder.calls),
        tuple(interpreter.statics),
        tuple(interpreter.tensor_args),
        tuple(interpreter.complexes),
        result,
        tuple(interpreter.twins),
        assigned,
        tuple(aliases),
        recorder.beyond,
    )


def _numbered(buffers: Sequence[Buffer]) -> tuple[Buffer, ...]:
    """Number storages in order, in place of the recorder's addresses.

    Two captures of one step then give equal graphs.
    """
    numbers: dict[int, int] = {}
    return tuple(
        [
            b._replace(storage=numbers.setdefault(b.storage, len(numbers)))
            for b in buffers
        ]
    )

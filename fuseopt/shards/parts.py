"""Trace a function of DTensors to a graph of its calls on local parts.

The trace runs the function on stand-ins: DTensors of the same meshes, placements and
sizes, with fake local parts. Below DTensor a mode records the ATen calls and
collectives on local parts. So their order and arguments are those of the installed
torch's DTensor. The trace sends nothing.

Numbers among the arguments become arguments of the graph. The trace recognizes them by
unusual values, which differ in a second run. Both runs must make the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule

from .. import compat
from ..capture.fx.inner_calls import InnerCalls
from ..inputs.keys import LanesDiffer

#: Value of the first number in each of two runs; further ones are odd multiples.
MARKS = (0.7390851332151607, 0.5671432904097838)


class Parts(NamedTuple):
    """Graph that takes local parts, then numbers, and returns a tuple of one part.

    `spec` is that of the DTensor with the returned part.
    """

    gm: GraphModule
    spec: Any


def parts_of(
    function: Callable[[list[Any], list[float]], Any],
    wholes: Sequence[Any],
    numbers: int,
) -> Parts:
    """Return the calls on parts of `function(DTensors, numbers)`, which returns a
    DTensor.

    `wholes` are DTensors like those of later calls; `numbers` is how many numbers it
    takes. Raises LanesDiffer or EagerOnly if the calls depend on contents, on numbers,
    or on other tensors. Errors of the function pass through.
    """
    runs = [
        _run(function, wholes, [mark * (2 * k + 1) for k in range(numbers)])
        for mark in MARKS
    ]
    (recorder, result), (second_recorder, _) = runs
    if recorder.calls != second_recorder.calls:
        raise LanesDiffer("the calls on local parts depend on a number")
    part = compat.local_part(result)
    if id(part) not in recorder.index:
        raise LanesDiffer("a result was computed from no local part")
    graph, nodes = recorder.graph(len(wholes), numbers)
    graph.output((nodes[recorder.index[id(part)]],))
    return Parts(GraphModule(torch.nn.Module(), graph), compat.spec_of(result))


def _run(
    function: Callable[[list[Any], list[float]], Any],
    wholes: Sequence[Any],
    numbers: list[float],
) -> tuple[InnerCalls, Any]:
    mode = compat.fake_mode()
    parts = [mode.from_tensor(compat.local_part(t)) for t in wholes]
    stand_ins = [
        compat.spread(part, compat.spec_of(t))
        for part, t in zip(parts, wholes, strict=True)
    ]
    recorder = InnerCalls(parts, numbers)
    with torch.no_grad(), recorder:
        result = function(stand_ins, numbers)
    if type(result) is not compat.dtensor_type():
        raise LanesDiffer(f"a {type(result).__name__} is returned")
    return recorder, result

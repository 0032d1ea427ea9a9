"""A function of DTensors -> the graph of what it does to the parts of this process.

The function is run on stand-ins: DTensors of the same meshes, placements and sizes,
whose parts have no contents. Below DTensor a mode writes down the calls of ATen and the
collectives that reach parts, so that what is done to them, in which order, and what
processes tell one another, is DTensor's own answer, whatever torch's version does.
Nothing is sent while that is found out.

Numbers that the function is given are arguments of the graph. To find them again they
have values that nobody else has, and other ones in a second run: both must make the
same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule

from .. import compat
from ..capture.fx.inner_calls import InnerCalls
from ..shadow.lanes import Unlike

#: What stands for the first number in each of two runs, times the odd numbers for more.
MARKS = (0.7390851332151607, 0.5671432904097838)


class Parts(NamedTuple):
    """A graph that takes parts, then numbers, and returns a tuple with one part.

    `spec`: how the DTensor of that part is spread.
    """

    gm: GraphModule
    spec: Any


def parts_of(
    function: Callable[[list[Any], list[float]], Any],
    wholes: Sequence[Any],
    numbers: int,
) -> Parts:
    """What `function(DTensors, numbers)`, which returns a DTensor, does to parts.

    `wholes`: DTensors like those that it is for; `numbers`: how many it is given.
    Raises Unlike or EagerOnly where that depends on contents, on numbers, or on other
    tensors, and what the function raises.
    """
    runs = [
        _run(function, wholes, [mark * (2 * k + 1) for k in range(numbers)])
        for mark in MARKS
    ]
    (recorder, result), (again, _) = runs
    if recorder.calls != again.calls:
        raise Unlike("what is done to parts depends on a number")
    part = compat.local_part(result)
    if id(part) not in recorder.index:
        raise Unlike("what is returned was made of no part")
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
        raise Unlike(f"a {type(result).__name__} is returned")
    return recorder, result

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

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode

from .. import compat
from ..capture.aten.externs import tensors_in
from ..shadow.lanes import Unlike

#: What stands for the first number in each of two runs, times the odd numbers for more.
MARKS = (0.7390851332151607, 0.5671432904097838)


class Parts(NamedTuple):
    """A graph that takes parts, then numbers, and returns a tuple with one part.

    `spec`: how the DTensor of that part is spread.
    """

    gm: GraphModule
    spec: Any


@dataclass(frozen=True)
class _Ref:
    """A part, by when it came to be."""

    index: int


@dataclass(frozen=True)
class _Number:
    """A number that the function was given, by its place."""

    index: int


class _Call(NamedTuple):
    func: Any
    args: Any
    kwargs: Any
    made: tuple[int, ...]
    several: bool  # in a list


class _Recorder(TorchDispatchMode):
    """Writes down the calls that reach parts.

    DTensor computes sizes of results on tensors of its own, of which none is a part.
    """

    def __init__(self, parts: Sequence[torch.Tensor], numbers: Sequence[float]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: list[torch.Tensor] = []
        self.index: dict[int, int] = {}
        self.numbers = {x: i for i, x in enumerate(numbers)}
        self.calls: list[_Call] = []
        for t in parts:
            self._add(t)

    def _add(self, t: torch.Tensor) -> int:
        self.index[id(t)] = len(self.alive)
        self.alive.append(t)
        return self.index[id(t)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(compat.is_wrapper, types)):
            return NotImplemented
        given = tensors_in((args, [*kwargs.values()]))
        ours = [id(t) in self.index for t in given]
        noted = None
        if any(ours):
            if not all(ours):
                raise Unlike(f"{func} takes a tensor that is no part")
            noted = self._noted(args), self._noted(kwargs)
        out = func(*args, **kwargs)
        if noted is None:
            return out
        results = tensors_in(out)
        if compat.is_wait(func):
            # each collective is waited for where it is made
            self.index[id(results[0])] = self.index[id(given[0])]
            self.alive.append(results[0])
        elif func._schema.is_mutable or results:
            made = [self._add(t) for t in results if id(t) not in self.index]
            if made and len(made) < len(results):
                raise Unlike(f"{func} returns what it was given beside other tensors")
            several = isinstance(out, (list, tuple))
            self.calls.append(_Call(func, *noted, tuple(made), several))
        return out

    def _noted(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return _Ref(self.index[id(x)])
        if isinstance(x, float) and x in self.numbers:
            return _Number(self.numbers[x])
        if isinstance(x, (list, tuple)):
            return type(x)(self._noted(y) for y in x)
        if isinstance(x, dict):
            return {k: self._noted(v) for k, v in x.items()}
        return x


def parts_of(
    function: Callable[[list[Any], list[float]], Any],
    wholes: Sequence[Any],
    numbers: int,
) -> Parts:
    """What `function(DTensors, numbers)`, which returns a DTensor, does to parts.

    `wholes`: DTensors like those that it is for; `numbers`: how many it is given.
    Raises Unlike where that depends on contents, on numbers, or on other tensors, and
    what the function raises.
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
    graph = _graph(recorder, len(wholes), numbers, recorder.index[id(part)])
    return Parts(GraphModule(torch.nn.Module(), graph), compat.spec_of(result))


def _run(
    function: Callable[[list[Any], list[float]], Any],
    wholes: Sequence[Any],
    numbers: list[float],
) -> tuple[_Recorder, Any]:
    mode = compat.fake_mode()
    parts = [mode.from_tensor(compat.local_part(t)) for t in wholes]
    stand_ins = [
        compat.spread(part, compat.spec_of(t))
        for part, t in zip(parts, wholes, strict=True)
    ]
    recorder = _Recorder(parts, numbers)
    with torch.no_grad(), recorder:
        result = function(stand_ins, numbers)
    if type(result) is not compat.dtensor_type():
        raise Unlike(f"a {type(result).__name__} is returned")
    return recorder, result


def _graph(recorder: _Recorder, parts: int, numbers: int, result: int) -> Graph:
    graph = Graph()
    nodes: dict[int, Node] = {}

    def node_of(index: int, node: Node) -> Node:
        nodes[index] = node
        node.meta["example_value"] = recorder.alive[index]
        return node

    def mapped(x: Any) -> Any:
        if isinstance(x, _Ref):
            return nodes[x.index]
        if isinstance(x, _Number):
            return floats[x.index]
        if isinstance(x, (list, tuple)):
            return type(x)(mapped(y) for y in x)
        if isinstance(x, dict):
            return {k: mapped(v) for k, v in x.items()}
        return x

    for i in range(parts):
        node_of(i, graph.placeholder(f"part{i}"))
    floats = [graph.placeholder(f"number{i}") for i in range(numbers)]
    for call in recorder.calls:
        node = graph.call_function(call.func, mapped(call.args), mapped(call.kwargs))
        if not call.made:
            continue
        examples = [recorder.alive[i] for i in call.made]
        node.meta["example_value"] = examples if call.several else examples[0]
        if compat.is_collective(call.func):
            node = graph.call_function(compat.waiting(), (node,))
        if not call.several:
            node_of(call.made[0], node)
            continue
        for k, index in enumerate(call.made):
            node_of(index, graph.call_function(operator.getitem, (node, k)))
    graph.output((nodes[result],))
    return graph

"""Insert calls before and after the step of lanes into Dynamo's graph of their models.

These calls may need more tensors than the step: gradients that the step does not use, a
tensor beside each parameter (its average, its copy), and what all lanes share (a
factor, a limit). The graph gets these as additional arguments, and two nodes: one
before all calls, one behind them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.fx import Graph, GraphModule, Node

from ..capture import Captured
from ..capture.fx.inputs import static_tensors
from ..inputs.keys import LanesDiffer, Role
from ..inputs.lanes import Lanes
from .extend import COMMON, Extended
from .models import BESIDE, Models

Tensors = list[torch.Tensor]


class StepWrapper(Protocol):
    """The calls before and after the step of some models. Both are marked OWN.

    They take the parameters, the gradients (None where there is none), and the columns,
    each as long as the parameters, then what all lanes share. In a capture of a graph
    `before` is called first. `measures`: does it reduce whole tensors? Then lanes of
    other sizes are not alike.
    """

    measures: bool

    #: of each column, the dtype of its tensors by the parameter's dtype; None: float32
    #: numbers, each computed from all elements of a parameter
    dtypes: Sequence[Mapping[torch.dtype, torch.dtype] | None]

    def before(
        self,
        params: Tensors,
        grads: Sequence[torch.Tensor | None],
        columns: Sequence[Tensors],
        shared: Sequence[Any],
    ) -> None:
        """Do what comes before the step."""

    def after(
        self,
        params: Tensors,
        grads: Sequence[torch.Tensor | None],
        columns: Sequence[Tensors],
        shared: Sequence[Any],
    ) -> None:
        """Do what comes after it."""

    def finish(
        self, captured: Captured, kinds: Sequence[str | None], flag: int | None
    ) -> Captured:
        """The step to run in place of `captured`, that of all lanes. `kinds`: the role
        of each tensor of a call, None if it belongs to no lane; `flag`: the index of
        the flag among them.
        """


class _Inputs:
    """The tensors of a graph as nodes; it adds placeholders for those that lack one.

    `arguments`: the tensors that became additional arguments, behind the graph's own.
    """

    def __init__(self, gm: GraphModule, args: Sequence[Any]) -> None:
        self.graph = gm.graph
        self.arguments: Tensors = []
        placeholders = self.graph.find_nodes(op="placeholder")
        self._last = placeholders[-1] if placeholders else None
        self._nodes: dict[int, Node] = {}
        for node, x in zip(placeholders, args, strict=True):
            self._nodes.setdefault(id(x), node)
        with self.graph.inserting_before(calls_of(self.graph)[0]):
            for name, t in static_tensors(gm).items():
                self._nodes.setdefault(id(t), self.graph.get_attr(name))

    def has(self, t: torch.Tensor) -> bool:
        """Does the graph use this tensor?"""
        return id(t) in self._nodes

    def argument(self, name: str) -> Node:
        """A new placeholder behind all others."""
        if self._last is None:
            place = self.graph.inserting_before(next(iter(self.graph.nodes)))
        else:
            place = self.graph.inserting_after(self._last)
        with place:
            self._last = self.graph.placeholder(name)
        return self._last

    def of(self, name: str, t: torch.Tensor) -> Node:
        """The node of a tensor."""
        if id(t) not in self._nodes:
            self._nodes[id(t)] = self.argument(name)
            self.arguments.append(t)
        return self._nodes[id(t)]


def calls_of(graph: Graph) -> list[Node]:
    """The calls of a graph, then its output."""
    return [n for n in graph.nodes if n.op.startswith("call") or n.op == "output"]


def splice(
    gm: GraphModule,
    args: Sequence[Any],
    models: Models,
    active: Sequence[int],
    around: StepWrapper | None,
    shared: Sequence[Any],
) -> Tensors:
    """Insert the calls around a step into the graph of some models.

    Returns the models' tensors that became additional arguments: behind the graph's own
    ones and before `shared`. Raises LanesDiffer where the step itself uses a tensor in
    which a lane keeps something packed.
    """
    inputs, calls = _Inputs(gm, args), calls_of(gm.graph)
    packing, lanes = models.packing, []
    for k in active:
        packed, unpacked = models.packed(k)
        others = (t for t in packed.values() if t is not models.params[k])
        if any(map(inputs.has, others)):
            raise LanesDiffer("the step uses a tensor in which its state is packed")
        if packed:
            tensors = {**packed, **unpacked}
            lanes.append({x: inputs.of(f"{x}_{k}", t) for x, t in tensors.items()})
    if packing is not None and lanes:
        with gm.graph.inserting_before(calls[0]):
            first = gm.graph.call_function(packing.unpack, (lanes,))
        with gm.graph.inserting_before(calls[-1]):
            last = gm.graph.call_function(packing.pack, (lanes,))
        calls = [first.next, *calls[1:-1], last] if around is not None else calls
    if around is not None:
        _splice_around(inputs, calls, models, active, around, len(shared))
    return inputs.arguments


def _splice_around(
    inputs: _Inputs,
    calls: Sequence[Node],
    models: Models,
    active: Sequence[int],
    around: StepWrapper,
    shared: int,
) -> None:
    params_of_models = [models.params[k] for k in active]
    params = [
        inputs.of(f"param{k}", p) for k, p in zip(active, params_of_models, strict=True)
    ]
    grads = [
        None if p.grad is None else inputs.of(f"grad{k}", p.grad)
        for k, p in enumerate(params_of_models)
    ]
    columns = [
        [inputs.of(f"beside{c}_{k}", models.beside[k][c]) for k in active]
        for c in range(len(around.dtypes))
    ]
    common = [inputs.argument(f"shared{k}") for k in range(shared)]
    graph = inputs.graph
    with graph.inserting_before(calls[0]):
        graph.call_function(around.before, (params, grads, columns, common))
    with graph.inserting_before(calls[-1]):
        graph.call_function(around.after, (params, grads, columns, common))


def order_of(
    lanes: Lanes, columns: Sequence[Tensors], around: StepWrapper | None
) -> dict[tuple[int, Role], int]:
    """The index in a call of each tensor beside a lane. Raises LanesDiffer for one that
    is no number and has another layout than the lane's parameter, or not the dtype that
    `around` has for it.
    """
    order: dict[tuple[int, Role], int] = {}
    kinds = () if around is None else around.dtypes
    for c, (tensors, dtypes) in enumerate(zip(columns, kinds, strict=True)):
        for i, (t, p) in enumerate(zip(tensors, lanes.params, strict=True)):
            order[i, (BESIDE, str(c))] = len(order)
            if dtypes is None:
                continue
            if t.shape != p.shape or t.stride() != p.stride() or not t.is_leaf:
                raise LanesDiffer(
                    "an average lies in memory otherwise than its parameter"
                )
            if t.dtype != dtypes.get(p.dtype):
                raise LanesDiffer("an average has another dtype than it had")
    return order


def finished(
    around: StepWrapper,
    extended: Extended,
    roles: Sequence[tuple[int, Role]],
    flag: int | None,
) -> Captured:
    """The result of `around.finish` for an extended step. `flag`: a source or None."""
    kinds = [None if m == COMMON else roles[s][1][0] for s, m in extended.order]
    place = None if flag is None else extended.order.index((flag, COMMON))
    return around.finish(extended.captured, kinds, place)

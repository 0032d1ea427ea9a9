"""Insert calls before and after the step of lanes into Dynamo's graph of their models.

These calls may need more tensors than the step. Examples are gradients that the step
does not use, and a tensor beside each parameter, such as its average or its copy. All
lanes may share tensors too, such as a factor or a limit. The graph gets these as
additional arguments, and two nodes: one before all calls, one after them.
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

    They take the parameters, the gradients (None if missing), the columns, each as long
    as the parameters, and then the tensors that all lanes share. A capture of a graph
    calls `before` first. `measures`: True if the calls reduce whole tensors; then lanes
    of different sizes are not alike.
    """

    measures: bool

    #: For each column, the dtype of its tensors by the parameter's dtype. None: float32
    #: numbers, each computed from all elements of a parameter.
    dtypes: Sequence[Mapping[torch.dtype, torch.dtype] | None]

    def before(
        self,
        params: Tensors,
        grads: Sequence[torch.Tensor | None],
        columns: Sequence[Tensors],
        shared: Sequence[Any],
    ) -> None:
        """Do the work before the step."""

    def after(
        self,
        params: Tensors,
        grads: Sequence[torch.Tensor | None],
        columns: Sequence[Tensors],
        shared: Sequence[Any],
    ) -> None:
        """Do the work after the step."""

    def finish(
        self, captured: Captured, kinds: Sequence[str | None], flag: int | None
    ) -> Captured:
        """Return the step to run in place of `captured`, the step of all lanes.

        `kinds`: the role of each tensor of a call, None if it belongs to no lane.
        `flag`: the index of the flag among them.
        """


class _Inputs:
    """The tensors of a graph as nodes, with new placeholders for tensors without a
    node.

    `arguments`: the tensors that became additional arguments, after the graph's.
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
        """Return a new placeholder after all others."""
        if self._last is None:
            place = self.graph.inserting_before(next(iter(self.graph.nodes)))
        else:
            place = self.graph.inserting_after(self._last)
        with place:
            self._last = self.graph.placeholder(name)
        return self._last

    def of(self, name: str, t: torch.Tensor) -> Node:
        """Return the node of a tensor."""
        if id(t) not in self._nodes:
            self._nodes[id(t)] = self.argument(name)
            self.arguments.append(t)
        return self._nodes[id(t)]


def calls_of(graph: Graph) -> list[Node]:
    """Return the calls of a graph, then its output."""
    return [n for n in graph.nodes if n.op.startswith("call") or n.op == "output"]


def splice(
    gm: GraphModule,
    args: Sequence[Any],
    models: Models,
    active: Sequence[int],
    wrapper: StepWrapper | None,
    shared: Sequence[Any],
) -> Tensors:
    """Insert the calls around a step into the graph of some models.

    Returns the models' tensors that became additional arguments. They come after the
    graph's arguments and before `shared`. Raises LanesDiffer if the step itself uses a
    packed tensor of a lane.
    """
    inputs, calls = _Inputs(gm, args), calls_of(gm.graph)
    packing = models.packing
    lanes: list[dict[str, Node]] = []
    stepped: list[dict[str, Node]] = []
    hollow: list[dict[str, Node]] = []
    for k in active:
        packed, unpacked = models.packed(k)
        others = (t for t in packed.values() if t is not models.params[k])
        if any(map(inputs.has, others)):
            raise LanesDiffer("the step uses a tensor in which its state is packed")
        if packed:
            tensors = {**packed, **unpacked}
            lane = {x: inputs.of(f"{x}_{k}", t) for x, t in tensors.items()}
            lanes.append(lane)
            if models.params[k].grad is not None:
                stepped.append(lane)
            if any(t is models.params[k] for t in unpacked.values()):
                hollow.append(lane)
    if packing is not None and lanes:
        with gm.graph.inserting_before(calls[0]):
            first = gm.graph.call_function(packing.unpack, (lanes,))
        with gm.graph.inserting_before(calls[-1]):
            last = gm.graph.call_function(packing.pack, (stepped,))
            if wrapper is not None and wrapper.dtypes and hollow:
                # columns read what the step left, or a skip of it
                gm.graph.call_function(packing.restore, (hollow,))
                last = calls[-1]
        calls = [first.next, *calls[1:-1], last] if wrapper is not None else calls
    if wrapper is not None:
        _splice_around(inputs, calls, models, active, wrapper, len(shared))
    return inputs.arguments


def _splice_around(
    inputs: _Inputs,
    calls: Sequence[Node],
    models: Models,
    active: Sequence[int],
    wrapper: StepWrapper,
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
        for c in range(len(wrapper.dtypes))
    ]
    common = [inputs.argument(f"shared{k}") for k in range(shared)]
    graph = inputs.graph
    with graph.inserting_before(calls[0]):
        graph.call_function(wrapper.before, (params, grads, columns, common))
    with graph.inserting_before(calls[-1]):
        graph.call_function(wrapper.after, (params, grads, columns, common))


def order_of(
    lanes: Lanes, columns: Sequence[Tensors], wrapper: StepWrapper | None
) -> dict[tuple[int, Role], int]:
    """Return the index in a call of each tensor beside a lane.

    Raises LanesDiffer for a tensor, not a number, with another layout than the lane's
    parameter, or another dtype than `wrapper` has for it.
    """
    order: dict[tuple[int, Role], int] = {}
    kinds = () if wrapper is None else wrapper.dtypes
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
    wrapper: StepWrapper,
    extended: Extended,
    roles: Sequence[tuple[int, Role]],
    flag: int | None,
) -> Captured:
    """Return the result of `wrapper.finish` for an extended step.

    `flag`: a source or None.
    """
    kinds = [None if m == COMMON else roles[s][1][0] for s, m in extended.order]
    place = None if flag is None else extended.order.index((flag, COMMON))
    return wrapper.finish(extended.captured, kinds, place)

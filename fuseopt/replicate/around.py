"""What is done to lanes before and after their step, put into Dynamo's graph of models.

A step has its models' tensors; what stands around it may have more of them: gradients
that the step leaves alone, a tensor beside each parameter (its average, its copy), and
what is the same for all lanes (a factor, a limit). The graph gets these as arguments
behind its own, and two nodes: one before all calls, one behind them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.fx import GraphModule, Node

from ..capture import Captured
from ..capture.fx.inputs import static_tensors
from ..shadow.lanes import Lanes, Role, Unlike
from .extend import COMMON, Extended
from .models import BESIDE, Models

Tensors = list[torch.Tensor]


class Around(Protocol):
    """What stands around the step of some models. Both functions are marked OWN.

    They get the parameters, the gradients (None where there is none), and the columns,
    of each as many as there are parameters, then what is shared. In one capture of a
    graph `before` comes first. `measures`: is anything made of all elements of a
    tensor? Then lanes of other sizes are not alike.
    """

    measures: bool

    #: of each column, the dtype of what stands beside a parameter of some dtype; None:
    #: numbers, in float32, that are made of all of a parameter's elements
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
        """What is to run of all lanes: `kinds` of the tensors of a call are roles, None
        for what belongs to no lane; `flag` is the place of the flag among them.
        """


def splice(
    gm: GraphModule,
    args: Sequence[Any],
    models: Models,
    active: Sequence[int],
    around: Around,
    shared: Sequence[Any],
) -> Tensors:
    """Put what stands around a step into the graph of some models.

    Returns models' tensors that are its arguments now, behind its own ones and before
    what is shared.
    """
    graph = gm.graph
    placeholders = graph.find_nodes(op="placeholder")
    calls = [n for n in graph.nodes if n.op.startswith("call") or n.op == "output"]
    known: dict[int, Node] = {}
    for node, x in zip(placeholders, args, strict=True):
        known.setdefault(id(x), node)
    with graph.inserting_before(calls[0]):
        for name, t in static_tensors(gm).items():
            known.setdefault(id(t), graph.get_attr(name))
    given: Tensors = []
    last = placeholders[-1] if placeholders else None

    def argument(name: str) -> Node:
        nonlocal last
        first = next(iter(graph.nodes))
        place = graph.inserting_before(first)
        if last is not None:
            place = graph.inserting_after(last)
        with place:
            last = graph.placeholder(name)
        return last

    def node_of(name: str, t: torch.Tensor) -> Node:
        if id(t) not in known:
            known[id(t)] = argument(name)
            given.append(t)
        return known[id(t)]

    own = [models.params[k] for k in active]
    params = [node_of(f"param{k}", p) for k, p in zip(active, own, strict=True)]
    grads = [
        None if p.grad is None else node_of(f"grad{k}", p.grad)
        for k, p in enumerate(own)
    ]
    columns = [
        [node_of(f"beside{c}_{k}", models.beside[k][c]) for k in active]
        for c in range(len(around.dtypes))
    ]
    common = [argument(f"shared{k}") for k in range(len(shared))]
    with graph.inserting_before(calls[0]):
        graph.call_function(around.before, (params, grads, columns, common))
    with graph.inserting_before(calls[-1]):
        graph.call_function(around.after, (params, grads, columns, common))
    return given


def order_of(
    lanes: Lanes, columns: Sequence[Tensors], around: Around | None
) -> dict[tuple[int, Role], int]:
    """Where the tensors beside each lane stand in a call; Unlike unless they are like
    its parameter, where they are no numbers.
    """
    found: dict[tuple[int, Role], int] = {}
    kinds = () if around is None else around.dtypes
    for c, (own, dtypes) in enumerate(zip(columns, kinds, strict=True)):
        for i, (t, p) in enumerate(zip(own, lanes.params, strict=True)):
            found[i, (BESIDE, str(c))] = len(found)
            if dtypes is None:
                continue
            if t.shape != p.shape or t.stride() != p.stride() or not t.is_leaf:
                raise Unlike("an average lies in memory otherwise than its parameter")
    return found


def finished(
    around: Around,
    extended: Extended,
    roles: Sequence[tuple[int, Role]],
    flag: int | None,
) -> Captured:
    """An extended step with what `around` makes of it. `flag`: its source, if any."""
    kinds = [None if m == COMMON else roles[s][1][0] for s, m in extended.order]
    place = None if flag is None else extended.order.index((flag, COMMON))
    return around.finish(extended.captured, kinds, place)

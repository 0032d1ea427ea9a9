"""Decide where a graph of Dynamo's runs, and split off the part that is an update.

An update writes memory that existed before the graph. `decide` assigns a whole graph to
one place, or splits it into up to three parts that run one after another:

    before   calls that come before the first write
    update   the writes, all that they depend on, and whatever lies between
    after    calls that come after the last write

No call moves across a write, so each part reads memory in the state that eager would
read. `before` and `after` get calls that autograd records (a forward), their inputs,
and calls on whose results no write depends (a loss, a metric). A matrix product, a
convolution, attention or a higher-order op must be among these, or a compilation would
not pay. In an optimizer's step they stay in the update, because a later step may read
them. No other part reads what an update computes: an update always has eager's bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import Graph, GraphModule, Node

from ..capture.fx.inputs import attribute
from ..capture.fx.reassigned_memory import gives_memory
from ..compat import GRAD_SWITCH, HIGHER_ORDER, name_of, written

Side = Literal["before", "update", "after"]

#: Calls that make a part worth its own compilation.
COMPUTE = frozenset(
    (
        "matmul mm bmm mv addmm addmv addbmm baddbmm chain_matmul einsum tensordot "
        "linear bilinear conv1d conv2d conv3d conv_transpose1d conv_transpose2d "
        "conv_transpose3d convolution scaled_dot_product_attention "
        "multi_head_attention_forward"
    ).split()
)
#: Parts of the names of calls that draw random numbers.
RANDOM = (
    "rand dropout bernoulli multinomial normal uniform exponential cauchy geometric "
    "poisson gumbel rrelu"
).split()
#: Calls that differentiate the graph's record.
BACKWARD = frozenset({"grad", "backward"})
DETACHING = frozenset({"detach", "_get_data_attr"})


@dataclass(frozen=True)
class Part:
    """One part of a graph, as its own graph.

    Its placeholders take the values of the nodes `inputs` of the whole graph. It
    returns the values of the nodes `outputs`, as a tuple.
    """

    side: Side
    why: str
    gm: GraphModule
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]


@dataclass(frozen=True)
class Decision:
    """Place where a graph runs.

    `parts`: in order; empty if the graph stays whole. `whole`: "update", "fallback"
    (the option), "eager", or "eager step" with a warning. `why`: the reason.
    """

    whole: Literal["update", "fallback", "eager", "eager step"]
    why: str
    parts: tuple[Part, ...] = ()


# ---------------------------------------------------------------- calls


def _nodes(x: Any) -> list[Node]:
    if isinstance(x, Node):
        return [x]
    if isinstance(x, (list, tuple)):
        return [n for y in x for n in _nodes(y)]
    return []


def _written(node: Node) -> list[Node]:
    """Return the arguments that a call writes, or to which it assigns memory."""
    targets = written(node)
    if not targets and gives_memory(node):
        targets = _nodes(node.args[0] if node.args else node.kwargs.get("self"))
    return targets


def _nests(node: Node) -> bool:
    """Does a call enter a level of a functorch transform?"""
    return name_of(node.target).endswith("_increment_nesting")


def _is_detached(node: Node) -> bool:
    """Is a node a tensor's `.data`, or computed in place from it, without a record?"""
    while node.op.startswith("call"):
        if name_of(node.target) in DETACHING:
            return True
        sources = _nodes(node.args[0] if node.args else None)
        if len(sources) != 1:
            return False
        node = sources[0]
    return False


def _values(node: Node) -> list[torch.Tensor] | None:
    """Return the tensors of a node's example value; None if tracing left no value."""
    example = node.meta.get("example_value", node.meta.get("val"))
    if example is None and node.op != "output":
        return None
    results = example if isinstance(example, (list, tuple)) else (example,)
    return [t for t in results if isinstance(t, torch.Tensor)]


def _storages(node: Node) -> frozenset[int]:
    try:
        return frozenset(t.untyped_storage()._cdata for t in _values(node) or ())
    except NotImplementedError:  # sparse, or a wrapper of functorch
        return frozenset()


def _is_compute(node: Node) -> bool:
    heavy = isinstance(node.target, HIGHER_ORDER) or node.op == "call_module"
    return heavy or name_of(node.target).partition(".")[0] in COMPUTE


def _is_random(node: Node) -> bool:
    return any(word in name_of(node.target) for word in RANDOM)


class _Facts:
    """Facts about a graph's calls: grad mode, autograd records, writes."""

    def __init__(self, gm: GraphModule, args: Sequence[Any]) -> None:
        self._storages: dict[Node, frozenset[int]] = {}
        self.nodes: list[Node] = list(gm.graph.nodes)
        self.place = {n: i for i, n in enumerate(self.nodes)}
        # a parameter that is no leaf, as in a differentiable step, is a buffer here
        own_tensors = [*gm.parameters(), *gm.buffers()]
        tensors = [*own_tensors, *(a for a in args if isinstance(a, torch.Tensor))]
        grads = any(t.requires_grad for t in tensors)
        inputs: set[int] = set()
        self.targets: dict[Node, list[Node]] = {}  # the arguments that a call writes
        self.tensors = any(t.dim() for t in tensors)
        self.parameters: set[int] = set()  # storages of inputs that require gradients
        for n in self.nodes:
            if n.op in ("placeholder", "get_attr"):
                inputs |= self.storages(n)
                if any(t.requires_grad for t in _values(n) or ()):
                    self.parameters |= self.storages(n)
        self.recording: dict[Node, bool] = {}
        self.recorded: set[Node] = set()
        self.calls: list[Node] = []
        # calls that write memory that existed before the graph
        self.writes: list[Node] = []
        self.local: set[int] = set()  # storages made and changed by the graph itself
        self.entry = mode = torch.is_grad_enabled()
        for n in self.nodes:
            if n.target is GRAD_SWITCH:
                mode = bool(n.args[0])
                continue
            self.recording[n] = mode
            if not n.op.startswith("call"):
                continue
            self.calls.append(n)
            if grads and mode and self._leaves_record(n):
                self.recorded.add(n)
            self.targets[n] = _written(n)
            for t in self.targets[n]:
                storages = self.storages(t)
                if not storages or storages & inputs:
                    self.writes.append(n)
                    break
                self.local |= storages
        self.leaves = mode
        self._forget_unused_records()

    def storages(self, node: Node) -> frozenset[int]:
        """Return the storages of a node's results; empty if it has none, or no example
        value.
        """
        storages = self._storages.get(node)
        if storages is None:
            storages = self._storages[node] = _storages(node)
        return storages

    def _forget_unused_records(self) -> None:
        """Drop the records through which no backward can go."""
        if not self.recorded:
            return
        used = [
            n
            for n in self.recorded
            if (n in self.writes and not all(map(_is_detached, self.targets[n])))
            or name_of(n.target) in BACKWARD
        ]
        used += [n for n in _nodes(list(self.nodes[-1].args)) if n in self.recorded]
        self.recorded &= self.reach(used)

    @staticmethod
    def _leaves_record(node: Node) -> bool:
        """Does a call leave a record when it runs while autograd records?

        A number that a step returns as a tensor, or arithmetic on `.data`, does not.
        """
        values = _values(node)
        return values is None or any(t.requires_grad for t in values)

    def reach(self, seeds: Iterable[Node]) -> set[Node]:
        """Return the seeds and all calls that they depend on, through memory too."""
        reached = set(seeds)
        touched: set[int] = set()
        for n in reversed(self.calls):
            written_storages = {s for t in self.targets[n] for s in self.storages(t)}
            changed = written_storages & self.local
            if n in reached or changed & touched:
                reached.add(n)
                reached.update(x for x in n.all_input_nodes if x.op.startswith("call"))
                for x in (n, *n.all_input_nodes):
                    touched |= self.storages(x)
        return reached


# ---------------------------------------------------------------- the rule


def _sides(facts: _Facts, in_step: bool) -> dict[Node, Side]:
    """Return the side of each call, unchecked; {} if the update has all calls."""
    place, writes = facts.place, facts.writes
    first, last = place[writes[0]], place[writes[-1]]
    early = [n for n in facts.calls if place[n] < first]
    late = [n for n in facts.calls if place[n] > last]

    def pays(calls: Iterable[Node]) -> bool:
        return any(
            n in facts.recorded or (_is_compute(n) and not in_step) for n in calls
        )

    before: set[Node] = set()
    if pays(early):
        update = facts.reach(writes)
        before = facts.reach([n for n in early if n in facts.recorded]) & set(early)
        for n in early:
            inputs = [x for x in n.all_input_nodes if x.op.startswith("call")]
            free = n not in update and not in_step
            if free and all(x in before for x in inputs):
                before.add(n)
        if not pays(before):
            before = set()
    after = set(late) if pays(late) else set()
    if not before and not after:
        return {}
    return {
        n: "before" if n in before else "after" if n in after else "update"
        for n in facts.calls
    }


def _obstacle(facts: _Facts, sides: dict[Node, Side]) -> str:
    """Return the reason why the parts would differ from the whole graph, or ""."""
    if facts.entry != facts.leaves:
        return "it leaves the grad mode changed"
    if any(sides[n] == "update" for n in facts.recorded):
        return "autograd records calls between its writes"
    if len({s for n, s in sides.items() if _is_random(n)}) > 1:
        return "its parts draw random numbers in turn"
    holders: dict[int, Side] = {}
    for n, side in sides.items():
        for x in (n, *n.all_input_nodes):
            for s in facts.storages(x) & facts.local:
                if holders.setdefault(s, side) != side:
                    return "one part changes what another one made"
    depth = 0
    scope: Side = "update"
    for n, side in sides.items():
        name = name_of(n.target)
        if depth and side != scope:
            return "a context (autocast) covers more than one part"
        if "_enter_" in name:
            depth, scope = depth + 1, side
        elif "_exit_" in name:
            depth -= 1
    return ""


def decide(gm: GraphModule, args: Sequence[Any], in_step: bool = False) -> Decision:
    """Decide where a graph runs.

    `args`: the arguments of the call that is being compiled. `in_step`: the graph is a
    piece of an optimizer's step, whose update depends on it, and whose state it may
    make.
    """
    facts = _Facts(gm, args)
    if not facts.writes:
        heavy = any(map(_is_compute, facts.calls))
        if facts.local and not facts.recorded and not heavy:
            return Decision("update", "")  # a step that makes its state
        if in_step and not facts.recorded and facts.tensors:
            return Decision("update", "")
        recorded = "autograd records this graph" if facts.recorded else ""
        what = "the graph changes no tensor that existed before it"
        why = f"{recorded or what}, so it is no optimizer step"
        if not facts.recorded and not facts.tensors:
            # numbers of a schedule need eager's bits, and compilation would gain
            # nothing
            return Decision("eager", f"{why}, and computes only numbers")
        return Decision("fallback", why)
    if any(map(_nests, facts.calls)):
        # such calls enter and leave levels of transforms: no part can run alone
        why = "the step is written with a transform (torch.func.grad, torch.vmap)"
        return Decision("eager step", why)
    if any(n in facts.recorded for n in facts.writes):
        why = "autograd records the writes of this graph, so eager runs it"
        return Decision("eager", why)
    kind: Literal["eager", "fallback"] = "eager"
    if facts.recorded:
        silent = [n for n in facts.writes if not facts.recording[n]]
        targets = (x for n in facts.writes for x in facts.targets[n])
        written_storages = {s for x in targets for s in facts.storages(x)}
        kind = "eager" if written_storages & facts.parameters else "fallback"
        if not silent and kind == "fallback":
            # a forward that counts its batches
            why = "autograd records this graph, so it is no optimizer step"
            return Decision("fallback", why)
    if any(map(gives_memory, facts.calls)):
        # example values have the memory at the end of the graph, not at the call
        if facts.recorded:
            why = "autograd records a part of this graph, which gives tensors memory"
            return Decision("eager", why)
        return Decision("update", "")
    sides = _sides(facts, in_step)
    if set(sides.values()) <= {"update"}:
        return Decision("update", "")
    obstacle = _obstacle(facts, sides)
    if not obstacle:
        return Decision("update", "", _parts(gm, facts, sides))
    if not facts.recorded:
        return Decision("update", f"not split, since {obstacle}")
    why = (
        f"autograd records a part of this graph, and it is not split, since {obstacle}"
    )
    return Decision(kind, why)


# ---------------------------------------------------------------- cutting


WHY: dict[str, str] = {
    "recorded": "autograd records it",
    "results": "nothing that the step writes depends on it",
    "update": "it changes tensors in place",
}


def _parts(gm: GraphModule, facts: _Facts, sides: dict[Node, Side]) -> tuple[Part, ...]:
    parts = []
    result = _nodes(list(facts.nodes[-1].args))
    for side in ("before", "update", "after"):
        calls = [n for n in facts.calls if sides[n] == side]
        if not calls:
            continue
        inside = set(calls)
        outputs = [
            n
            for n in calls
            if n in result or any(u not in inside for u in n.users if u.op != "output")
        ]
        inputs = [
            x
            for x in facts.nodes
            if x not in inside
            and not _is_constant(gm, x)
            and any(u in inside for u in x.users)
        ]
        recorded = any(n in facts.recorded for n in calls)
        why = WHY[
            "update" if side == "update" else "recorded" if recorded else "results"
        ]
        sub = _cut(gm, facts, calls, inputs, outputs)
        parts.append(Part(side, why, sub, tuple(inputs), tuple(outputs)))
    return tuple(parts)


def _is_constant(gm: GraphModule, node: Node) -> bool:
    """Is a node a module or graph? Tensors become inputs of parts instead."""
    return node.op == "get_attr" and not isinstance(
        attribute(gm, str(node.target)), torch.Tensor
    )


def _cut(
    gm: GraphModule,
    facts: _Facts,
    calls: list[Node],
    inputs: list[Node],
    outputs: list[Node],
) -> GraphModule:
    """Make a graph of some calls, each in its original grad mode."""
    graph = Graph()
    copies = {x: graph.placeholder(x.name) for x in inputs}
    for x in inputs:
        copies[x].meta = dict(x.meta)
    mode = facts.entry

    def take(n: Node) -> Node:
        if n not in copies:
            copies[n] = graph.node_copy(n, take)
        return copies[n]

    for n in calls:
        if facts.recording[n] != mode:
            mode = facts.recording[n]
            graph.call_function(GRAD_SWITCH, (mode,))
        take(n)
    if mode != facts.entry:
        graph.call_function(GRAD_SWITCH, (facts.entry,))
    graph.output(tuple(copies[n] for n in outputs))
    return GraphModule(gm, graph)


def join(
    gm: GraphModule, parts: Sequence[Part], runs: Sequence[Callable[..., Any]]
) -> Callable[..., Any]:
    """Return a function of the whole graph's arguments that runs the parts in turn."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    attributes = [
        n for n in gm.graph.nodes if n.op == "get_attr" and not _is_constant(gm, n)
    ]
    result = next(n for n in gm.graph.nodes if n.op == "output").args[0]

    def run(*args: Any) -> Any:
        values = dict(zip(placeholders, args, strict=True))
        for n in attributes:
            values[n] = attribute(gm, str(n.target))
        for part, call in zip(parts, runs, strict=True):
            outputs = call(*[values[x] for x in part.inputs])
            values.update(zip(part.outputs, outputs, strict=True))
        return torch.fx.node.map_arg(result, values.__getitem__)

    return run

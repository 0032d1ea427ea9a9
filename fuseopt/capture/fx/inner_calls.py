"""Record the calls that reach the inner tensors of wrapper subclasses.

The function runs on stand-ins: wrappers whose inner tensors have no contents. A
dispatch mode below the wrapper class records the ATen calls and collectives on the
inner tensors. So the class itself determines these calls and their order. Nothing is
computed or sent meanwhile.

Numbers that change between calls have unique values here, by which the mode recognizes
them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from ...compat import (
    DISPATCH_MODE,
    OVERLOAD,
    is_collective,
    is_wait,
    is_wrapper,
    waiting,
)
from ...errors import EagerOnly
from ..aten.externs import tensors_in


@dataclass(frozen=True)
class Ref:
    """A tensor, by its order of creation."""

    index: int


@dataclass(frozen=True)
class Number:
    """A number that changes between calls, by its index."""

    index: int


class InnerCall(NamedTuple):
    """A recorded call, or the computation of a number.

    `func`: an ATen op, a function that makes a tensor of numbers, or a function or
    method name that computes the number at index `number`. `made`: the results;
    `several`: they are in a list.
    """

    func: Any
    args: Any
    kwargs: Any
    made: tuple[int, ...] = ()
    several: bool = False
    number: int | None = None


class InnerCalls(DISPATCH_MODE):  # type: ignore[misc]
    """Records the calls on some tensors, and on the tensors that such calls return.

    A wrapper may make auxiliary computations on other tensors. `numbers`: those that
    change between calls, by index.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], numbers: Sequence[float] = ()
    ) -> None:
        super().__init__()
        self.alive: list[torch.Tensor] = []
        self.index: dict[int, int] = {}
        self.numbers: dict[Any, int] = {}
        self.values: list[Any] = []
        self.calls: list[InnerCall] = []
        for t in tensors:
            self._add(t)
        for x in numbers:
            self.number(x)

    def number(self, value: Any) -> int:
        """Register a number that changes between calls; return its index."""
        key = type(value), value
        if key in self.numbers:
            raise EagerOnly("two numbers of a step are indistinguishable")
        self.numbers[key] = len(self.values)
        self.values.append(value)
        return self.numbers[key]

    def _add(self, t: torch.Tensor) -> int:
        self.index[id(t)] = len(self.alive)
        self.alive.append(t)
        return self.index[id(t)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(is_wrapper, types)):
            return NotImplemented
        given = tensors_in((args, [*kwargs.values()]))
        ours = [id(t) in self.index for t in given]
        noted = None
        if any(ours):
            if not all(ours):
                raise EagerOnly(
                    f"{func} takes a tensor that is not an input of the step"
                )
            noted = self.noted(args), self.noted(kwargs)
        out = func(*args, **kwargs)
        if noted is None:
            return out
        results = tensors_in(out)
        if is_wait(func):
            # `graph` adds a wait right after each collective
            self.index[id(results[0])] = self.index[id(given[0])]
            self.alive.append(results[0])
        elif func._schema.is_mutable or results:
            made = [self._add(t) for t in results if id(t) not in self.index]
            if made and len(made) < len(results):
                raise EagerOnly(f"{func} returns an input beside other results")
            several = isinstance(out, (list, tuple))
            self.calls.append(InnerCall(func, *noted, tuple(made), several))
        return out

    def make(self, func: Any, args: Any, kwargs: Any, made: torch.Tensor) -> None:
        """Record a tensor that is made of numbers."""
        self.calls.append(InnerCall(func, args, kwargs, (self._add(made),)))

    def noted(self, x: Any) -> Any:
        """Replace tensors and registered numbers in a value by their indices."""
        if isinstance(x, torch.Tensor):
            return Ref(self.index[id(x)])
        if isinstance(x, (int, float)) and (type(x), x) in self.numbers:
            return Number(self.numbers[type(x), x])
        if isinstance(x, (list, tuple)):
            return type(x)(self.noted(y) for y in x)
        if isinstance(x, dict):
            return {k: self.noted(v) for k, v in x.items()}
        return x

    def graph(self, tensors: int, numbers: int) -> tuple[Graph, dict[int, Node]]:
        """Return a graph of these calls, without an output, and the nodes of tensors.

        Its placeholders are that many tensors, then that many numbers: the first of
        each.
        """
        graph = Graph()
        nodes: dict[int, Node] = {}
        scalars: dict[int, Node] = {}

        def node_of(index: int, node: Node) -> Node:
            nodes[index] = node
            node.meta["example_value"] = self.alive[index]
            return node

        def mapped(x: Any) -> Any:
            if isinstance(x, Ref):
                return nodes[x.index]
            if isinstance(x, Number):
                return scalars[x.index]
            if isinstance(x, (list, tuple)):
                return type(x)(mapped(y) for y in x)
            if isinstance(x, dict):
                return {k: mapped(v) for k, v in x.items()}
            return x

        for i in range(tensors):
            node_of(i, graph.placeholder(f"part{i}"))
        for i in range(numbers):
            scalars[i] = graph.placeholder(f"number{i}")
        for call in self.calls:
            args, kwargs = mapped(call.args), mapped(call.kwargs)
            if isinstance(call.func, str):
                node = graph.call_method(call.func, args, kwargs)
            else:
                node = graph.call_function(call.func, args, kwargs)
            if call.number is not None:
                scalars[call.number] = node
            if not call.made:
                continue
            examples = [self.alive[i] for i in call.made]
            node.meta["example_value"] = examples if call.several else examples[0]
            if isinstance(call.func, OVERLOAD) and is_collective(call.func):
                node = graph.call_function(waiting(), (node,))
            if not call.several:
                node_of(call.made[0], node)
                continue
            for k, index in enumerate(call.made):
                node_of(index, graph.call_function(operator.getitem, (node, k)))
        self.scalars = scalars
        return graph, nodes

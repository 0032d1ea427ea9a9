"""Run Dynamo's graph in eager: what a step should have given.

`as_eager(gm)` runs on the tensors themselves, where no kernel can be made.
`replay(gm, args)` returns the graph's own tensors and tensor arguments as eager leaves
them, and its results, without touching the originals. Where the trace differs from what
eager computes (polyfills.py), it does what eager does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from .inputs import static_tensors
from .patterns import find_lerps, find_products


def _clone(t: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, also where elements overlap or leave gaps."""
    if t.layout != torch.strided:
        return t.clone()
    copy = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    return copy.copy_(t)


class _Clones:
    """Copies of tensors; those that share storage keep sharing it."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        groups: dict[int, list[torch.Tensor]] = {}
        for t in tensors:
            groups.setdefault(t.untyped_storage()._cdata, []).append(t)
        self._copies: dict[int, torch.Tensor] = {}
        for members in groups.values():
            if len(members) == 1:
                self._copies[id(members[0])] = _clone(members[0].detach())
                continue
            storage = members[0].untyped_storage().clone()  # type: ignore[no-untyped-call]
            for t in members:
                twin = torch.empty(0, dtype=t.dtype, device=t.device)
                twin.set_(storage, t.storage_offset(), t.shape, t.stride())
                self._copies[id(t)] = twin

    def of(self, t: torch.Tensor) -> torch.Tensor:
        return self._copies[id(t)]


class _Eager(Interpreter):
    """Runs a graph; where the trace writes something else than eager, as eager does."""

    def __init__(self, gm: GraphModule, clones: dict[str, torch.Tensor]) -> None:
        super().__init__(gm)
        self.clones = clones
        self.lerps, self.dropped = find_lerps(gm.graph.nodes)
        self.products, unfused = find_products(gm.graph.nodes)
        self.dropped |= unfused
        for node in self.dropped:
            # what it would have read last is read by what runs in its place
            self.user_to_last_uses.pop(node, None)

    def _values(self, nodes: Any, reader: Node) -> Any:
        return self.map_nodes_to_values(nodes, reader)

    def run_node(self, n: Node) -> Any:
        if n in self.dropped:
            return None
        if n.op == "get_attr" and n.target in self.clones:
            return self.clones[str(n.target)]
        if n in self.lerps:
            lerp = self.lerps[n]
            start, end, weight = self._values((lerp.start, lerp.end, lerp.weight), n)
            torch._foreach_lerp_(start, end, weight)
            return None
        if n in self.products:
            product = self.products[n]
            target, factors, scale = self._values(
                (product.target, product.factors, product.scale), n
            )
            if isinstance(scale, torch.Tensor):
                scale = scale.item()
            return getattr(target, product.name)(*factors, **{product.keyword: scale})
        return super().run_node(n)


def as_eager(gm: GraphModule) -> Callable[..., Any]:
    """The graph itself, or what runs it with eager's bits where it has others."""
    own = _Eager(gm, {})
    if not own.lerps and not own.products:
        return gm.forward
    return lambda *args: _Eager(gm, {}).run(*args)


def replay(
    gm: GraphModule, args: Sequence[Any]
) -> tuple[dict[str, torch.Tensor], list[Any], Any]:
    """(statics by name, arguments, results) after the graph ran in eager on clones."""
    statics = static_tensors(gm)
    tensors = [*statics.values(), *(a for a in args if isinstance(a, torch.Tensor))]
    clones = _Clones(tensors)
    own = {name: clones.of(t) for name, t in statics.items()}
    given = [clones.of(a) if isinstance(a, torch.Tensor) else a for a in args]
    # the step that is to be compared draws the same random numbers afterwards
    with torch.no_grad(), torch.random.fork_rng():
        result = _Eager(gm, own).run(*given)
    return own, given, result

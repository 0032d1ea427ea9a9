"""Run Dynamo's graph in eager, in place of a step or to compare with it.

`as_eager(gm)` runs on the tensors themselves, if no kernel can be made. `replay(gm,
args)` runs on clones, without touching the originals. It returns the graph's own
tensors, the tensor arguments and the results. Both run the restored graph, see
`patterns`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter

from .inputs import static_tensors
from .lists import by_group, grouped, is_foreach
from .patterns import refresh, restore


def _clone(t: torch.Tensor) -> torch.Tensor:
    """Copy a tensor with the same strides, even if elements overlap or leave gaps."""
    if t.layout != torch.strided:
        return t.clone()
    copy = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    return copy.copy_(t)


class _Clones:
    """Copies of tensors; tensors that share storage have copies that share it."""

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


class _OnClones(Interpreter):
    """Runs a graph on copies of its parameters and buffers."""

    def __init__(self, gm: GraphModule, clones: dict[str, torch.Tensor]) -> None:
        super().__init__(gm)
        self.clones = clones

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in self.clones:
            return self.clones[target]
        return super().get_attr(target, args, kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if is_foreach(target):
            return by_group(target, args, kwargs)
        return super().call_function(target, args, kwargs)


def as_eager(gm: GraphModule) -> Callable[..., Any]:
    """Return a function that runs a graph with eager's bits."""
    restore(gm)
    refresh(gm)
    return grouped(gm).forward


def replay(
    gm: GraphModule, args: Sequence[Any]
) -> tuple[dict[str, torch.Tensor], list[Any], Any]:
    """Run the graph on clones; return statics by name, arguments, and results."""
    restore(gm)
    statics = static_tensors(gm)
    tensors = [*statics.values(), *(a for a in args if isinstance(a, torch.Tensor))]
    clones = _Clones(tensors)
    static_clones = {name: clones.of(t) for name, t in statics.items()}
    arg_clones = [clones.of(a) if isinstance(a, torch.Tensor) else a for a in args]
    # the compared step must draw the same random numbers afterwards
    with torch.no_grad(), torch.random.fork_rng():
        result = _OnClones(gm, static_clones).run(*arg_clones)
    return static_clones, arg_clones, result

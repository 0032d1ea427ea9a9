"""Build a step's return value, and assign `tensor.data`, from the memory of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..capture.results import Alias, Leaf, ReassignedTensor, Returned, rebuild
from ..capture.scalars.device import NumberRef
from ..capture.scalars.host import Sym
from .binding import Binding
from .memory import Memory


def returned(
    bound: Binding,
    tensors: Sequence[torch.Tensor],
    memory: Memory | None,
    itself: Callable[[int], torch.Tensor],
) -> Any:
    """Return the result of a call. `itself(i)` is the caller's tensor i of the call;
    `memory` is that of the call. `tensors` may be empty where nothing is returned.
    """
    captured, numbers = bound.plan.captured, bound.numbers
    if captured.result == ():
        return ()
    buffers = captured.graph.buffers

    def value(x: Leaf) -> Any:
        if isinstance(x, Returned):
            buffer = buffers[x.buffer]
            if buffer.kind in ("static", "arg"):
                t = tensors[buffer.source]
            else:
                assert memory is not None
                t = memory.tensor(x.buffer)
                # in torch, views that are taken under no_grad require gradients where
                # their base does. torch refuses to trace them once that changed
                if buffer.kind == "view" or x.again:
                    t = t.detach()
            return torch.view_as_complex(t) if x.complex else t
        if isinstance(x, Alias):
            return tensors[buffers[x.buffer].source].detach()
        if isinstance(x, ReassignedTensor):
            return itself(x.place)
        if isinstance(x, Sym):
            assert numbers is not None
            return numbers[x.index]
        if isinstance(x, NumberRef):
            assert memory is not None
            return memory.number(x)
        return x.value

    return rebuild(captured.result, value)


def give(
    bound: Binding,
    tensors: Sequence[torch.Tensor],
    memory: Memory | None,
    itself: Callable[[int], torch.Tensor],
) -> None:
    """Do the step's assignments to `tensor.data`, after all are computed."""
    captured = bound.plan.captured
    buffers = captured.graph.buffers
    sources = []
    for x in captured.given:
        buffer = buffers[x.buffer]
        if buffer.kind in ("static", "arg"):
            t = tensors[buffer.source].detach()
        else:
            assert memory is not None
            t = memory.tensor(x.buffer)
        sources.append(torch.view_as_complex(t) if x.complex else t)
    for x, t in zip(captured.given, sources, strict=True):
        itself(x.place).data = t

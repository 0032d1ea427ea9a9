"""Refresh the numbers of a step that the user captured: `fuseopt.refresh`."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from .. import compat
from ..errors import LaunchError, UnsupportedInput
from .compile import compiler_of
from .quick import TRACES


def refresh(optimizer: Optimizer, *, anew: bool = False) -> None:
    """Keep the rates, counters and other numbers of a captured step live.

    Call it once before `torch.cuda.graph`, and then before each replay, on the stream
    of the replay. The graph then reads learning rates, and all that the step computes
    from numbers, as of that call. Counters in the CPU's memory count one step. The call
    launches nothing and waits for nothing. It takes the CPU's part of a step, and a
    small copy if a number has changed. Gradients must stay where the capture found
    them. A replay without a refresh does the step again with the last numbers.

        optimizer = fuseopt.compile(torch.optim.AdamW(model.parameters()))
        train(batch)                    # a few steps, which make the state
        fuseopt.refresh(optimizer)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            train(batch)                # forward, backward, optimizer.step()
        for ...:
            schedule.step()
            fuseopt.refresh(optimizer)
            graph.replay()

    `optimizer`: one of `fuseopt.compile`, with its parameters on a device. `anew`: True
    if no former capture will replay, and a new capture follows.

    Raises UnsupportedInput for another optimizer, and for one of packed state or of
    DTensors. Raises LaunchError, with nothing written, in three cases. The step has
    more than kernels, Python writes numbers of its state, or a tensor is not the
    captured one.
    """
    isolated = compiler_of(getattr(optimizer, "step", None))
    if isolated is None:
        raise UnsupportedInput(
            f"fuseopt.refresh takes an optimizer of fuseopt.compile, and got a "
            f"{type(optimizer).__name__} whose step is not compiled. Call "
            "fuseopt.compile(optimizer) first"
        )
    if isolated.packed_step is not None or isolated.shards.wants(optimizer, anew=True):
        raise UnsupportedInput(
            "fuseopt.refresh takes no optimizer of packed state or of DTensors. "
            "Capture its step without fuseopt.refresh"
        )
    refusal = "the stance of torch.compile lets no compiled code run"
    with isolated.lock, torch.no_grad():
        isolated.follow(optimizer)
        isolated.race, leader = None, isolated.leader
        if anew and leader.pending.live is not None:
            leader.pending.live.forget()
        leader.want()
        if compat.stance() in TRACES and leader.wants(optimizer):
            with leader.pending.without_launches():
                if leader.step(optimizer, isolated.lead):
                    return
        refusal = leader.refusal or refusal
    if refusal:
        raise LaunchError(
            f"fuseopt.refresh cannot follow {type(optimizer).__name__}.step: "
            f"{refusal}. Capture it without fuseopt.refresh"
        )

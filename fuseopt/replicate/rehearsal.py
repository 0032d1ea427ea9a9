"""Proof before a step of many lanes runs: all lanes do as the ones that lead them.

The step is run dry on all lanes and on the leading ones alone, and once more with other
numbers where it is given some; `compare` says of what must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..shadow.lanes import Lanes, Unlike
from ..uniformity import Proof
from .dry_run import Record, rehearse


def rehearse_all(
    optimizer: Callable[[], Any],
    function: Callable[..., Any],
    lanes: Lanes,
    proof: Proof,
    numbers: Iterable[Any],
    parts: bool = False,
) -> None:
    """Raise Unlike unless all lanes of a step do as the one that leads them.

    `optimizer()`: a shadow of all lanes, which a run may change. `numbers`: those that
    the call was given. `parts`: lanes are parts of tensors.
    """
    every = range(len(lanes.params))
    moving = {x.item() if isinstance(x, torch.Tensor) else x for x in numbers}

    def moved(x: Any) -> Any:
        """A number a little beside that of this call, if it may be another."""
        if isinstance(x, torch.Tensor) or x in moving:
            if isinstance(x, int):
                return x + 1
            value = float(x)
            return value * (1 + 2**-10) if value else 2**-10
        return x

    for perturb in (None, moved):
        runs = [
            rehearse(optimizer(), function, lanes, members, perturb)
            for members in (every, lanes.leads)
        ]
        compare(lanes, *runs)
        if parts and runs[0].beyond:
            raise Unlike(beyond(runs[0].beyond))
        strange = {code for code, _, _ in runs[0].paths} - proof.codes
        if strange:
            raise Unlike(f"it runs {strange.pop().co_name}, which was not foreseen")
        # torch's own code chooses by what it reads within the graph alone
        if not moving and not (runs[0].reads and runs[0].paths):
            break


def beyond(op: str) -> str:
    """Why a step cannot be done part by part."""
    return f"{op} needs whole tensors, of which a process has shards"


def compare(lanes: Lanes, full: Record, cut: Record) -> None:
    """Raise Unlike unless led lanes do as their lead, and that as it does alone."""
    if full.shared != cut.shared or full.rest != cut.rest:
        raise Unlike("what the step does to all lanes depends on how many there are")
    if not full.paths <= cut.paths:
        raise Unlike("the step takes ways for some lanes that it takes for no lead")
    if not set(cut.lanes) <= set(lanes.leads):
        raise Unlike("the step reaches parameters that are not in its groups")
    for kind in lanes.kinds:
        lead = kind.lead
        calls, state = full.lanes.get(lead, []), full.states[lead]
        if calls != cut.lanes.get(lead, []) or state != cut.states[lead]:
            raise Unlike("what the step does to a lane depends on the others")
        for i in kind.others:
            if full.lanes.get(i, []) != calls or full.states[i] != state:
                raise Unlike(
                    f"lanes {lead} and {i} look alike, and the step treats them "
                    "in different ways"
                )

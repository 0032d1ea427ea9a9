"""Proof before a step of many lanes runs: all lanes do as the ones that lead them.

The step is run dry on all lanes and on the leading ones alone, and once more with other
numbers where it is given some; `compare` says of what must agree.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
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
) -> None:
    """Raise Unlike unless all lanes of a step do as the one that leads them.

    `optimizer()`: a shadow of all lanes, which a run may change. `numbers`: those that
    the call was given.
    """
    every = range(len(lanes.params))
    moving = {x.item() if isinstance(x, torch.Tensor) else x for x in numbers}

    def run(members: Sequence[int], others: Collection[Any] | None) -> Record:
        perturb: Any = None if others is None else functools.partial(_moved, others)
        made: Record = rehearse(optimizer(), function, lanes, members, perturb)
        return made

    alone = run(lanes.leads, None)

    def beside(others: Collection[Any]) -> Record | None:
        """What the leading lanes do with other numbers in the place of these; None
        where they go other ways.

        Where a step branches on a number, it is traced anew before it goes another way.
        """
        try:
            made = run(lanes.leads, others)
        except Exception:
            return None
        return made if made.paths == alone.paths else None

    kept: Collection[Any] | None = None
    cut = alone
    while True:
        full = run(every, kept)
        compare(lanes, full, cut)
        strange = {code for code, _, _ in full.paths} - proof.codes
        if strange:
            raise Unlike(f"it runs {strange.pop().co_name}, which was not foreseen")
        # torch's own code chooses by what it reads within the graph alone
        if kept is not None or (not moving and not (full.reads and full.paths)):
            return
        kept, moved = moving, beside(moving)
        if moved is None:
            kept = {x for x in moving if beside({x}) is not None}
            moved = run(lanes.leads, kept)
        cut = moved


def _moved(moving: Collection[Any], x: Any) -> Any:
    """A number a little beside that of this call, if it may be another."""
    if isinstance(x, torch.Tensor) or x in moving:
        if isinstance(x, int):
            return x + 1
        value = float(x)
        return value * (1 + 2**-10) if value else 2**-10
    return x


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

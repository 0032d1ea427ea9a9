"""Check by rehearsals that a step treats all lanes as it treats their models.

`uniformity` proves that the code of a step treats lanes alike. The path through the
code decides which tensors meet in a call. Rehearsals check that: on `SAMPLE` lanes of
each kind, and on the models alone. They run again with other values of the step's
numbers, so that no agreement is due to a special value. `compare` lists what must
agree.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..inputs.keys import LanesDiffer
from ..inputs.lanes import Lanes
from ..uniformity import Proof
from .dry_run import Record, rehearse

#: The number of rehearsed lanes of each kind: the first, the last, and lanes between at
#: equal distances. A step that mixes neighbouring lanes does so among three too.
SAMPLE = 3


def rehearse_all(
    optimizer: Callable[[], Any],
    function: Callable[..., Any],
    lanes: Lanes,
    models: Lanes,
    at: Mapping[int, int],
    proof: Proof,
    numbers: Iterable[Any],
    parts: bool = False,
) -> None:
    """Raise LanesDiffer unless a step treats all lanes as the models of their kinds.

    `optimizer()`: returns a shadow of the optimizer, which a run may change. `models`:
    the models as lanes; `at`: the lane of each model, by its number. `numbers`: the
    numbers among the call's arguments. `parts`: lanes are parts of tensors.
    """
    moving = {x.item() if isinstance(x, torch.Tensor) else x for x in numbers}

    every, some = range(len(models.params)), sample(lanes)

    def run(
        of: Lanes, members: Sequence[int], others: Collection[Any] | None
    ) -> Record:
        perturb: Any = None if others is None else functools.partial(_moved, others)
        record: Record = rehearse(optimizer(), function, of, members, perturb)
        return record

    alone = run(models, every, None)

    def beside(others: Collection[Any]) -> Record | None:
        """Return the record of the models with other values of these numbers.

        Returns None if the step takes other branches. Dynamo retraces a compiled step
        before it takes another branch on a number.
        """
        try:
            record = run(models, every, others)
        except Exception:
            return None
        return record if record.paths == alone.paths else None

    perturbed: Collection[Any] | None = None
    cut = alone
    while True:
        full = run(lanes, some, perturbed)
        compare(lanes, at, full, cut)
        if parts and full.beyond:
            raise LanesDiffer(beyond(full.beyond))
        strange = {code for code, _, _ in full.paths} - proof.codes
        if strange:
            raise LanesDiffer(
                f"it runs {strange.pop().co_name}, which the analysis did not reach"
            )
        # torch's code branches on numbers that it reads only within the graph
        if perturbed is not None or (not moving and not (full.reads and full.paths)):
            return
        perturbed, moved = moving, beside(moving)
        if moved is None:
            perturbed = {x for x in moving if beside({x}) is not None}
            moved = run(models, every, perturbed)
        cut = moved


def sample(lanes: Lanes) -> list[int]:
    """Return some lanes of each kind, in the order of the groups."""
    members: set[int] = set()
    for kind in lanes.kinds:
        last = len(kind.lanes) - 1
        members |= {kind.lanes[k * last // (SAMPLE - 1)] for k in range(SAMPLE)}
    return sorted(members)


def order_of_kinds(lanes: Lanes) -> tuple[int, ...]:
    """Return the models of the kinds, in the order of the kinds' first lanes."""
    kinds = sorted(lanes.kinds, key=lambda kind: kind.lanes[0])
    return tuple(kind.model for kind in kinds)


def in_order(models: Iterable[int], at: Mapping[int, int]) -> bool:
    """Are the models with a lane in `at` in the order of these lanes?"""
    places = [at[k] for k in models if k in at]
    return places == sorted(places)


def beyond(op: str) -> str:
    """Return the reason why a step cannot run on parts of tensors."""
    return f"{op} needs whole tensors, of which a process has shards"


def _moved(moving: Collection[Any], x: Any) -> Any:
    """Return a number close to `x` if it is a tensor or a moving number, else `x`."""
    if isinstance(x, torch.Tensor) or x in moving:
        if isinstance(x, int):
            return x + 1
        value = float(x)
        return value * (1 + 2**-10) if value else 2**-10
    return x


def rehearse_fewer(
    optimizer: Callable[[], Any],
    function: Callable[..., Any],
    models: Lanes,
    present: Sequence[int],
) -> None:
    """Raise LanesDiffer unless a subset of models gives the same step as all models.

    The two runs must treat the `present` models, and all that belongs to no lane,
    alike.
    """
    every = range(len(models.params))
    full, cut = (
        rehearse(optimizer(), function, models, members, None)
        for members in (every, present)
    )
    _same_besides(cut, full)
    for i in present:
        if full.lanes.get(i) != cut.lanes.get(i) or full.states[i] != cut.states[i]:
            raise LanesDiffer("the effect of the step on a lane depends on other lanes")


def _same_besides(some: Record, more: Record) -> None:
    if some.shared != more.shared or some.rest != more.rest:
        raise LanesDiffer("the effect of the step on all lanes depends on their number")
    if not some.paths <= more.paths:
        raise LanesDiffer("some lanes take branches that no model takes")


def compare(lanes: Lanes, at: Mapping[int, int], full: Record, models: Record) -> None:
    """Raise LanesDiffer unless the rehearsed lanes have the records of their models."""
    _same_besides(full, models)
    for kind in lanes.kinds:
        calls = models.lanes.get(at[kind.model], [])
        state = models.states[at[kind.model]]
        for i in kind.lanes:
            if i not in full.states:
                continue
            if full.lanes.get(i, []) != calls or full.states[i] != state:
                raise LanesDiffer(
                    f"lane {i} belongs to a kind, but the step treats it differently"
                )

"""Lanes that are as they were, but for which of them have a gradient.

Nothing but the gradients that came is looked at closely: that the rest has the metadata
that it had, the guard of a plan compares.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from ..compiler.diagnostics import odd_gradient
from .keys import free_shape, layout_of
from .lanes import Kind, Lanes


def with_these_gradients(
    lanes: Lanes | None, optimizer: Any, loose: bool, counters: bool
) -> Lanes | None:
    """The lanes of a call, whose kinds follow from those of an earlier one; None where
    more than gradients came or went. `loose`, `counters`: as in Lanes.
    """
    if lanes is None or (lanes.loose, lanes.counters) != (loose, counters):
        return None
    if any(kind.numbers for kind in lanes.kinds) or not lanes.same(optimizer):
        return None
    params, kinds = lanes.params, lanes.kinds
    if any(kind.flag != params[i].requires_grad for kind in kinds for i in kind.lanes):
        return None
    grads = [p.grad for p in params]
    present = [id(g) for g in grads if g is not None]
    if len({*present}) < len(present) or not lanes.owned.isdisjoint(present):
        return None
    alike: dict[tuple[int, Any], list[int]] = {}
    for i, (k, g) in enumerate(zip(lanes.kind_of, grads, strict=True)):
        own: Any = None
        if kinds[k].has_grad and g is None:
            own = False
        elif g is not None and not kinds[k].has_grad:
            if odd_gradient(params[i]):
                return None
            own = layout_of(g, free_shape(params[i]) if loose else None)
        alike.setdefault((k, own), []).append(i)
    made: dict[Any, Kind] = {}
    for (k, own), members in alike.items():
        kind = kinds[k]
        key = kind.key
        if own is not None:
            key = (*key[:2], own, *key[3:])
        if key in made:
            members = [*made[key].lanes, *members]
        made[key] = replace(
            kind, key=key, lanes=sorted(members), has_grad=bool(key[2]), model=-1
        )
    found = copy.copy(lanes)
    found.kinds = sorted(made.values(), key=lambda kind: kind.lanes[0])
    found.arrange()
    found.young = True
    return found

"""Lanes that differ from recorded ones only in which of them have a gradient.

This module reads only the gradients that appeared. The guard of a plan compares the
metadata of all other tensors.

Lanes whose gradients come and go have a *home*: the same lanes, all with a gradient. A
byte for each lane records which of them have a gradient in a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from operator import not_
from typing import Any

from ..compiler.diagnostics import odd_gradient
from .keys import free_shape, layout_of
from .lanes import Kind, Lanes


def with_these_gradients(
    lanes: Lanes | None, optimizer: Any, ignore_sizes: bool, counters: bool
) -> Lanes | None:
    """Return the lanes of a call, with kinds derived from those of an earlier call.

    Returns None if more than the presence of gradients changed. `ignore_sizes`,
    `counters`: as in Lanes.
    """
    if lanes is None or (lanes.ignore_sizes, lanes.counters) != (
        ignore_sizes,
        counters,
    ):
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
    for i, (k, g) in enumerate(zip(lanes.kind_numbers(), grads, strict=True)):
        own: Any = None
        if kinds[k].has_grad and g is None:
            own = False
        elif g is not None and not kinds[k].has_grad:
            if odd_gradient(params[i]):
                return None
            own = layout_of(g, free_shape(params[i]) if ignore_sizes else None)
        alike.setdefault((k, own), []).append(i)
    made = _Kinds()
    for (k, own), members in alike.items():
        key = kinds[k].key
        made.add(kinds[k], members, key if own is None else _with_gradient(key, own))
    return lanes.of_these_kinds(made.every.values())


def widened(lanes: Lanes, wide: Mapping[Any, Sequence[int]]) -> Lanes:
    """Return the home of some lanes.

    `wide`: by the key of each kind with gradients, all lanes that a change of gradients
    may move to that kind.
    """
    made = _Kinds()
    moved = False
    for kind in lanes.kinds:
        by_key: dict[Any, list[int]] = {}
        of_lane: dict[int, Any] = {}
        for key, members in () if kind.has_grad else wide.items():
            if alike_but_for_the_gradient(kind.key, key):
                of_lane.update(dict.fromkeys(members, key))
        for i in kind.lanes:
            by_key.setdefault(of_lane.get(i, kind.key), []).append(i)
        moved = moved or [*by_key] != [kind.key]
        for key, members in by_key.items():
            made.add(kind, members, key)
    home = lanes.of_these_kinds(made.every.values()) if moved else lanes
    home.home = home
    home.present = bytes(kind.has_grad for kind in home.kinds for _ in kind.lanes)
    return home


def narrowed(home: Lanes, present: bytes) -> Lanes:
    """Return the lanes of a home, grouped by the gradients that are present now.

    `present`: as in Found.
    """
    if present == home.present:
        return home
    made = _Kinds()
    first = 0
    for kind in home.kinds:
        last = first + len(kind.lanes)
        there, first = present[first:last], last
        if kind.has_grad:
            missing = [*compress(kind.lanes, map(not_, there))]
            made.add(kind, missing, _with_gradient(kind.key, False))
            made.add(kind, [*compress(kind.lanes, there)], kind.key)
        else:
            made.add(kind, kind.lanes, kind.key)
    lanes = home.of_these_kinds(made.every.values())
    lanes.home, lanes.present = home, present
    return lanes


class _Kinds:
    """Kinds by their keys."""

    def __init__(self) -> None:
        self.every: dict[Any, Kind] = {}

    def add(self, like: Kind, lanes: Sequence[int], key: Any) -> None:
        """Add lanes to the kind with this key, which may differ from `like` in its
        gradient.

        A new kind has no model yet.
        """
        if not lanes:
            return
        kind = self.every.get(key)
        if kind is not None:
            kind.lanes = sorted((*kind.lanes, *lanes))
            return
        has_grad = bool(key[2])
        self.every[key] = replace(
            like, key=key, lanes=[*lanes], has_grad=has_grad, model=-1
        )


def alike_but_for_the_gradient(one: Any, other: Any) -> bool:
    """Do two keys of kinds differ at most in the gradient?"""
    return bool((*one[:2], *one[3:]) == (*other[:2], *other[3:]))


def _with_gradient(key: Any, grad: Any) -> Any:
    """Return the key of a kind with this gradient, False for none."""
    return (*key[:2], grad, *key[3:])

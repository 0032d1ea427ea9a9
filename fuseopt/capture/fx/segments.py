"""Dynamo's graph -> stretches of nodes that come again: the bodies of loops over lanes.

A for-loop over parameters reaches a backend unrolled. `segments` finds where it begins
anew by what the nodes call and at which source line; `describe` writes down what one
stretch does, up to what it is done to, so that equal forms are equal work.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.fx import Node

#: Kinds of constants that are told apart by their type and value.
PLAIN = (
    *(int, str, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
#: A body that comes less often is not looked for.
LEAST = 3


class Unlike(Exception):
    """A stretch holds something that no form can stand for."""


class Form(NamedTuple):
    """`key` is equal for stretches that do the same to what comes in.

    `outside`: the nodes whose values come in, in order of their first use. `leaving`:
    positions of the nodes whose values are used elsewhere.
    """

    key: tuple[Any, ...]
    outside: tuple[Node, ...]
    leaving: tuple[int, ...]


def tokens(nodes: Sequence[Node]) -> list[int]:
    """A number for each node, equal for calls of one target at one place."""
    known: dict[Any, int] = {}
    return [
        known.setdefault((n.op, n.target, n.meta.get("stack_trace")), len(known))
        for n in nodes
    ]


def segments(nodes: Sequence[Node], tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of nodes, in order, that come again token by token.

    A range begins at a token and ends where it comes next. What is between the ranges
    comes once.
    """
    places: dict[int, list[int]] = {}
    for i, token in enumerate(tokens):
        places.setdefault(token, []).append(i)
    begun: dict[int, dict[int, int]] = {}
    found: list[tuple[int, int]] = []
    i = 0
    while i < len(nodes):
        token = tokens[i]
        if token not in begun:
            begun[token] = _ranges(nodes, tokens, places[token])
        end = begun[token].get(i)
        if end is not None:
            found.append((i, end))
        i = i + 1 if end is None else end
    return found


def _ranges(
    nodes: Sequence[Node], tokens: Sequence[int], places: Sequence[int]
) -> dict[int, int]:
    """By its begin the end of each range from a place to the next that has a twin."""
    if len(places) < LEAST or nodes[places[0]].target is operator.getitem:
        return {}
    texts = [tuple(tokens[a:b]) for a, b in pairwise(places)]
    often = Counter(texts)
    found = {
        a: a + len(text)
        for a, text in zip(places, texts, strict=False)
        if often[text] >= LEAST - 1
    }
    last = places[-1]  # the last one is not followed by another
    for text, count in often.most_common():
        if count >= LEAST - 1 and tuple(tokens[last : last + len(text)]) == text:
            found[last] = last + len(text)
            break
    return found


def describe(nodes: Sequence[Node], tokens: Sequence[int]) -> Form:
    """The form of a stretch. Raises Unlike where it has none."""
    place = {n: k for k, n in enumerate(nodes)}
    outside: dict[Node, int] = {}
    write = _Writer(place, outside).write
    key: list[Any] = []
    leaving: list[int] = []
    inside = place.keys()
    for k, (n, token) in enumerate(zip(nodes, tokens, strict=True)):
        key.append(token)
        args, kwargs = n.args, n.kwargs
        key.append(len(args))
        for x in args:
            at = place.get(x) if type(x) is Node else None
            if at is None:
                write(key, x)
            else:
                key.append(at)
        if kwargs:
            write(key, kwargs)
        if not n.users.keys() <= inside:
            leaving.append(k)
    return Form((*key, None, *leaving), tuple(outside), tuple(leaving))


class _Writer:
    """Writes arguments down: a node by its place in the stretch or among what comes in,
    a constant by its type and value.
    """

    def __init__(self, place: Mapping[Node, int], outside: dict[Node, int]) -> None:
        self.place = place
        self.outside = outside

    def write(self, key: list[Any], x: Any) -> None:
        if isinstance(x, Node):
            k = self.place.get(x)
            if k is None:
                k = -1 - self.outside.setdefault(x, len(self.outside))
            key.append(k)
        elif isinstance(x, (tuple, list)):
            key.append((type(x), len(x)))
            for y in x:
                self.write(key, y)
        elif isinstance(x, dict):
            key.append((dict, *x))
            for y in x.values():
                self.write(key, y)
        elif isinstance(x, slice):
            key.append(slice)
            self.write(key, (x.start, x.stop, x.step))
        elif isinstance(x, float):
            key.append((float, repr(x)))  # 0.0 and -0.0 are equal, a NaN is not itself
        elif isinstance(x, PLAIN):
            key.append((type(x), x))
        else:
            raise Unlike

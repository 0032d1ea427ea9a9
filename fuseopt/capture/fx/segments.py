"""Find repeated stretches of nodes in Dynamo's graph: the bodies of loops over lanes.

A for-loop over parameters reaches a backend unrolled. `segments` finds its iterations
by the targets and source lines of nodes. `describe` makes a key of one stretch that is
independent of its incoming tensors, so that equal forms record equal nodes.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.fx import Node

#: Kinds of constants that differ in type or value.
PLAIN = (
    *(int, str, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
#: The least number of iterations of a loop.
LEAST = 3


class NoTemplate(Exception):
    """A stretch has an argument that no form can describe."""


class Form(NamedTuple):
    """Form of a stretch of nodes.

    `key`: equal for stretches that apply the same calls to their incoming values.
    `outside`: the nodes of the incoming values, in order of their first use. `leaving`:
    the indices of nodes whose values are used outside of the stretch.
    """

    key: tuple[Any, ...]
    outside: tuple[Node, ...]
    leaving: tuple[int, ...]


def tokens(nodes: Sequence[Node]) -> list[int]:
    """Return a number for each node, equal for calls of one target on one line."""
    numbers: dict[Any, int] = {}
    return [
        numbers.setdefault((n.op, n.target, n.meta.get("stack_trace")), len(numbers))
        for n in nodes
    ]


def segments(nodes: Sequence[Node], tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Return ranges of nodes, in order, whose tokens are repeated by other ranges.

    A range begins at a token and ends at its next occurrence. Nodes between the ranges
    are not repeated.
    """
    places: dict[int, list[int]] = {}
    for i, token in enumerate(tokens):
        places.setdefault(token, []).append(i)
    ends_of: dict[int, dict[int, int]] = {}
    ranges: list[tuple[int, int]] = []
    i = 0
    while i < len(nodes):
        token = tokens[i]
        if token not in ends_of:
            ends_of[token] = _ranges(nodes, tokens, places[token])
        end = ends_of[token].get(i)
        if end is not None:
            ranges.append((i, end))
        i = i + 1 if end is None else end
    return ranges


def _ranges(
    nodes: Sequence[Node], tokens: Sequence[int], places: Sequence[int]
) -> dict[int, int]:
    """Return the end, by the begin, of each repeated range between two places."""
    if len(places) < LEAST or nodes[places[0]].target is operator.getitem:
        return {}
    texts = [tuple(tokens[a:b]) for a, b in pairwise(places)]
    often = Counter(texts)
    ends = {
        a: a + len(text)
        for a, text in zip(places, texts, strict=False)
        if often[text] >= LEAST - 1
    }
    last = places[-1]  # the last range is not followed by another one
    for text, count in often.most_common():
        if count >= LEAST - 1 and tuple(tokens[last : last + len(text)]) == text:
            ends[last] = last + len(text)
            break
    return ends


def describe(nodes: Sequence[Node], tokens: Sequence[int]) -> Form:
    """Return the form of a stretch. Raises NoTemplate if it has none."""
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
    """Appends arguments to a key.

    A node becomes its index in the stretch or among the incoming nodes; a constant
    becomes its type and value.
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
            # repr distinguishes 0.0 and -0.0, and makes NaN equal to itself
            key.append((float, repr(x)))
        elif isinstance(x, PLAIN):
            key.append((type(x), x))
        else:
            raise NoTemplate

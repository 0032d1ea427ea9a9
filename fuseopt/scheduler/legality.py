"""Rules of vertical fusion: when a consumer may share its producer's pass over memory.

The rules are data. Each checks one index of two lists: a producer's node and a
consumer's node that touch the same buffer. It returns None, or the detail that forbids
fusion. All must hold at every list index, but they are checked only at the first one.
`alignment.py` has split the nodes whose rows differ in a property that a rule reads. A
new rule that reads a new property needs a split there too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..ir.graph import Buffer


@dataclass(frozen=True)
class Pair:
    """A dependency at one list index.

    `space` is the index space (shape) of a node's result. `kind`: "raw" (consumer reads
    what producer wrote), "war" or "waw". `buffer` is what both touch; `exact` is False
    when they touch it through different, overlapping views. `shared`: it is one
    number that many lanes use and the step changes. `by_block`: `buffer` has a
    number for each block of elements, which the producer reads and the consumer writes.
    """

    buffer: Buffer
    producer_space: tuple[int, ...]
    consumer_space: tuple[int, ...]
    producer_device: str
    consumer_device: str
    kind: str = "raw"
    exact: bool = True
    shared: bool = False
    by_block: bool = False


@dataclass(frozen=True)
class LegalityRule:
    """A rule: `check(pair)` returns None if fusion is legal, else the obstacle."""

    code: str
    why: str
    check: Callable[[Pair], str | None]


def _device(p: Pair) -> str | None:
    if p.producer_device == p.consumer_device:
        return None
    return f"{p.producer_device} and {p.consumer_device}"


def _overlap(p: Pair) -> str | None:
    return None if p.exact else f"{p.buffer.name} has overlapping views"


def _index_space(p: Pair) -> str | None:
    if p.buffer.shape == ():
        return None  # one number per lane, available before the elements
    produced, other = p.producer_space, p.consumer_space
    return None if produced == other else f"{list(produced)} and {list(other)}"


def _broadcast(p: Pair) -> str | None:
    if p.buffer.shape == () or p.by_block:
        return None
    for space in (p.producer_space, p.consumer_space):
        if p.buffer.shape != space:
            return f"{list(p.buffer.shape)} read as {list(space)}"
    return None


def _shared(p: Pair) -> str | None:
    if not p.shared:
        return None
    return f"{p.buffer.name} is one number, which many lanes read and the step changes"


RULES: tuple[LegalityRule, ...] = (
    LegalityRule("device", "the nodes run on different devices", _device),
    LegalityRule("overlap", "memory overlaps in part, so order matters", _overlap),
    LegalityRule("shared_scalar", "all lanes must see one value", _shared),
    LegalityRule("index_space", "the nodes loop over different shapes", _index_space),
    LegalityRule("broadcast", "an index reads what another index writes", _broadcast),
)


def why_not(pair: Pair) -> tuple[str, str] | None:
    """Return None if the pair may fuse, else the broken rule's code and a detail."""
    for rule in RULES:
        detail = rule.check(pair)
        if detail is not None:
            return rule.code, detail
    return None

"""Record a foreach call position by position, and reuse the rule of earlier positions.

Two positions are alike if their operands agree in everything that a rule depends on.
That is the dtype, whether they have dimensions, and whether they are numbers that the
step computed. Shape rules depend on the layout as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...ir.graph import Body, ScalarRef, SchedulerNode
from ..scalars.device import Computed
from .pointwise import Pointwise

#: (name, an operand for each position).
Columns = Sequence[tuple[str, Sequence[Any]]]


class _Rule(NamedTuple):
    """Arithmetic of a position, and its numbers."""

    body: Body
    scalars: tuple[ScalarRef, ...]


class Positions:
    """Positions of one foreach call, and the rules of those recorded so far."""

    def __init__(self, recorder: Pointwise, columns: Columns) -> None:
        self.recorder = recorder
        self.columns = [values for _, values in columns]
        self._rules: dict[tuple[Any, ...], _Rule] = {}
        self._last_reads: tuple[tuple[Any, ...] | None, list[int]] = (None, [])

    def again(self, i: int, out: torch.Tensor) -> bool:
        """Record position i like an earlier one; return False if none is alike."""
        r = self.recorder
        key, reads = self._describe(i, out)
        self._last_reads = key, reads
        rule = self._rules.get(key) if key is not None else None
        if rule is None:
            return False
        values = tuple([r.current[b] for b in reads])
        buffer = r.buffer_of(out)
        if not r.untangled(buffer):
            return False
        r.values.append(buffer)
        value = len(r.values) - 1
        r.wrote(buffer, value)
        r.nodes.append(
            SchedulerNode(rule.body, values, rule.scalars, (value,), r.call, r.line)
        )
        return True

    def learn(self, nodes: int) -> None:
        """Store the rule of the last position given to `again`, after its recording.

        `nodes`: the number of nodes before that recording.
        """
        key, reads = self._last_reads
        if key is None or len(self.recorder.nodes) != nodes + 1:
            return
        node = self.recorder.nodes[-1]
        if isinstance(node, SchedulerNode) and len(node.reads) == len(reads):
            self._rules[key] = _Rule(node.body, node.scalars)

    def _describe(
        self, i: int, out: torch.Tensor
    ) -> tuple[tuple[Any, ...] | None, list[int]]:
        """Return the key of all that a rule depends on, and the buffers that are read.

        The key is None if no rule may be reused.
        """
        r = self.recorder
        if out.dim() and out.numel() == 1:
            return None, []  # recorded as a number, see `as_lane_number`
        key: list[Any] = [out.dtype, out.dim() == 0, out.is_neg() or out.is_conj()]
        reads: list[int] = []
        devices: set[str] = set()
        for values in self.columns:
            x = values[i]
            if isinstance(x, torch.Tensor):
                dims = x.dim()
                if (dims and x.numel() == 1) or x.is_neg() or x.is_conj():
                    return None, []
                b = r.known(x)
                if b is None or r.current[b] < 0 or not r.untangled(b):
                    return None, []
                reads.append(b)
                device = r.buffers[b].device
                if dims:
                    devices.add(device)
                key.append((x.dtype, dims == 0, "" if dims else device))
            elif (stands := r.standins.find(x)) and isinstance(
                number := stands[0], Computed
            ):
                if stands[1]:
                    return None, []  # needs one more node, which negates it
                reads.append(r.buffer_of(number.tensor))
                key.append((number.kind,))
            elif isinstance(x, float):
                key.append((float, x, math.copysign(1.0, x)))
            else:
                key.append((type(x), x))
        if len(devices) > 1:
            return None, []  # either refused, or a copy between devices
        return tuple(key), reads


def results(
    func: Callable[..., Any],
    names: Sequence[str],
    bound: Mapping[str, Any],
    positional: int,
) -> list[torch.Tensor]:
    """Make the results of a foreach op that returns new tensors.

    torch runs the op on one position of each layout. `bound`: the arguments by name;
    the first `positional` of `names` are positional.
    """

    def call(arguments: Mapping[str, Any]) -> list[torch.Tensor]:
        first = names[:positional]
        keywords = {k: x for k, x in arguments.items() if k not in first}
        return list(func(*(arguments[k] for k in first), **keywords))

    lists = [k for k, x in bound.items() if isinstance(x, (list, tuple))]
    if any(isinstance(x, torch.Tensor) and x.dim() for x in bound.values()):
        return call(bound)  # an entry for each position, too
    kinds: dict[Any, int] = {}
    firsts: list[int] = []
    group_of: list[int] = []
    for i, row in enumerate(zip(*(bound[k] for k in lists), strict=True)):
        kind = tuple([_layout(x) for x in row])
        group = kinds.get(kind)
        if group is None:
            group = kinds[kind] = len(firsts)
            firsts.append(i)
        group_of.append(group)
    representatives = {
        k: [x[i] for i in firsts] if k in lists else x for k, x in bound.items()
    }
    new = call(representatives)
    every: list[torch.Tensor] = []
    for i, group in enumerate(group_of):
        t = new[group]
        if i != firsts[group]:
            t = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
        every.append(t)
    return every


def _layout(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return (x.dtype, x.shape, x.stride())
    return type(x)

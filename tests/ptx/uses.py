"""Where what a load has loaded is used: by a branch, an address, a store, a warp."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from .encode import COMPUTE, LOAD, LOAD_SHARED, Instr


def uses(code: Sequence[Instr]) -> tuple[list[int], list[int]]:
    """Instructions after one another, behind those of each load a -1; by instruction,
    where its own begin. What is only computed with is followed to where that is used.
    """
    readers: dict[int, list[int]] = defaultdict(list)
    for k, x in enumerate(code):
        for register in {*x.from_[: x.operands]}:
            readers[register].append(k)
    guarded: dict[int, list[int]] = defaultdict(list)
    for k, x in enumerate(code):
        if x.guard >= 0:
            guarded[x.guard].append(k)
    every, first = [-1], [0] * len(code)
    for k, x in enumerate(code):
        if x.kind not in (LOAD, LOAD_SHARED):
            continue
        first[k] = len(every)
        registers, ends = [*x.to[: x.results]], set()
        seen = set(registers)
        while registers:
            register = registers.pop()
            ends.update(guarded[register])
            for reader in readers[register]:
                if code[reader].kind != COMPUTE:
                    ends.add(reader)
                    continue
                new = {*code[reader].to[: code[reader].results]} - seen
                seen |= new
                registers += new
        every += [*sorted(ends), -1]
    return every, first

"""Find the instruction at which the two ways of a branch meet, in Dynamo's bytecode."""

from __future__ import annotations

import dis
from typing import Any

#: A place where ways meet: the index of an instruction, or an action of several ones.
#: ("back", index) is a jump back to the next turn of a loop; ("return",) is a return.
Place = int | tuple[Any, ...]
LEAVES = ("RETURN", "RAISE", "RERAISE", "YIELD", "SEND")
#: Instructions that always jump.
ONWARD = ("JUMP_FORWARD", "JUMP_ABSOLUTE", "JUMP_NO_INTERRUPT", "JUMP")
#: Instructions that name a variable of the frame.
VARIABLES = frozenset((*dis.haslocal, *dis.hasfree))


class NoMergePoint(Exception):
    """The two ways of a branch cannot both be traced."""


def leaving(x: Any, tx: Any) -> tuple[Any, ...] | None:
    """Return how an instruction leaves the code that follows it, or None."""
    if x.opname.startswith("JUMP_BACKWARD"):
        return "back", tx.indexof[x.target]
    if x.opname == "RETURN_VALUE":
        return ("return",)
    if x.opname.startswith(LEAVES):
        return "leaves", x.opname, tx.indexof[x]
    return None


def meeting_of(tx: Any, begin: int, target: int, at: int) -> Place:
    """Return the first place that all ways from `begin` and from `target` pass.

    Raises NoMergePoint if there is none. `at`: the index of the branch. A target before
    it begins the next turn of a loop.
    """
    passed: dict[int, frozenset[Place]] = {}

    def places(first: int) -> frozenset[Place]:
        """Return the places that every way from an instruction passes."""
        todo = [first]
        while todo:
            i = todo[-1]
            x = tx.instructions[i]
            away = leaving(x, tx)
            if away is not None:
                passed[i] = frozenset((i, away))
            if i in passed:
                todo.pop()
                continue
            on = [] if x.opname in ONWARD else [i + 1]
            on += [] if x.target is None else [tx.indexof[x.target]]
            late = [k for k in on if k > i and k not in passed]
            if late:
                todo += late
                continue
            ways = [passed[k] if k > i else frozenset((("back", k),)) for k in on]
            passed[i] = frozenset.intersection(*ways) | {i}
            todo.pop()
        return passed[first]

    beyond = places(target) if target > at else frozenset((("back", target),))
    both = places(begin) & beyond
    steps = [x for x in both if isinstance(x, int)]
    if steps:
        return min(steps)
    ends = [x for x in both if isinstance(x, tuple) and x[0] != "leaves"]
    if len(ends) != 1:
        raise NoMergePoint("they do not meet")
    return ends[0]


def is_read(tx: Any, name: str, start: int) -> bool:
    """May a local variable be read, from instruction `start` on, before it is set?"""
    todo, seen = [start], set()
    while todo:
        i = todo.pop()
        if i in seen:
            continue
        seen.add(i)
        x = tx.instructions[i]
        names = x.argval if isinstance(x.argval, tuple) else (x.argval,)
        if x.opcode in VARIABLES and name in names:
            if "STORE" not in x.opname or "LOAD" in x.opname:
                return True
            continue
        entry = x.exn_tab_entry
        todo += [] if entry is None else [tx.indexof[entry.target]]
        todo += [] if x.target is None else [tx.indexof[x.target]]
        if leaving(x, tx) is None and x.opname not in ONWARD:
            todo.append(i + 1)
    return False

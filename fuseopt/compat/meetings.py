"""Where two ways through the instructions of a function meet, as Dynamo holds them."""

from __future__ import annotations

import dis
from typing import Any

#: Where ways meet: an instruction, or what several of them do: ("back", to which),
#: ("return",). A jump backwards begins the next turn of a loop.
Place = int | tuple[Any, ...]
LEAVES = ("RETURN", "RAISE", "RERAISE", "YIELD", "SEND")
#: Instructions that always jump.
ONWARD = ("JUMP_FORWARD", "JUMP_ABSOLUTE", "JUMP_NO_INTERRUPT", "JUMP")
#: Instructions that name a variable of the frame.
VARIABLES = frozenset((*dis.haslocal, *dis.hasfree))


class Refused(Exception):
    """Both ways of this branch cannot be traced."""


def leaving(x: Any, tx: Any) -> tuple[Any, ...] | None:
    """What an instruction does that goes nowhere further on; None if it goes on."""
    if x.opname.startswith("JUMP_BACKWARD"):
        return "back", tx.indexof[x.target]
    if x.opname == "RETURN_VALUE":
        return ("return",)
    if x.opname.startswith(LEAVES):
        return "leaves", x.opname, tx.indexof[x]
    return None


def meeting_of(tx: Any, begin: int, target: int, at: int) -> Place:
    """The first place that all ways from two instructions come by.

    `at`: the branch itself. A target before it begins the next turn of a loop.
    """
    known: dict[int, frozenset[Place]] = {}

    def places(first: int) -> frozenset[Place]:
        """All that every way from an instruction comes by."""
        todo = [first]
        while todo:
            i = todo[-1]
            x = tx.instructions[i]
            away = leaving(x, tx)
            if away is not None:
                known[i] = frozenset((i, away))
            if i in known:
                todo.pop()
                continue
            on = [] if x.opname in ONWARD else [i + 1]
            on += [] if x.target is None else [tx.indexof[x.target]]
            late = [k for k in on if k > i and k not in known]
            if late:
                todo += late
                continue
            ways = [known[k] if k > i else frozenset((("back", k),)) for k in on]
            known[i] = frozenset.intersection(*ways) | {i}
            todo.pop()
        return known[first]

    beyond = places(target) if target > at else frozenset((("back", target),))
    both = places(begin) & beyond
    steps = [x for x in both if isinstance(x, int)]
    if steps:
        return min(steps)
    found = [x for x in both if isinstance(x, tuple) and x[0] != "leaves"]
    if len(found) != 1:
        raise Refused("they do not meet")
    return found[0]


def is_read(tx: Any, name: str, start: int) -> bool:
    """May a local be read from an instruction on, before it is set?"""
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

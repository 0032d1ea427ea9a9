"""The structs of include/folds.h that fold what a reduction reads.

A fold is fed the numbers of one result in their order in memory, a piece at a time, and
gives it at the end. The sums of float numbers follow the published algorithms of ATen
(cascade summation in four levels; a 2-norm in one vector register), which decide the
bits: how many numbers a register holds, what is left over, where threads part the work.

There are two families. `*Run` takes a run of neighbouring elements that belong to one
result; `*Columns` takes rows of COLUMNS elements, each of which belongs to another one.
"""

from __future__ import annotations

#: Fold opcode -> (name of its structs, does it know what was loaded?).
STRUCTS = {
    "sum": ("Sum", True),
    "sumsq": ("Squares", True),
    "fold": ("InOrder", False),
    "largest": ("Extreme", False),
    "least": ("Extreme", False),
}
LOADED = ("NATIVE", "FROM_BF16", "FROM_F16")


def run_type(op: str, kind: str, loaded: int) -> str:
    """The struct that folds a run of neighbouring elements."""
    name, knows = STRUCTS[op]
    if name == "Extreme":
        return f"ExtremeRun<{kind}, {'true' if op == 'largest' else 'false'}>"
    return f"{name}Run<{kind}, {LOADED[loaded]}>" if knows else f"{name}Run<{kind}>"


def columns_type(op: str, kind: str) -> str:
    """The struct that folds rows, an element of each to another result."""
    name, _ = STRUCTS[op]
    if name == "Extreme":
        return f"ExtremeColumns<{kind}, {'true' if op == 'largest' else 'false'}>"
    return f"{name}Columns<{kind}>"


def serial(op: str, loaded: int) -> bool:
    """Does eager fold a whole tensor in one thread?"""
    return op == "sumsq" and loaded != 2

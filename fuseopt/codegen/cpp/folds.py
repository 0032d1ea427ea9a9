"""Structs of include/folds.h that fold the operands of a reduction.

A fold gets the numbers of one result in memory order, a piece at a time, and returns
the result at the end. The sums of floats follow the published algorithms of ATen
(cascade summation in four levels; a 2-norm in one vector register). The algorithm
decides the bits: the numbers in a register, the leftover elements, and the split into
threads.

There are two families. `*Run` takes a run of neighbouring elements of one result.
`*Columns` takes rows of COLUMNS elements, each of a different result.
"""

from __future__ import annotations

#: Fold opcode -> (name of its structs, True if they depend on the loaded dtype).
STRUCTS = {
    "sum": ("Sum", True),
    "sumsq": ("Squares", True),
    "fold": ("InOrder", False),
    "largest": ("Extreme", False),
    "least": ("Extreme", False),
}
LOADED = ("NATIVE", "FROM_BF16", "FROM_F16")


def run_type(op: str, kind: str, loaded: int) -> str:
    """Return the struct that folds a run of neighbouring elements."""
    name, knows = STRUCTS[op]
    if name == "Extreme":
        return f"ExtremeRun<{kind}, {'true' if op == 'largest' else 'false'}>"
    return f"{name}Run<{kind}, {LOADED[loaded]}>" if knows else f"{name}Run<{kind}>"


def columns_type(op: str, kind: str) -> str:
    """Return the struct that folds rows, each element into a different result."""
    name, _ = STRUCTS[op]
    if name == "Extreme":
        return f"ExtremeColumns<{kind}, {'true' if op == 'largest' else 'false'}>"
    return f"{name}Columns<{kind}>"


def serial(op: str, loaded: int) -> bool:
    """Does eager fold a whole tensor in one thread?"""
    return op == "sumsq" and loaded != 2

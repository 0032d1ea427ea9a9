"""Where torch.optim reads a step counter as a Python number.

`reads_host_number(line)` takes the source line of a node. In eager such a line computes
with Python's float64; while traced, torch hands on the tensor itself, and so would
compute in float32. A line reads a number where it calls `_get_value`, or uses a name
that the nearest assignment above it bound to such a call.
"""

from __future__ import annotations

import ast
import functools
import linecache
from pathlib import Path

import torch

HOST_READ = "_get_value"
OPTIM = str(Path(torch.optim.__file__).parent)


def reads_host_number(line: str) -> bool:
    """Does eager take the 0-d tensors of this line ("file:12: code") as numbers?"""
    if not line.startswith(OPTIM):
        return False
    file, number, _ = line.split(":", 2)
    return int(number) in _host_lines(file)


def _is_read(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == HOST_READ
    )


@functools.cache
def _host_lines(file: str) -> frozenset[int]:
    """The lines of a file whose arithmetic is on numbers read from tensors."""
    found: set[int] = set()

    def visit(body: list[ast.stmt], known: dict[str, bool]) -> None:
        """`known`: is a name such a number, by the assignments above."""
        for statement in body:
            blocks = [
                block
                for name in ("body", "orelse", "finalbody")
                for block in [getattr(statement, name, [])]
                if isinstance(block, list)
            ]
            if any(blocks):
                for block in blocks:
                    visit(block, dict(known))
                continue
            parts = list(ast.walk(statement))
            reads = any(_is_read(part) for part in parts) or any(
                known.get(part.id, False)
                for part in parts
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)
            )
            if reads:
                end = statement.end_lineno or statement.lineno
                found.update(range(statement.lineno, end + 1))
            if isinstance(statement, ast.Assign):
                for target in statement.targets:
                    if isinstance(target, ast.Name):
                        known[target.id] = _is_read(statement.value)

    visit(ast.parse("".join(linecache.getlines(file))).body, {})
    return frozenset(found)

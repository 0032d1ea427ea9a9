"""Python numbers that a step reads from tensors it computed, as 0-d float64 tensors.

`t.item()` of a tensor that the step computed would wait for the device. Python's
arithmetic is that of float64, so such a number lives on as a 0-d float64 tensor, a
`Computed`. `operation` returns the opcode of a function of numbers, and `body` its
arithmetic with Python's bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...ir.expressions import Sym
from ...ir.graph import Body, Instr

#: Functions of numbers, by name, with their opcode. Whole numbers are float64 too,
#: which is exact for any step count.
OPERATIONS = {
    "add": "add",
    "iadd": "add",
    "sub": "sub",
    "isub": "sub",
    "mul": "mul",
    "imul": "mul",
    "truediv": "div",
    "itruediv": "div",
    "pow": "pow",
    "ipow": "pow",
    "neg": "neg",
    "abs": "abs",
    "max": "max",
    "min": "min",
    "sqrt": "sqrt",
    "float": "float",
    "int": "trunc",
    "trunc": "trunc",
    "lt": "lt",
    "le": "le",
    "gt": "gt",
    "ge": "ge",
    "eq": "eq",
    "ne": "ne",
    "ite": "choose",
}
#: Opcodes whose result is a float for any operands.
FLOAT = frozenset({"div", "sqrt", "float"})
#: Opcodes whose result is one of the operands.
CHOICES = frozenset({"max", "min", "choose"})
#: Opcodes whose result is true or false, here 1 or 0.
TRUTH = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
#: Opcodes whose result may be -0.0, which Python's integers lack.
SIGNED = frozenset({"neg", "mul", "trunc"})


@dataclass(frozen=True, eq=False)
class Computed:
    """A number in a tensor: 0-d, float64, on meta.

    `kind`: its Python type, which is float, int or bool.
    """

    tensor: torch.Tensor
    kind: type

    @property
    def is_float(self) -> bool:
        return self.kind is float


class NumberRef(NamedTuple):
    """Represents a Computed in a recorded call: read from its buffer, with a wait."""

    buffer: int
    kind: type


def kind_of(op: str, operands: Sequence[Computed | Sym | float]) -> type:
    """Return the Python type of the result of an operation on numbers."""
    if op in TRUTH:
        return bool
    if op in FLOAT:
        return float
    taken = [
        x.kind if isinstance(x, (Computed, Sym)) else type(x)
        for x in (operands[1:] if op == "choose" else operands)
    ]
    if op in CHOICES and set(taken) == {bool}:
        return bool
    return float if op != "trunc" and float in taken else int


def operation(function: Callable[..., object]) -> str | None:
    """Return the opcode of a function of numbers; None if it has none.

    Dynamo writes `max`, `math.sqrt` and their kind as torch.sym_max, torch._sym_sqrt;
    torch.sym_ite(condition, x, y) is x or y.
    """
    name = getattr(function, "__name__", "").lstrip("_").rstrip("_")
    return OPERATIONS.get(name.removeprefix("sym_"))


def body(op: str, stored: tuple[bool, ...], whole: bool = False) -> Body:
    """Return the arithmetic of one operation.

    `stored`: True for each operand that is a Computed. `whole`: True if the result is a
    Python int, in which no zero has a sign.
    """
    instrs: list[Instr] = []
    reads = 0
    for i, in_memory in enumerate(stored):
        kind = "load" if in_memory else "scalar"
        instrs.append(Instr(kind, (), "f64", reads if in_memory else i - reads))
        reads += in_memory
    operands = tuple(range(len(stored)))
    if op in ("max", "min"):
        # Python returns the first operand unless the second is strictly beyond it
        order = operands if op == "max" else operands[::-1]
        instrs.append(Instr("lt", order, "b8"))
        instrs.append(Instr("where", (2, 1, 0), "f64"))
    elif op in TRUTH:
        swapped = {"gt": "lt", "ge": "le"}.get(op)
        order = operands if swapped is None else operands[::-1]
        instrs.append(Instr(swapped or op, order, "b8"))
        instrs += [Instr("const", (), "f64", x) for x in (1.0, 0.0)]
        instrs.append(Instr("where", (2, 3, 4), "f64"))
    elif op == "choose":
        instrs.append(Instr("const", (), "f64", 0.0))
        instrs.append(Instr("ne", (0, 3), "b8"))
        instrs.append(Instr("where", (4, 1, 2), "f64"))
    elif op != "float":
        instrs.append(Instr(op, operands, "f64"))
    if whole:
        instrs.append(Instr("const", (), "f64", 0.0))
        instrs.append(Instr("add", (len(instrs) - 2, len(instrs) - 1), "f64"))
    result = len(instrs) - 1
    return Body(
        f"number_{op}",
        ("f64",) * reads,
        len(stored) - reads,
        tuple(instrs),
        ((result, "f64"),),
    )

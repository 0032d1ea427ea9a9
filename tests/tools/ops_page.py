"""The tables of docs/ops.md: `python -m tests.tools.ops_page` writes them.

tests/numerics/test_ops.py asserts that the page holds what is made here.
"""

from __future__ import annotations

import re

from fuseopt.codegen.optable import FORMS, LIBRARY
from fuseopt.ir.graph import VECTOR, Body, Instr
from fuseopt.lowering.pointwise import RULES, Number, Operand, Tensor, lower
from tests import ROOT
from tests.lowering.test_lowering import COMPARE, MASKED, WHOLE, operands

PAGE = ROOT / "docs" / "ops.md"
DTYPES = ("f32", "f64", "bf16", "f16")
#: Numbers after an op's tensors.
NUMBERS = {
    "add": 1,
    "sub": 1,
    "rsub": 1,
    "addcmul": 1,
    "addcdiv": 1,
    "clamp": 2,
    "hardtanh": 2,
    "nan_to_num": 3,
    "softplus": 2,
    "threshold": 2,
    "leaky_relu": 1,
}
INFIX = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "neg": "-{0}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "and": "{0} & {1}",
    "or": "{0} or {1}",
    "xor": "{0} ^ {1}",
    "not": "~{0}",
    "shl": "{0} << {1}",
    "shr": "{0} >> {1}",
    "where": "{0} ? {1} : {2}",
}


def formula(body: Body) -> str:
    """A body in one line: what is used twice gets a name."""
    uses = [0] * len(body.instrs)
    for instr in body.instrs:
        for a in instr.args:
            uses[a] += 1
    texts: list[str] = []
    parts: list[str] = []
    names = iter("abcdefghijklmnopq")
    for x, instr in enumerate(body.instrs):
        text = _expression(instr, texts)
        if uses[x] > 1 and instr.args:
            name = next(names)
            parts.append(f"{name} = {text[1:-1] if instr.op in INFIX else text}")
            text = name
        texts.append(text)
    last = body.writes[0][0]
    result = texts[last]
    if body.instrs[last].op in INFIX and result.startswith("("):
        result = result[1:-1]
    return "; ".join([*parts, result])


def _expression(instr: Instr, texts: list[str]) -> str:
    args = [texts[a] for a in instr.args]
    if instr.op == "load":
        return "xyz"[int(instr.attr or 0)]
    if instr.op == "scalar":
        return f"n{instr.attr}"
    if instr.op == "const":
        return f"{instr.attr:.9g}" if isinstance(instr.attr, float) else str(instr.attr)
    if instr.op == "tail":
        return "tail"
    if instr.op == "cast":
        return f"{instr.dtype}({args[0]})"
    if instr.op in INFIX:
        return f"({INFIX[instr.op].format(*args)})"
    return f"{instr.op}({', '.join(args)})"


def _body(op: str, dtype: str, vector_library: bool) -> Body | None:
    given: tuple[Operand, ...] = operands(op, dtype)
    if op == "bitcast":
        given = (Tensor("i32"),)
    if op in NUMBERS:
        tensors = (
            3 if op.startswith("addc") else 2 if op in ("add", "sub", "rsub") else 1
        )
        given = (*given[:tensors], *[Number(None)] * NUMBERS[op])
    out = "b8" if op in MASKED | COMPARE else dtype
    return lower(op, given, dtype, out, vector_library, not vector_library)


def _ops() -> str:
    lines = [
        "| op | on a CPU, float32 | on a GPU, where it differs |",
        "|---|---|---|",
    ]
    for op in RULES:
        dtype = "i32" if op in WHOLE else "f32"
        cpu, gpu = (_body(op, dtype, vector) for vector in (True, False))
        assert cpu is not None
        assert gpu is not None
        first, second = formula(cpu), formula(gpu)
        second = "" if first == second else f"`{second}`"
        lines.append(f"| `{op}` | `{first}` | {second} |")
    return "\n".join(lines)


def _forms() -> str:
    lines = [
        "| opcode | C++ | Triton | integers, in C++ and Triton |",
        "|---|---|---|---|",
    ]
    for op, form in FORMS.items():
        if op in VECTOR or op == "vsqrt":
            continue
        whole = [f"`{x}`" for x in (form.cpp_int, form.triton_int) if x]
        double = f", f64 `{form.triton_f64}`" if form.triton_f64 else ""
        cpp = form.cpp.replace("{f}", "")
        lines.append(
            f"| `{op}` | `{cpp}` | `{form.triton}`{double} | {', '.join(whole)} |"
        )
    return "\n".join(lines)


def _sleef(function: str, accuracy: str, single: bool) -> str:
    """The name in Sleef for vectors of 32 bytes."""
    return f"Sleef_{function}{'f8' if single else 'd4'}{accuracy}"


def _library() -> str:
    lines = ["| opcode | float32 | float64 | in Triton |", "|---|---|---|---|"]
    for op in ("vsqrt", *VECTOR):
        symbols = [LIBRARY[op, d].symbol(True, _sleef) for d in DTYPES[:2]]
        if op == "vsqrt":
            symbols = ["vmsSqrt", "vmdSqrt"]
        lines.append(
            f"| `{op}` | `{symbols[0]}` | `{symbols[1]}` | `{FORMS[op].triton}` |"
        )
    return "\n".join(lines)


TABLES = {"ops": _ops, "forms": _forms, "library": _library}


def filled(text: str) -> str:
    """The page with its tables made anew."""
    for name, make in TABLES.items():
        made = f"<!-- {name}:begin -->\n{make()}\n<!-- {name}:end -->"
        pattern = f"<!-- {name}:begin -->.*?<!-- {name}:end -->"
        text = re.sub(pattern, lambda _, made=made: made, text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

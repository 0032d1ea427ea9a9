"""Expressions of each opcode for each target, in one table.

`FORMS` has one row per opcode, with the expressions of C++ and Triton over operands
`{0}`, `{1}`, ... `cpp` and `triton` choose the one for a dtype. The targets themselves
write what depends on more than the opcode (a load, a constant, a cast).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import NamedTuple

from ..ir.graph import FLOATS, FUNCTIONS, VECTOR, Instr


class Form(NamedTuple):
    """The expressions of one opcode.

    `cpp` and `triton` serve every dtype, except integers if they have a separate form,
    and float64 where Triton's differs. `{f}` is the suffix of C's float functions.
    """

    cpp: str
    triton: str
    cpp_int: str = ""
    triton_int: str = ""
    triton_f64: str = ""


def _same(text: str) -> Form:
    """Return a Form with one text for both targets and every dtype."""
    return Form(text, text)


def _function(name: str, device: str = "", arity: int = 1) -> Form:
    """Return a Form with a function of <math.h> and of the device's math library.

    Eager's own kernels call the latter, so that the bits are eager's on a GPU. (tl.exp
    and its kind are faster and less exact.)
    """
    args = ", ".join(f"{{{k}}}" for k in range(arity))
    return Form(f"{name}{{f}}({args})", f"libdevice.{device or name}({args})")


FORMS: dict[str, Form] = {
    "add": _same("{0} + {1}"),
    "sub": _same("{0} - {1}"),
    "mul": _same("{0} * {1}"),
    # tl.div_rn and tl.sqrt_rn take f32 alone; the others round correctly for f64
    "div": Form(
        "{0} / {1}",
        "tl.div_rn({0}, {1})",
        triton_int="{0} // {1}",
        triton_f64="{0} / {1}",
    ),
    "fma": Form(
        "__builtin_fma{f}({0}, {1}, {2})",
        "tl.fma({0}, {1}, {2})",
        cpp_int="{0} * {1} + {2}",
        triton_int="{0} * {1} + {2}",
    ),
    # GCC turns -(a * b + c) into one instruction, which gives 0.0 for -0.0: see
    # `negated`. Triton's own minus subtracts from 0, which turns 0.0 into 0.0 and not
    # into -0.0
    "neg": Form("negated({0})", "{0} * -1", cpp_int="-{0}"),
    "abs": Form(
        "__builtin_fabs{f}({0})", "tl.abs({0})", cpp_int="{0} < 0 ? -{0} : {0}"
    ),
    "sqrt": Form(
        "__builtin_sqrt{f}({0})", "tl.sqrt_rn({0})", triton_f64="tl.sqrt({0})"
    ),
    # in C++ a call of the vector library, see LIBRARY
    "vsqrt": Form("", "tl.sqrt_rn({0})", triton_f64="tl.sqrt({0})"),
    "max": Form(
        "larger({0}, {1})",
        "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
        triton_int="tl.maximum({0}, {1})",
    ),
    "min": Form(
        "smaller({0}, {1})",
        "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
        triton_int="tl.minimum({0}, {1})",
    ),
    "lt": _same("{0} < {1}"),
    "le": _same("{0} <= {1}"),
    "eq": _same("{0} == {1}"),
    "ne": _same("{0} != {1}"),
    "isnan": _same("{0} != {0}"),
    "and": _same("{0} & {1}"),
    "or": _same("{0} | {1}"),
    "xor": _same("{0} ^ {1}"),
    "not": Form("!{0}", "~{0}", cpp_int="~{0}"),
    "where": Form("{0} ? {1} : {2}", "tl.where({0}, {1}, {2})"),
    "floor": Form("__builtin_floor{f}({0})", "tl.floor({0})", "{0}", "{0}"),
    "ceil": Form("__builtin_ceil{f}({0})", "tl.ceil({0})", "{0}", "{0}"),
    "trunc": Form("__builtin_trunc{f}({0})", "libdevice.trunc({0})", "{0}", "{0}"),
    "round": Form("__builtin_rint{f}({0})", "libdevice.rint({0})", "{0}", "{0}"),
    "shl": _same("{0} << {1}"),
    "shr": _same("{0} >> {1}"),
    **{name: _function(name, arity=arity) for name, arity in FUNCTIONS.items()},
    # for float32 a function of the text, see codegen.triton.power
    "pow": Form(
        "pow{f}({0}, {1})", "power({0}, {1})", triton_f64="libdevice.pow({0}, {1})"
    ),
}

for _name, _plain in VECTOR.items():
    FORMS[_name] = FORMS[_plain]._replace(cpp="", cpp_int="")


class Vector(NamedTuple):
    """A function of a vector library: C's name of it, and the number of arguments."""

    function: str
    is_vendor: bool
    single: bool
    plain: str
    arity: int

    def symbol(self, vendor: bool, sleef: Callable[[str, str, bool], str]) -> str:
        """Return the library's name of the function, or "".

        `vendor`: eager calls MKL's functions. Without MKL, eager calls Sleef's for
        these, except for erf of float32, which is an extern then.
        """
        name = self.function
        if self.is_vendor and vendor:
            return (
                f"vm{'s' if self.single else 'd'}{_VENDOR.get(name, name.capitalize())}"
            )
        if self.is_vendor and self.single and name == "erf":
            return ""
        return sleef(name, _SLEEF.get(name, "_u10"), self.single)


#: The vendor library's names of functions.
_VENDOR = {"log": "Ln"}
#: Accuracies of Sleef's functions where eager does not use those within 1.0 ulp.
_SLEEF = {"erfc": "_u15", "hypot": "_u05", "fmod": ""}


def _vector(name: str, dtype: str) -> Vector:
    function, single = VECTOR[name], dtype == "f32"
    plain = f"{function}f" if single else function
    is_vendor = not name.startswith("sleef_")
    return Vector(function, is_vendor, single, plain, FUNCTIONS[function])


#: C++ functions that eager takes from a vector library; called on blocks of elements.
LIBRARY = {
    (name, dtype): _vector(name, dtype) for name in VECTOR for dtype in ("f32", "f64")
}
#: Their order in `Library.functions`, by which the text refers to them.
SLOTS = tuple(LIBRARY)
LIBRARY["vsqrt", "f32"] = Vector("", True, True, "sqrtf", 1)
LIBRARY["vsqrt", "f64"] = Vector("", True, False, "sqrt", 1)


def symbols(vendor: bool, sleef: Callable[[str, str, bool], str]) -> tuple[str, ...]:
    """Return the names of the functions in `SLOTS`, as `Vector.symbol` does."""
    return tuple([LIBRARY[slot].symbol(vendor, sleef) for slot in SLOTS])


#: Names of the text's functions that call the library.
VECTOR_KINDS = ("sleef", "vendor")


def library_call(
    op: str, dtype: str, n: str, args: list[tuple[str, int]], out: str
) -> str:
    """Return the C++ statement that calls a library on n elements.

    `args` are pointers and their steps: 1, or 0 for one number.
    """
    if op == "vsqrt":
        return f"library_sqrt_{dtype}(t.library, {n}, {args[0][0]}, {out});"
    function = LIBRARY[op, dtype]
    kind = "vendor" if function.is_vendor else "sleef"
    if function.arity == 1:
        places = args[0][0]
    else:
        places = ", ".join(f"{x}, {step}" for x, step in args)
    number = SLOTS.index((op, dtype))
    return f"{kind}(t.library, {number}, {function.plain}, {n}, {places}, {out});"


#: Functions of the device's math library that Triton's text may call, by arity.
DEVICE_FUNCTIONS = {
    name: text.count("{")
    for form in FORMS.values()
    for text in (form.triton, form.triton_f64)
    for name in re.findall(r"libdevice\.(\w+)", text)
}

#: The type of a value in registers, by IR dtype. In C++ bf16 and f16 are floats,
#: rounded.
CPP_TYPES = {
    "f64": "double",
    "f32": "float",
    "bf16": "float",
    "f16": "float",
    "i64": "int64_t",
    "i32": "int32_t",
    "i16": "int16_t",
    "i8": "int8_t",
    "u8": "uint8_t",
    "b8": "bool",
}
#: The type of a value in memory.
CPP_STORAGE = {**CPP_TYPES, "bf16": "uint16_t", "f16": "_Float16", "b8": "uint8_t"}
#: The type of a value in registers and in memory.
TRITON_TYPES = {
    "f64": "tl.float64",
    "f32": "tl.float32",
    "bf16": "tl.bfloat16",
    "f16": "tl.float16",
    "i64": "tl.int64",
    "i32": "tl.int32",
    "i16": "tl.int16",
    "i8": "tl.int8",
    "u8": "tl.uint8",
    "b8": "tl.int1",
}
NARROW = frozenset({"bf16", "f16"})


def cpp(instr: Instr, args: list[str], dtypes: list[str]) -> str:
    """Return the C++ expression of one arithmetic instruction on operands `args`."""
    if instr.op == "bitcast":
        return _cpp_bitcast(args[0], dtypes[0], instr.dtype)
    if instr.op == "cast":
        return cpp_cast(args[0], dtypes[0], instr.dtype)
    if instr.op in ("lookup", "search"):
        return f"{instr.op}{instr.attr}({', '.join(args)})"
    form = FORMS[instr.op]
    integer = dtypes[0] not in FLOATS and dtypes[0] != "b8"
    text = form.cpp_int if integer and form.cpp_int else form.cpp
    return text.format(*args, f="" if instr.dtype == "f64" else "f")


def cpp_cast(x: str, source: str, dtype: str) -> str:
    """Cast a value of IR dtype `source` to `dtype`, in registers."""
    if dtype in NARROW:
        return f"round_{dtype}((float){x})"
    if dtype == "b8":
        return f"{x} != 0"
    return f"({CPP_TYPES[dtype]}){x}"


def cpp_load(dtype: str, place: str) -> str:
    """Convert a number from its form in memory to its form in registers."""
    if dtype in NARROW:
        return f"from_{dtype}({place})"
    return f"{place} != 0" if dtype == "b8" else place


def cpp_store(x: str, dtype: str) -> str:
    """Convert a number of type `dtype` to its form in memory."""
    return f"to_{dtype}({x})" if dtype in NARROW else f"({CPP_STORAGE[dtype]}){x}"


def _cpp_bitcast(x: str, source: str, dtype: str) -> str:
    if source == "bf16":
        x = f"to_bf16(round_bf16({x}))"
    elif source == "f16":
        x = f"to_f16({x})"
    x = f"bits<{CPP_STORAGE[dtype]}>({x})"
    return f"from_bf16({x})" if dtype == "bf16" else x


def cpp_literal(value: float, dtype: str) -> str:
    """Return a constant of IR dtype."""
    if dtype in FLOATS:
        if math.isinf(value):
            return "INFINITY" if value > 0 else "-INFINITY"
        if math.isnan(value):
            return "NAN"
        text = repr(float(value))
        return text if dtype == "f64" else text + "f"
    return str(int(value))


#: For "fast" numerics: off by up to two ulp. These lack the branches that the exact
#: ones need for numbers near the ends of the range.
TRITON_FAST = {
    "div": "{0} / {1}",
    "sqrt": "tl.sqrt({0})",
    "vsqrt": "tl.sqrt({0})",
}


def triton(instr: Instr, args: list[str], dtypes: list[str], fast: bool = False) -> str:
    """Return the Triton expression of one arithmetic instruction.

    `args` name its operands and `dtypes` are theirs. Halves are widened, computed in
    f32 and rounded back, except where nothing is computed. `fast`: see TRITON_FAST.
    """
    op = instr.op
    if op == "bitcast":
        return f"{args[0]}.to({TRITON_TYPES[instr.dtype]}, bitcast=True)"
    if op == "cast":
        return triton_cast(args[0], dtypes[0], instr.dtype)
    if op in ("lookup", "search"):
        # each table has a search, whose text has its numbers
        name = (
            f"lookup(values{instr.attr}"
            if op == "lookup"
            else f"search{instr.attr}(steps{instr.attr}"
        )
        return f"{name}, {', '.join(args)})"
    form = FORMS[op]
    if op == "where":
        return form.triton.format(*args)
    wide = [
        f"{x}.to(tl.float32)" if d in NARROW else x
        for x, d in zip(args, dtypes, strict=True)
    ]
    text = form.triton
    if dtypes[0] not in FLOATS:
        text = form.triton_int or text
    elif dtypes[0] == "f64":
        text = form.triton_f64 or text
    elif fast:
        text = TRITON_FAST.get(op, text)
    text = text.format(*wide)
    return (
        f"({text}).to({TRITON_TYPES[instr.dtype]})" if instr.dtype in NARROW else text
    )


def triton_cast(x: str, source: str, dtype: str) -> str:
    """Cast a value of IR dtype `source` to `dtype`; casts to halves go through f32."""
    if source == dtype:
        return x
    if source in NARROW and dtype != "f32":
        return triton_cast(f"{x}.to(tl.float32)", "f32", dtype)
    if dtype == "b8":
        return f"({x} != 0)"
    if dtype in NARROW and source != "f32":
        return f"{x}.to(tl.float32).to({TRITON_TYPES[dtype]})"
    return f"{x}.to({TRITON_TYPES[dtype]})"


def triton_literal(value: float, dtype: str) -> str:
    """Return a constant as a scalar of IR dtype."""
    kind = TRITON_TYPES[dtype]
    if dtype == "b8":
        return f"tl.full((), {bool(value)}, tl.int1)"
    if dtype not in FLOATS:
        return f"tl.full((), {int(value)}, {kind})"
    if math.isinf(value) or math.isnan(value):
        return f'tl.full((), float("{value}"), {kind})'
    if value == 0 and math.copysign(1, value) < 0:
        return f"tl.full((), 0.0, {kind}) * -1"
    return f"tl.full((), {float(value)!r}, {kind})"

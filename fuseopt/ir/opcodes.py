"""Vocabulary of the IR: element types with their sizes, opcodes with their arguments.

All tables are data without torch. `ir.graph` re-exports them for most modules.
"""

from __future__ import annotations

#: Element types that a body may compute with, and their size in bytes. "b8" is a bool
#: stored in a byte.
ARITHMETIC = {
    "f64": 8,
    "f32": 4,
    "bf16": 2,
    "f16": 2,
    "i64": 8,
    "i32": 4,
    "i16": 2,
    "i8": 1,
    "u8": 1,
    "b8": 1,
}
#: Element types that only externs read and write: memory of known size, no arithmetic.
OPAQUE = {
    "c128": 16,
    "c64": 8,
    "c32": 4,
    "u64": 8,
    "u32": 4,
    "u16": 2,
    "f8e4m3": 1,
    "f8e4m3z": 1,
    "f8e5m2": 1,
    "f8e5m2z": 1,
    "f8e8m0": 1,
}
#: Size in bytes of every element type that a buffer may have.
DTYPE_BYTES = {**ARITHMETIC, **OPAQUE}
FLOATS = frozenset({"f64", "f32", "bf16", "f16"})
#: torch's name of each element type.
TORCH_NAMES = {
    "f64": "float64",
    "f32": "float32",
    "bf16": "bfloat16",
    "f16": "float16",
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "i8": "int8",
    "u8": "uint8",
    "b8": "bool",
    "c128": "complex128",
    "c64": "complex64",
    "c32": "complex32",
    "u64": "uint64",
    "u32": "uint32",
    "u16": "uint16",
    "f8e4m3": "float8_e4m3fn",
    "f8e4m3z": "float8_e4m3fnuz",
    "f8e5m2": "float8_e5m2",
    "f8e5m2z": "float8_e5m2fnuz",
    "f8e8m0": "float8_e8m0fnu",
}

#: Opcodes that take part in a body, with their number of arguments.
ARITY = {
    "load": 0,  # attr: index of the read
    "scalar": 0,  # attr: index of the scalar; a double from the host
    "const": 0,  # attr: a literal that is part of the structure
    "cast": 1,
    "add": 2,
    "sub": 2,
    "mul": 2,
    "div": 2,
    "fma": 3,  # a * b + c, rounded once
    "neg": 1,
    "abs": 1,
    "sqrt": 1,  # rounded correctly
    "vsqrt": 1,  # rounded as in eager's vector library
    "floor": 1,
    "ceil": 1,
    "trunc": 1,
    "round": 1,
    "isnan": 1,
    "max": 2,  # NaN in either argument gives NaN
    "min": 2,
    "lt": 2,
    "le": 2,
    "eq": 2,
    "ne": 2,
    "bitcast": 1,  # the same bits as another type of the same size
    "index": 1,  # of a load: the index of the element in its tensor
    "shl": 2,  # of integers, by less than their width
    "shr": 2,  # copies the sign
    "and": 2,
    "or": 2,
    "xor": 2,
    "not": 1,
    "where": 3,
    # True for elements after the end of eager's vector loop. attr 0: a single number,
    # which always is. attr 1: the loop takes 32 elements. attr 2, 4 or 8: the loop
    # takes two vectors of elements with that many bytes. Add AVX2 if eager has no wider
    # vectors there, on any processor. Add BY_ROWS if the call's tensors differ in
    # layout, so that the loop runs over rows.
    "tail": 0,
    # over the elements of a lane, or of a row or column of it; attr: NATIVE, FROM_BF16
    # or FROM_F16
    "sum": 1,
    "sumsq": 1,  # of squares, as in eager's 2-norm
    "fold": 1,  # a sum from the first element to the last
    "largest": 1,  # NaN anywhere gives NaN
    "least": 1,
    # over the elements of a block (see blocks.py), each of which gets the result; attr:
    # the size of blocks
    "block_largest": 1,  # NaN anywhere gives NaN
    "block_least": 1,
    "spread": 1,  # of a load with a number for each block: that of this element's block
    "first": 1,  # a number for each block: that of its first element
    # of a part of a table (see tables.py); attr: its number
    "lookup": 2,  # code and part: the value
    "search": 2,  # number and part: the code; 0 of NaN
}
#: Functions of C's library, by number of arguments.
FUNCTIONS = {
    **dict.fromkeys(
        (
            "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh "
            "tanh asinh acosh atanh erf erfc lgamma"
        ).split(),
        1,
    ),
    **dict.fromkeys("pow atan2 hypot fmod nextafter".split(), 2),
}
#: Functions that the vector library of the processor's vendor has.
VENDOR = tuple("exp log log2 log10 sin cos tan tanh asin acos atan erf erfc".split())
#: The same functions with the bits of eager's vector libraries on a CPU: "v" for the
#: library of the processor's vendor, "sleef_" for Sleef.
VECTOR = {
    **{f"v{name}": name for name in VENDOR},
    **{
        f"sleef_{name}": name
        for name in FUNCTIONS
        if name not in ("asinh", "acosh", "nextafter")
    },
}
ARITY.update(FUNCTIONS)
ARITY.update({name: FUNCTIONS[plain] for name, plain in VECTOR.items()})
BY_ROWS = 16
AVX2 = 32
#: Instructions that fold many elements into one number; their users run after all
#: elements.
REDUCTIONS = frozenset({"sum", "sumsq", "fold", "largest", "least"})
#: What eager's loops load when they fold: the folded type, or 16-bit floats that they
#: widen.
NATIVE, FROM_BF16, FROM_F16 = 0, 1, 2

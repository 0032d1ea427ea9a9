"""Structs that C and Python share, written once: in C."""

from __future__ import annotations

import ctypes
import re
from typing import Any


def fields(text: str, name: str) -> list[tuple[str, Any]]:
    """Return the ctypes `_fields_` of the struct of this name in a C++ text.

    They are int64_t, pointers, and arrays of those. Raises ValueError for others.
    """
    body = re.search(rf"struct {name} {{(.*?)\n}};", text, re.DOTALL)
    if body is None:
        raise ValueError(f"no struct {name}")
    declared: list[tuple[str, Any]] = []
    for line in re.sub(r"//[^\n]*", "", body.group(1)).split(";")[:-1]:
        declared += _declared(" ".join(line.split()))
    return declared


def _declared(line: str) -> list[tuple[str, Any]]:
    """Return the fields of one declaration."""
    function = re.match(r"[\w ]+\*?\s*\(\*(\w+)\)\(.*\)$", line)
    if function:
        return [(function.group(1), ctypes.c_void_p)]
    fields: list[tuple[str, Any]] = []
    kind = ""
    for text in line.split(","):
        match = re.match(r"(.*?)(\w+)(?:\[(\d+)\])?$", text.strip())
        if match is None:
            raise ValueError(f"not understood: {line}")
        before, name, size = match.groups()
        kind = kind or before.strip()
        if "*" not in before and kind != "int64_t":
            raise ValueError(f"neither a pointer nor an int64_t: {line}")
        ctype: Any = ctypes.c_void_p if "*" in before else ctypes.c_int64
        fields.append((name, ctype * int(size) if size else ctype))
    return fields

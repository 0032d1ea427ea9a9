"""Structs and enumerators that C and Python share, written once: in C."""

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


def enumerators(text: str, *names: str) -> list[int]:
    """Return the values of these enumerators in a C++ text.

    Raises ValueError for one whose value is not written as an integer.
    """
    plain = re.sub(r"//[^\n]*", "", text)
    enums = ",".join(re.findall(r"^enum {([^}]*)}", plain, re.MULTILINE))
    entries = (entry.strip() for entry in enums.split(","))
    known = dict(re.findall(r"^(\w+) = (-?\d+)$", "\n".join(entries), re.MULTILINE))
    missing = [name for name in names if name not in known]
    if missing:
        raise ValueError(f"no enumerator with an integer: {', '.join(missing)}")
    return [int(known[name]) for name in names]


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

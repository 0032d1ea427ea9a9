"""Structs that C and Python share, written once: in C."""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


@functools.cache
def header(name: str) -> str:
    """The text of one of the C++ files here: `header("lanes")` is lanes.h."""
    return (FOLDER / f"{name}.h").read_text(encoding="utf-8")


def structure(text: str, name: str) -> type[ctypes.Structure]:
    """The struct of this name in a C++ text, as Python fills it.

    Its fields are int64_t, pointers, and arrays of those. Raises ValueError for others.
    """
    body = re.search(rf"struct {name} {{(.*?)\n}};", text, re.DOTALL)
    if body is None:
        raise ValueError(f"no struct {name}")
    fields: list[tuple[str, type]] = []
    for line in re.sub(r"//[^\n]*", "", body.group(1)).split(";")[:-1]:
        fields += _fields(" ".join(line.split()))
    return type(name, (ctypes.Structure,), {"_fields_": fields, "__doc__": name})


def _fields(line: str) -> list[tuple[str, type]]:
    """The fields that one declaration declares."""
    function = re.match(r"[\w ]+\*?\s*\(\*(\w+)\)\(.*\)$", line)
    if function:
        return [(function.group(1), ctypes.c_void_p)]
    fields: list[tuple[str, type]] = []
    kind = ""
    for text in line.split(","):
        found = re.match(r"(.*?)(\w+)(?:\[(\d+)\])?$", text.strip())
        if found is None:
            raise ValueError(f"not understood: {line}")
        before, name, size = found.groups()
        kind = kind or before.strip()
        if "*" not in before and kind != "int64_t":
            raise ValueError(f"neither a pointer nor an int64_t: {line}")
        own: Any = ctypes.c_void_p if "*" in before else ctypes.c_int64
        fields.append((name, own * int(size) if size else own))
    return fields

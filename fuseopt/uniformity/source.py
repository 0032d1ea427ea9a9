"""Find the syntax tree of a function, and prove that it is the code that runs.

The file is read and compiled. The code object at the function's line must equal the
function's own code object. So a returned tree is the code that Python will run.
"""

from __future__ import annotations

import ast
import linecache
import types
from dataclasses import dataclass, field
from typing import Any

#: The nodes that define a function.
FunctionNode = ast.FunctionDef | ast.Lambda
_FLAGS = 0x20 | 0x80 | 0x200  # generators, coroutines, asynchronous generators


class NoSource(Exception):
    """The source of a function is unavailable; the message gives the reason."""


@dataclass(frozen=True)
class Source:
    """Definition of a function: its tree, its file, its code object."""

    node: FunctionNode
    filename: str
    code: types.CodeType


@dataclass
class _File:
    lines: list[str]
    codes: dict[tuple[str, int], list[types.CodeType]] = field(default_factory=dict)
    nodes: dict[tuple[str, int], list[FunctionNode]] = field(default_factory=dict)


class Sources:
    """The files of functions, each read and compiled once."""

    def __init__(self) -> None:
        self._files: dict[str, _File] = {}
        # by identity, since hashing a code object visits all of it
        self._sources: dict[int, tuple[types.CodeType, Source]] = {}

    def of(self, function: types.FunctionType) -> Source:
        """Return the definition of a function. Raises NoSource."""
        code = function.__code__
        cached = self._sources.get(id(code))
        if cached is not None:
            return cached[1]
        definition = self._find(code)
        self._sources[id(code)] = code, definition
        return definition

    def _find(self, code: types.CodeType) -> Source:
        name = code.co_filename
        file = self._file(name)
        place = code.co_name, code.co_firstlineno
        codes, nodes = file.codes.get(place, []), file.nodes.get(place, [])
        if len(codes) != 1 or len(nodes) != 1:
            raise NoSource("its source is not where its code says")
        if not same_code(codes[0], code):
            raise NoSource("its source is not what it runs")
        if code.co_flags & _FLAGS:
            raise NoSource("it is a generator or a coroutine")
        return Source(nodes[0], name, code)

    def _file(self, name: str) -> _File:
        lines = linecache.getlines(name)
        cached = self._files.get(name)
        if cached is not None and cached.lines is lines:
            return cached
        if not lines:
            raise NoSource("its source is missing")
        file = self._files[name] = _File(lines)
        try:
            tree = ast.parse("".join(lines), name)
            whole = compile(tree, name, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise NoSource("its source cannot be compiled") from error
        _collect(whole, file.codes)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                first = node.decorator_list[0] if node.decorator_list else node
                place = node.name, first.lineno
                file.nodes.setdefault(place, []).append(node)
            elif isinstance(node, ast.Lambda):
                place = "<lambda>", node.lineno
                file.nodes.setdefault(place, []).append(node)
        return file


def _collect(
    code: types.CodeType, codes: dict[tuple[str, int], list[types.CodeType]]
) -> None:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            place = constant.co_name, constant.co_firstlineno
            codes.setdefault(place, []).append(constant)
            _collect(constant, codes)


def same_code(a: types.CodeType, b: types.CodeType) -> bool:
    """Do two code objects have the same code, in files of any name?"""
    return (
        a.co_code == b.co_code
        and a.co_names == b.co_names
        and a.co_varnames == b.co_varnames
        and a.co_freevars == b.co_freevars
        and a.co_cellvars == b.co_cellvars
        and a.co_argcount == b.co_argcount
        and a.co_posonlyargcount == b.co_posonlyargcount
        and a.co_kwonlyargcount == b.co_kwonlyargcount
        and a.co_flags == b.co_flags
        and getattr(a, "co_exceptiontable", b"") == getattr(b, "co_exceptiontable", b"")
        and _same_constant(a.co_consts, b.co_consts)
    )


def _same_constant(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, types.CodeType):
        return same_code(a, b)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same_constant, a, b))
    if isinstance(a, frozenset):
        return sorted(map(repr, a)) == sorted(map(repr, b))
    # 0.0 and -0.0 are equal, and so are 1 and True
    return repr(a) == repr(b) if not isinstance(a, (str, bytes)) else bool(a == b)


def inner_codes(code: types.CodeType) -> set[types.CodeType]:
    """Return a code object and all code objects nested in it."""
    codes = {code}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            codes |= inner_codes(constant)
    return codes

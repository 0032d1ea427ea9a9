"""The structs that C and Python share: the same fields, at the same places."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fuseopt.codegen.cpp.headers import header
from fuseopt.codegen.cpp.structs import enumerators, fields
from fuseopt.compat import LibraryStruct, TensorFunctions
from fuseopt.runtime import chains
from fuseopt.runtime.cpp.table import TableStruct
from fuseopt.runtime.cpp.toolchain import find_compiler
from fuseopt.runtime.guards import library
from tests.codegen.test_headers import WARNINGS

#: By name in C: the text that has it, and Python's.
STRUCTS: dict[str, tuple[str, Any]] = {
    "Library": (header("prelude"), LibraryStruct),
    "Table": (header("prelude"), TableStruct),
    "Functions": (library.TEXT, library.Functions),
    "TensorRecord": (library.TEXT, library.TensorRecord),
    "ContainerRecord": (library.TEXT, library.ContainerRecord),
    "LaneRecord": (library.TEXT, library.LaneRecord),
    "PartRecord": (library.TEXT, library.PartRecord),
    "ProductChain": (chains.TEXT, chains.ProductChain),
}


def run_cpp(text: str, folder: Path) -> list[str]:
    """The words that a program prints."""
    (folder / "main.cpp").write_text(text)
    command = [find_compiler().path, "-std=c++17", "main.cpp", "-o", "main"]
    subprocess.run(command, cwd=folder, check=True)
    done = subprocess.run(
        [str(folder / "main")], check=True, capture_output=True, text=True
    )
    return done.stdout.split()


def layout(struct: Any) -> list[int]:
    """Its size, then where each field begins."""
    names = [name for name, _ in struct._fields_]
    return [ctypes.sizeof(struct), *(getattr(struct, n).offset for n in names)]


def test_the_compiler_has_the_layouts_that_python_has(tmp_path: Path) -> None:
    lines = [f"#include <{name}>" for name in ("stddef.h", "stdint.h", "stdio.h")]
    body = []
    for name, (text, struct) in STRUCTS.items():
        # the struct alone, so that nothing else is to be compiled or linked
        start = text.index(f"struct {name} {{")
        lines.append(text[start : text.index("\n};", start) + 4])
        body.append(f'printf("%zu\\n", sizeof({name}));')
        body += [
            f'printf("%zu\\n", offsetof({name}, {field}));'
            for field, _ in struct._fields_
        ]
    found = run_cpp("\n".join([*lines, "int main() {", *body, "}"]), tmp_path)
    known = [x for _, struct in STRUCTS.values() for x in layout(struct)]
    assert list(map(int, found)) == known


def test_what_is_known_of_torch_fills_the_struct() -> None:
    assert [name for name, _ in library.Functions._fields_] == [
        *TensorFunctions._fields
    ]


def test_all_kinds_of_fields() -> None:
    text = """
struct Some {
  int64_t a, b;  // numbers; with a comment
  const uint64_t *c, *d;
  void* const* e;
  void* f[3];
  int32_t (*g)(void*, int64_t**);
};
"""
    some = type("Some", (ctypes.Structure,), {"_fields_": fields(text, "Some")})
    assert layout(some) == [72, 0, 8, 16, 24, 32, 40, 64]


@pytest.mark.parametrize("field", ["int32_t x", "double y", "int64_t z : 3"])
def test_other_fields_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=r"understood|neither"):
        fields(f"struct Some {{\n  {field};\n}};", "Some")
    with pytest.raises(ValueError, match="no struct Other"):
        fields(f"struct Some {{\n  {field};\n}};", "Other")


def test_enumerators() -> None:
    text = """
enum { A = -1,  // a comment, D = 4
       B = 3 };
enum {
  C = 1 << 2,
  D
};
"""
    assert enumerators(text, "B", "A") == [3, -1]
    for name in ("C", "D", "E"):
        with pytest.raises(ValueError, match=f"integer: {name}"):
            enumerators(text, "A", name)


def test_all_files_are_in_the_library() -> None:
    assert {path.stem for path in library.FOLDER.glob("*.h")} == set(library.HEADERS)


def test_the_library_compiles_without_a_warning(tmp_path: Path) -> None:
    own = tmp_path / "all.cpp"
    own.write_text(library.TEXT)
    # vectors that only the library's own functions return
    command = [find_compiler().path, "-std=c++17", "-fsyntax-only", "-Wno-psabi"]
    done = subprocess.run(
        [*command, *WARNINGS, "-Werror", str(own)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

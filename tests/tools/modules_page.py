"""docs/modules.md from the modules' docstrings: python -m tests.tools.modules_page.

A module stands below all that it imports; the order of packages is that of the table in
docs/house.md.
"""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

from tests import ROOT

PACKAGE = ROOT / "fuseopt"
HOUSE = ROOT / "docs" / "house.md"
PAGE = ROOT / "docs" / "modules.md"
FILES = sorted(PACKAGE.rglob("*.py"))


def names(path: Path) -> list[str]:
    """The dotted name of a module, as a list: ["fuseopt", "ir", "graph"]."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(path: Path) -> Iterator[str]:
    """Full names of all that a file imports, wherever in the file it does."""
    package = names(path)
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield start
            yield from (f"{start}.{alias.name}" for alias in node.names)


def rooms() -> list[str]:
    """Packages, and modules beside them, in the import order of docs/house.md."""
    table = HOUSE.read_text(encoding="utf-8").split("\n## Rooms\n", 1)[1]
    rows = re.findall(r"^\| `([\w/.]+)` \|", table.split("\n## ", 1)[0], re.MULTILINE)
    return [row.removesuffix("/").removesuffix(".py").replace("/", ".") for row in rows]


def room(module: str, house: list[str]) -> str | None:
    """The innermost room that a full name lies in: fuseopt.codegen.cpp.loop ->
    codegen.cpp; None for other packages and for the front door."""
    inner = module.split(".")[1:] if module.split(".")[0] == "fuseopt" else []
    found = [".".join(inner[:n]) for n in range(len(inner), 0, -1)]
    return next((name for name in found if name in house), None)


def imported_modules() -> dict[str, list[str]]:
    """For each module which others of the package it imports; the front door is none.

    `from .ir.graph import Graph` imports `ir.graph`; `from .codegen import Target`,
    which names no module of `codegen`, imports the package.
    """
    modules = {".".join(names(path)): path for path in FILES}
    graph: dict[str, list[str]] = {}
    for module, path in modules.items():
        found = {_home(name, modules) for name in imports(path)}
        graph[module] = sorted(found - {module, "fuseopt", ""})
    del graph["fuseopt"]
    return graph


def _home(name: str, modules: dict[str, Path]) -> str:
    """The module that a full name of something imported belongs to."""
    if name in modules:
        # a package is imported only for what is none of its modules
        return name if modules[name].name != "__init__.py" else ""
    return name.rpartition(".")[0] if name.rpartition(".")[0] in modules else ""


def docstring(path: Path) -> str:
    """The first sentence of a module, on one line."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(doc.split("\n\n")[0].split()).replace("|", "\\|")


def page() -> str:
    """The text of docs/modules.md."""
    order = list(graphlib.TopologicalSorter(imported_modules()).static_order())
    house = rooms()
    paths = {".".join(names(path)): path for path in FILES}
    lines = [
        "# The modules",
        "",
        "What each module does, room by room, in import order: none imports one below",
        "it. `python -m tests.tools.modules_page` writes this page from the modules'",
        "docstrings; [house.md](house.md) says what the rooms are.",
    ]
    for name in house:
        inside = [
            x for x in order if room(x, house) == name and paths[x].stem[0] != "_"
        ]
        lines += ["", f"## {name}", ""]
        lines += ["| module | |", "|---|---|"]
        lines += [f"| `{x.split('.')[-1]}` | {docstring(paths[x])} |" for x in inside]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""The private names of torch that the package uses, read from its code.

`looked_up()`: the paths that it looks up with `find`. `elsewhere()`: where a line names
a private part of torch in another way.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import fuseopt

PACKAGE = Path(fuseopt.__file__).parent
#: Functions of lists are documented, though their names begin as private ones do.
DOCUMENTED = "_foreach_"
#: Ops of the dispatcher, whose names are those of their schemas.
OPS = "torch.ops."


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def looked_up() -> list[str]:
    """All paths such as "torch._dynamo.guards:GuardBuilder.ID_MATCH"."""
    found: set[str] = set()
    for _, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
                if text.startswith("torch") and " " not in text and _is_path(text):
                    found.add(text)
    return sorted(found)


def _is_path(text: str) -> bool:
    module, colon, _ = text.partition(":")
    parts = module.split(".")
    whole = not text.endswith((":", ".", "_"))
    private = bool(colon) or "._" in module
    return whole and private and all(x.isidentifier() for x in parts)


def _chain(node: ast.AST) -> str:
    """`torch._C._dynamo` of an expression; "" of any other."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id != "torch":
        return ""
    return ".".join(["torch", *reversed(names)])


def _is_private(chain: str) -> bool:
    return any(
        x.startswith("_") and not x.startswith(("__", DOCUMENTED))
        for x in chain.split(".")
    )


def elsewhere() -> list[str]:
    """Lines that name a private part of torch which is looked up nowhere."""
    known = {path.replace(":", ".") for path in looked_up()}
    known |= {x.rpartition(".")[0] for x in known}
    found: list[str] = []
    for path, tree in trees():
        where = path.relative_to(PACKAGE)
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and (node.module or "") == "torch":
                names = [f"torch.{x.name}" for x in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{x.name}" for x in node.names]
            elif isinstance(node, ast.Import):
                names = [x.name for x in node.names]
            elif isinstance(node, ast.Attribute):
                names = [_chain(node)]
            for name in names:
                private = name.startswith("torch") and _is_private(name)
                if private and not name.startswith(OPS):
                    if not any(f"{x}.".startswith(f"{name}.") for x in known):
                        found.append(f"{where}:{node.lineno}: {name}")
    return found

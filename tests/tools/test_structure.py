"""The house: who may import whom, what needs no torch, what no code may name."""

from __future__ import annotations

import ast
import graphlib
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.kept_state import changed_in_functions
from tests.tools.modules_page import (
    FILES,
    PACKAGE,
    PAGE,
    ROOT,
    imported_modules,
    imports,
    names,
    page,
    room,
    rooms,
)

HOUSE = rooms()
#: Only the rooms that see torch import what is private to it.
TORCH_SIDE = frozenset(HOUSE[HOUSE.index("compat") :])
TORCH_FREE = tuple(HOUSE[: HOUSE.index("compat")])
#: The meaning of the IR is written in torch.
IN_TORCH = {PACKAGE / "ir" / name for name in ("interpreter.py", "meaning.py")}
#: The public classes of torch.optim.
OPTIMIZERS = frozenset(
    (
        "adadelta",
        "adafactor",
        "adagrad",
        "adam",
        "adamax",
        "adamw",
        "asgd",
        "lbfgs",
        "muon",
        "nadam",
        "radam",
        "rmsprop",
        "rprop",
        "sgd",
        "sparseadam",
    )
)


@pytest.mark.parametrize("path", FILES, ids=lambda p: "/".join(names(p)[1:]) or "init")
def test_imports_go_one_way(path: Path) -> None:
    if path == PACKAGE / "__init__.py":
        return  # the front door opens every room
    own = room(".".join(names(path)), HOUSE)
    assert own is not None, f"{path.name} has no place in docs/house.md"
    for module in imports(path):
        other = room(module, HOUSE)
        if other is None or other == own:
            continue
        if f"fuseopt.{other}" == module and own.startswith(f"{other}."):
            continue  # a module beside the package's own, as in `from .. import x`
        assert HOUSE.index(other) < HOUSE.index(own), f"{own} imports {module}"
        assert other != "compat" or own in TORCH_SIDE, f"{own} imports compat"


def test_no_imports_go_round() -> None:
    """Within a room too, and imports for types alone count as all others do."""
    graphlib.TopologicalSorter(imported_modules()).prepare()


def test_every_room_has_modules() -> None:
    found = {room(".".join(names(path)), HOUSE) for path in FILES}
    assert found - {None} == set(HOUSE)
    beside = [p for p in PACKAGE.glob("*.py") if p.name != "__init__.py"]
    assert len(beside) <= 10


#: What a process keeps, by the file that defines it: the table of docs/house.md.
KEPT = dict(
    re.findall(
        r"^\| `([\w/]+\.py): (\w+)` \|",
        (ROOT / "docs" / "house.md").read_text("utf-8"),
        flags=re.MULTILINE,
    )
)


@pytest.mark.parametrize("path", FILES, ids=lambda p: "/".join(names(p)[1:]) or "init")
def test_no_module_keeps_what_its_functions_change(path: Path) -> None:
    own = KEPT.get(str(path.relative_to(PACKAGE)))
    known = {*KEPT.values(), "compat"} - {own}
    changed = changed_in_functions(ast.parse(path.read_text(encoding="utf-8")))
    # what a decorator registers while modules load
    registered = {"RULES"} if path == PACKAGE / "uniformity/functions.py" else set()
    assert changed.own - registered <= {own}
    assert changed.imported <= known


def test_what_a_process_keeps_is_there() -> None:
    assert len(KEPT) == 6
    for name, kept in KEPT.items():
        module = "fuseopt." + name.removesuffix(".py").replace("/", ".")
        assert hasattr(importlib.import_module(module), kept)


def test_the_test_of_what_is_kept_sees_what_it_should() -> None:
    text = """
from .. import compat
from ..session import session
FOUND = {}
_seen = []
log = get()
def f(x, FOUND):
    FOUND[x] = 1
def g(x):
    FOUND[x] = 1
    session.reports.append(x)
def h(x):
    _seen.append(x)
    seen = []
    seen.append(x)
def i():
    global count
    count = 2
    compat.patch_state.one.two = 1
    log.info("")
"""
    changed = changed_in_functions(ast.parse(text))
    assert changed.own == {"FOUND", "_seen", "count"}
    assert changed.imported == {"session", "compat"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: "/".join(names(p)[1:]) or "init")
def test_no_file_is_long(path: Path) -> None:
    """What has more lines has more than one idea."""
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 450


def test_the_page_of_modules_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "python -m tests.tools.modules_page"
    )


@pytest.mark.parametrize("name", TORCH_FREE)
def test_needs_neither_torch_nor_triton(name: str) -> None:
    files = [p for p in FILES if room(".".join(names(p)), HOUSE) == name]
    assert files, f"no file of {name}"
    for path in files:
        for module in imports(path):
            if path not in IN_TORCH:
                roots = ("torch", "triton")
                assert module.split(".")[0] not in roots, f"{path}: {module}"


def test_scheduling_and_codegen_do_not_load_torch() -> None:
    code = (
        "import sys, fuseopt.scheduler, fuseopt.codegen\n"
        "import fuseopt.ir.verifier, fuseopt.ir.printer\n"
        "print(*(m for m in ('torch', 'triton', 'sympy') if m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def names_in(folder: str) -> set[str]:
    return {p.stem for p in (PACKAGE / folder).glob("[!_]*.py")}


def imported(code: str) -> set[str]:
    """What a fresh process imports from when it sets `before`."""
    pytest.importorskip("torch")
    code = f"import sys, torch\n{code}\nprint(*sorted(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_entry_point_is_light() -> None:
    """Beyond `import torch`: what Dynamo calls, and nothing of anyone else."""
    found = imported(
        "from importlib.metadata import EntryPoint\n"
        "before = set(sys.modules)\n"
        "import fuseopt\n"
        "entry = 'fuseopt', 'fuseopt.backend:fuseopt', 'torch_dynamo_backends'\n"
        "EntryPoint(*entry).load()"
    )
    ours = {"fuseopt", "fuseopt.backend", "fuseopt.compiler", "fuseopt.compiler.entry"}
    assert found == ours


@pytest.mark.parametrize("given", ["__import__('fuseopt').fuseopt", "'fuseopt'"])
def test_what_watches_dynamo_is_light(given: str) -> None:
    """Before a compiled function is called, only what watches Dynamo is imported."""
    found = imported(
        "torch.compile(abs, backend='eager')\n"
        "torch._dynamo.list_backends()\n"
        "before = set(sys.modules)\n"
        f"torch.compile(abs, backend={given})"
    )
    ours = {module for module in found if module.startswith("fuseopt.")}
    watching = {f"fuseopt.compat.{name}" for name in names_in("compat")}
    entry = {"fuseopt.backend", "fuseopt.compiler", "fuseopt.compiler.entry"}
    entry |= {"fuseopt.compiler.trace_warnings", "fuseopt.config", "fuseopt.errors"}
    entry |= {"fuseopt.locks", "fuseopt.handlers"}
    assert ours == entry | {"fuseopt.compat", "fuseopt.compat.gc_pause"} | watching
    assert found - ours - sys.stdlib_module_names <= {"fuseopt"}


def test_the_first_graph_loads_the_house_alone() -> None:
    """What few graphs need comes when it is needed."""
    found = imported(
        "import torch._dynamo.backends.registry, torch.fx\n"
        "before = set(sys.modules)\n"
        "from fuseopt.backend import attach\n"
        "attach()\n"
        "import fuseopt.compiler.dispatch"
    )
    roots = {module.split(".")[0] for module in found}
    assert roots - sys.stdlib_module_names == {"fuseopt"}
    assert not found & {"rich", "torch._inductor.compile_fx"}


def words(path: Path) -> Iterator[tuple[str, int]]:
    """Identifiers and strings of a file, docstrings and comments left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if id(node) in prose and isinstance(node, ast.Constant):
            continue
        for field in ("id", "name", "attr", "arg", "asname", "module", "value"):
            text = getattr(node, field, None)
            if isinstance(text, str):
                for word in re.findall("[A-Za-z]+", text):
                    yield word.lower(), line
                    parts = re.findall("[A-Z]?[a-z]+|[A-Z]+(?![a-z])", word)
                    yield from ((part.lower(), line) for part in parts)


@pytest.mark.parametrize("path", FILES, ids=lambda p: "/".join(names(p)[1:]) or "init")
def test_no_code_names_an_optimizer(path: Path) -> None:
    found = {
        f"{word} in line {line}" for word, line in words(path) if word in OPTIMIZERS
    }
    assert not found


def test_all_public_optimizers_are_known() -> None:
    torch = pytest.importorskip("torch")
    public = {
        name.lower()
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    assert public - {"optimizer"} <= OPTIMIZERS


def test_the_name_test_sees_what_it_should(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        '"""Adam, in prose."""\n# SGD\nx = {"FusedAdamW": 1}\nr_prop = 2\n'
    )
    assert {w for w, _ in words(module)} & OPTIMIZERS == {"adam"}

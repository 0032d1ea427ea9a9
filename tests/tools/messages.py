"""Every message that the package can give: tests/golden/messages.txt.

    python -m tests.tools.messages      # prints them

The syntax tree of the code has them: texts of errors, refusals, warnings and Reports,
and reasons, which functions return or assign to a variable with such a name. An
expression in braces is computed when the message is given.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator

from tests import ROOT
from tests.tools.prose import Fault, faults_of

PACKAGE = ROOT / "fuseopt"
FILES = sorted(PACKAGE.rglob("*.py"))

#: Functions whose text is a warning.
WARNS = {"warn", "warn_once", "warning"}
#: Functions, besides classes of errors, whose text says why something is refused.
REFUSES = {
    *("refusal", "_refused", "broken", "anew", "skip", "restart", "LegalityRule"),
    *("require", "refuse", "_refuse", "NoMergePoint", "refuse_branch", "Unusable"),
    *("_extern", "Verdict", "Decision", "_elsewhere", "_eager", "leave_to_eager"),
    *("lack", "warn_of_step", "report_once", "_warn", "_give_up", "OutOfMemoryError"),
}
#: `python -m fuseopt doctor`.
REPORTS = {"Finding"}
#: Arguments and variables that hold a reason.
REASONS = {
    *("fallback", "traced", "why", "refusal", "reason", "instead", "where"),
    *("text", "message", "then", "detail", "advice", "limit", "hint", "mend"),
    *("ADVICE", "UNKNOWN"),
}
#: Rooms whose texts are code of a target, and files that print the IR.
CODE = ("codegen/", "ir/printer.py", "runtime/cpp/table", "runtime/triton/table")
#: Texts of torch, which an error repeats so that callers find them.
TORCHS = ("Inplace update to inference tensor",)
TITLES = {
    "warning": "Warnings",
    "error": "Errors and refusals",
    "reason": "Reasons, in warnings, errors and Reports",
}


def messages() -> dict[str, dict[str, list[str]]]:
    """Return the texts by kind (see TITLES), then by file."""
    errors = error_classes()
    found: dict[str, dict[str, list[str]]] = {kind: {} for kind in TITLES}
    for path in FILES:
        name = str(path.relative_to(PACKAGE))
        if name.startswith(CODE):
            continue
        for kind, text in messages_of(path.read_text(encoding="utf-8"), errors):
            texts = found[kind].setdefault(name, [])
            if text not in texts:
                texts.append(text)
    return found


def error_classes() -> set[str]:
    """Return the names of all classes of errors, the package's and Python's."""
    known = {
        name
        for name, value in vars(builtins).items()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    bases = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {_name(base) for base in node.bases}
    more = True
    while more:
        more = {name for name, of in bases.items() if of & known} - known
        known |= more
    return known


def messages_of(code: str, errors: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of each message in the code of a module."""
    tree = ast.parse(code)
    taken: set[ast.AST] = set()
    for node in ast.walk(tree):
        for kind, part in _parts(node, errors):
            for text in _texts(part):
                if text not in taken:
                    taken.add(text)
                    words = _text(text)
                    least = 2 if kind == "reason" else 1
                    if len(re.findall(r"[a-z]+", words)) > least:
                        yield kind, words


def _parts(node: ast.AST, errors: set[str]) -> Iterator[tuple[str, ast.AST]]:
    """Yield expressions that are messages, as far as one can see from a node."""
    if isinstance(node, ast.Call):
        name = _name(node.func)
        kind = ""
        if name in WARNS:
            kind = "warning"
        elif name in errors or name in REFUSES:
            kind = "error"
        elif name in REPORTS:
            kind = "reason"
        if kind:
            yield from ((kind, x) for x in node.args)
        for keyword in node.keywords:
            if keyword.arg in REASONS:
                yield kind or "reason", keyword.value
    elif isinstance(node, ast.Return) and node.value is not None:
        yield "reason", node.value
    elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = {_name(y) for x in targets for y in _flat(x)}
        if names & REASONS and node.value is not None:
            yield "reason", node.value


def _flat(target: ast.AST) -> list[ast.AST]:
    return [*target.elts] if isinstance(target, (ast.Tuple, ast.List)) else [target]


def _name(node: ast.AST) -> str:
    """Return the last part of a dotted name."""
    return getattr(node, "attr", None) or getattr(node, "id", "")


def _texts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the texts of an expression: of both sides of a choice or a sum."""
    if isinstance(node, ast.JoinedStr):
        yield node
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str) and re.search(r"[A-Za-z]", node.value):
            yield node
    elif isinstance(node, (ast.IfExp, ast.BoolOp, ast.BinOp, ast.Tuple, ast.List)):
        for child in ast.iter_child_nodes(node):
            yield from _texts(child)
    elif isinstance(node, ast.Dict):
        for value in node.values:
            yield from _texts(value)


def _text(node: ast.AST) -> str:
    """Return the text of a literal on one line, `{...}` for what is computed."""
    if isinstance(node, ast.JoinedStr):
        parts = (
            str(x.value)
            if isinstance(x, ast.Constant)
            else "{" + ast.unparse(x.value) + "}"
            for x in node.values
            if isinstance(x, (ast.Constant, ast.FormattedValue))
        )
        return " ".join("".join(parts).split())
    assert isinstance(node, ast.Constant)
    return " ".join(str(node.value).split())


def page() -> str:
    """Return the text of the golden file."""
    lines = ["Every message of the package: `pytest tests/tools/test_messages.py"]
    lines[0] += " --update-golden`."
    for kind, files in messages().items():
        lines += ["", f"== {TITLES[kind]} =="]
        for name, texts in sorted(files.items()):
            lines += ["", name, *(f"  {text}" for text in texts)]
    return "\n".join(lines) + "\n"


def faults() -> list[tuple[str, Fault]]:
    """Return the file and the fault of each message that breaks a rule of prose."""
    return [
        (name, fault)
        for files in messages().values()
        for name, texts in files.items()
        for text in texts
        if not text.startswith(TORCHS)
        for sentence in re.split(r"(?<=[.!?;])\s+", re.sub(r"\{[^}]*\}", "x", text))
        for fault in faults_of(sentence)
    ]


if __name__ == "__main__":
    print(page(), end="")

"""docs/matrix.md from tests/tools/matrix.json, which `make matrix` writes.

By itself, `python -m tests.tools.matrix_page` writes the page of the record as it is.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fuseopt
from fuseopt.config import CHECKED
from tests import ROOT

PAGE = ROOT / "docs" / "matrix.md"
README = ROOT / "README.md"
VERSIONS = re.compile("<!-- versions:begin -->.*?<!-- versions:end -->", re.DOTALL)
RECORD = Path(__file__).with_name("matrix.json")
#: What fuseopt says it works with.
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
(_MAJOR, _FIRST), (_, _END) = CHECKED
TORCHES = tuple(f"{_MAJOR}.{minor}" for minor in range(_FIRST, _END))
#: The pairs that users have: an old torch with the Pythons of its time.
PAIRS = tuple(
    (python, torch)
    for torch, pythons in {
        "2.11": ("3.10", "3.11", "3.12"),
        "2.12": ("3.10", "3.12"),
        "2.13": ("3.10", "3.11", "3.12", "3.13", "3.14"),
        "2.14": ("3.11", "3.12", "3.13"),
        "2.15": ("3.10", "3.11", "3.12", "3.13", "3.14"),
    }.items()
    for python in pythons
)

HEAD = """# Pythons and torches

This page shows which pairs of a Python and a torch passed fuseopt's tests.

`make matrix` builds the wheel. Away from the checkout it makes an empty environment for
each pair that users have, and one for the newest torch that pip finds. There it runs
`python -m fuseopt doctor`, and the tests that rely most on private parts of Python and
torch. `tests/tools/matrix.py` names these tests. A test that needs more than an older
torch has is skipped, and `tests/versions.py` names the reason. `make newest`, which CI
runs, does the same with the newest torch that `setup.cfg` admits.

"""
FREE_THREADED = """## Without the global lock

Torch 2.13.0 and 2.15.0, and Triton 3.7.1, have wheels for the free-threaded Python 3.14
(cp314t). fuseopt has not run there: no such interpreter could be had. `pyenv install
3.14.4t` and `uv python install 3.14t` need downloads that failed. Debian, up to its
experimental suite, has no package of it. Torch 2.13 has no wheel for the free-threaded
Python 3.13.
"""
COLUMNS = ("Python", "torch", "triton", "doctor", "passed", "skipped", "failed", "on")


@dataclass(frozen=True)
class Row:
    """A Python with a torch: what was found, what ran there; or why it was not run."""

    python: str
    torch: str
    python_found: str = ""
    torch_found: str = ""
    triton: str = ""
    build: str = ""
    doctor: str = ""
    passed: int = 0
    skipped: int = 0
    failures: tuple[str, ...] = ()
    reason: str = ""
    date: str = ""

    def but(self, **changes: Any) -> Row:
        """The same row with some cells changed."""
        today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        return dataclasses.replace(self, **{"date": today, **changes})


def read(path: Path) -> list[Row]:
    """The rows of a record; none where it is not there."""
    if not path.exists():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    return [Row(**{**x, "failures": tuple(x["failures"])}) for x in found]


def order(row: Row) -> tuple[int, ...]:
    """Where a row stands: by its versions, as numbers."""
    return tuple(int(x) for x in f"{row.python}.{row.torch}".split("."))


def versions(rows: Iterable[Row]) -> str:
    """README's table: each torch with its triton, and the Pythons that it ran with."""
    ran = sorted((x for x in rows if x.passed), key=order)
    lines = [
        line(("fuseopt", "torch", "triton", "Python", "tests")),
        "|---|---|---|---|---|",
    ]
    for torch in dict.fromkeys(sorted(x.torch for x in ran)):
        those = [x for x in ran if x.torch == torch]
        failed = sum(len(x.failures) for x in those)
        passed = sum(x.passed for x in those)
        cells = (
            fuseopt.__version__,
            torch,
            those[0].triton,
            ", ".join(x.python for x in those),
            f"{passed:,} passed, {failed} failed",
        )
        lines.append(line(cells))
    told = "[The matrix](docs/matrix.md) names what failed, and the pairs not run yet."
    return "\n".join([*lines, "", told])


def readme(text: str, rows: Iterable[Row]) -> str:
    """README with its table of versions as it is now."""
    block = f"<!-- versions:begin -->\n{versions(rows)}\n<!-- versions:end -->"
    return VERSIONS.sub(lambda _: block, text)


def write(rows: Iterable[Row]) -> None:
    """Write the record, the page and README's table."""
    ordered = sorted(rows, key=order)
    text = json.dumps([dataclasses.asdict(x) for x in ordered], indent=1)
    RECORD.write_text(text + "\n", encoding="utf-8")
    PAGE.write_text(page(ordered), encoding="utf-8")
    told = readme(README.read_text(encoding="utf-8"), ordered)
    README.write_text(told, encoding="utf-8")


def page(rows: Iterable[Row]) -> str:
    """The text of docs/matrix.md."""
    rows = list(rows)
    ran = [x for x in rows if not x.reason]
    parts = [HEAD + "\n".join(table(ran)) + "\n"]
    if any(x.build == "GPU" for x in ran):
        told = "¹ A build of torch for GPUs, on a machine that has none."
        parts.append(told + "\n")
    if failing := [x for x in ran if x.failures]:
        parts.append("## What failed\n\n" + "\n".join(failures(failing)) + "\n")
    if missing := [x for x in rows if x.reason]:
        parts.append("## What was not run\n\n" + "\n".join(reasons(missing)))
    parts.append(FREE_THREADED)
    return "\n".join(x.rstrip("\n") + "\n" for x in parts)


def table(rows: Iterable[Row]) -> Iterator[str]:
    """What ran, a line for each environment."""
    yield line(COLUMNS)
    yield "|---|---|---|---|" + "---:|" * 3 + "---|"
    for row in rows:
        torch = row.torch_found + ("¹" if row.build == "GPU" else "")
        counts = (row.passed, row.skipped, len(row.failures))
        yield line((row.python_found, torch, row.triton, row.doctor, *counts, row.date))


def line(cells: Iterable[object]) -> str:
    """A row of a table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def failures(rows: Iterable[Row]) -> Iterator[str]:
    """The tests that failed, below their environment."""
    for row in rows:
        yield f"Python {row.python}, torch {row.torch}:\n"
        for file, _, test in (name.partition("::") for name in row.failures):
            yield f"- `{file}`" + (f"\n  `{test[:82]}`" if test else "")
        yield ""


def reasons(rows: Iterable[Row]) -> Iterator[str]:
    """Why environments were not made, one line for all that share a reason."""
    alike: dict[str, list[Row]] = {}
    for row in rows:
        alike.setdefault(row.reason, []).append(row)
    for reason, those in alike.items():
        pythons: dict[str, list[str]] = {}
        for row in those:
            pythons.setdefault(row.python, []).append(row.torch)
        named = "; ".join(
            f"Python {python} with torch {', '.join(torches)}"
            for python, torches in pythons.items()
        )
        text = f"- {named}. {reason[0].upper()}{reason[1:]}."
        yield textwrap.fill(text, 88, subsequent_indent="  ")


if __name__ == "__main__":
    write(read(RECORD))

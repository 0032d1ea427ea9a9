"""docs/matrix.md is what its generator makes of the record, and names every pair."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from pathlib import Path

import pytest

from fuseopt.config import CHECKED
from tests import ROOT
from tests.tools import matrix, matrix_page
from tests.tools.matrix_page import (
    PAGE,
    PAIRS,
    PYTHONS,
    RECORD,
    TORCHES,
    Row,
    page,
    read,
)

RAN = Row("3.12", "2.13", "3.12.1", "2.13.0", "3.7.1", "CPU", "ok", 70, 2, date="2026")


def test_the_page_is_that_of_the_record() -> None:
    """To mend: `python -m tests.tools.matrix_page`."""
    assert page(read(RECORD)) == PAGE.read_text(encoding="utf-8")


def test_every_pair_has_run_or_has_its_reason() -> None:
    rows = read(RECORD)
    assert {(x.python, x.torch) for x in rows} == set(PAIRS)
    for row in rows:
        assert bool(row.passed) != bool(row.reason), row


def test_pip_installs_what_was_checked() -> None:
    text = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    first, end = (".".join(map(str, x)) for x in CHECKED)
    assert f"    torch >= {first}, < {end}\n" in text
    assert {torch for _, torch in PAIRS} == set(TORCHES)
    assert {python for python, _ in PAIRS} == set(PYTHONS)


def test_a_row_of_each_kind_is_told() -> None:
    failed = dataclasses.replace(
        RAN, torch="2.11", build="GPU", failures=("tests/a.py::test_b",)
    )
    missing = [Row("3.14", torch, reason="no interpreter") for torch in TORCHES]
    told = page([RAN, failed, *missing])
    lines = told.splitlines()
    assert "| 3.12.1 | 2.13.0 | 3.7.1 | ok | 70 | 2 | 0 | 2026 |" in lines
    assert "| 3.12.1 | 2.13.0¹ | 3.7.1 | ok | 70 | 2 | 1 | 2026 |" in lines
    assert "- `tests/a.py`\n  `test_b`\n" in told
    missed = "- Python 3.14 with torch 2.11, 2.12, 2.13, 2.14, 2.15. No interpreter."
    assert missed in lines
    assert "What failed" not in page([RAN])
    assert "What was not run" not in page([RAN])


def test_a_record_is_read_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix_page, "RECORD", tmp_path / "matrix.json")
    monkeypatch.setattr(matrix_page, "PAGE", tmp_path / "matrix.md")
    front = tmp_path / "README.md"
    front.write_text("a\n<!-- versions:begin -->\n<!-- versions:end -->\nb\n")
    monkeypatch.setattr(matrix_page, "README", front)
    early = Row("3.9", "2.13", reason="no interpreter")
    matrix_page.write([RAN, early])
    told = front.read_text().splitlines()
    assert (told[0], told[-1]) == ("a", "b")
    assert any("| 2.13 | 3.7.1 | 3.12 | 70 passed, 0 failed |" in x for x in told)
    assert read(tmp_path / "matrix.json") == [early, RAN]
    assert (tmp_path / "matrix.md").read_text("utf-8") == page([early, RAN])
    assert read(tmp_path / "none.json") == []


def test_what_a_build_for_gpus_asks_for() -> None:
    asked = ("filelock", "nvidia-cudnn-cu13==9.20.0.48", "triton==3.7.1")
    assert matrix.Torch("2.13.0", "", asked).for_gpu
    assert not matrix.Torch("2.13.0+cpu", "", ("filelock", "networkx>=2.5.1")).for_gpu


def test_what_a_wheel_asks_for(tmp_path: Path) -> None:
    """Without extras, whose packages a user need not have."""
    wheel = tmp_path / "fuseopt-0.1.0-py3-none-any.whl"
    told = "Requires-Dist: torch>=2.11\nRequires-Dist: rich\n"
    told += 'Requires-Dist: pytest; extra == "test"\n'
    with zipfile.ZipFile(wheel, "w") as opened:
        opened.writestr("fuseopt-0.1.0.dist-info/METADATA", told)
    assert matrix.asked_by(wheel) == ["torch", "rich"]


def test_the_whole_name_of_what_failed_is_kept() -> None:
    told = "1 passed\nFAILED tests/a.py::test_b[a package's Lion] - assert 1 == 2\n"
    told += "ERROR tests/c.py\nFAILED tests/a.py::test_d\n"
    first = "tests/a.py::test_b[a package's Lion]"
    assert matrix.failed(told) == [first, "tests/c.py", "tests/a.py::test_d"]


def test_the_tests_of_the_matrix_exist() -> None:
    for name in matrix.TESTS:
        assert (matrix.ROOT / name).exists(), name


def test_what_is_not_there_is_told_in_its_own_words() -> None:
    with pytest.raises(matrix.NotToBeHad, match=r"^pip: nothing matches$"):
        matrix.done(
            ["bash", "-c", "echo ERROR: nothing matches >&2; echo note >&2; exit 1"],
            "pip",
        )
    with pytest.raises(matrix.NotToBeHad, match="no interpreter"):
        matrix.interpreter("2.99")


def test_the_record_names_no_place() -> None:
    text = RECORD.read_text(encoding="utf-8")
    assert json.loads(text)
    assert "/tmp" not in text
    assert "http" not in text

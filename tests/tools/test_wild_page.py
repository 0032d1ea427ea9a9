"""docs/wild.md has a row for each training; its times are nobody's promise."""

from __future__ import annotations

import pytest

from tests.tools.wild_page import COLUMNS, PAGE, rows
from tests.wild.trained import STEPS
from tests.wild.trainings import TRAININGS, Training

ROWS = rows(PAGE.read_text(encoding="utf-8"))
MEND = "python -m tests.tools.wild_page"


def test_the_rows_are_the_trainings() -> None:
    assert [*ROWS] == [training.name for training in TRAININGS], MEND


def test_ten_packages_with_what_each_saves() -> None:
    """One line, or one for each optimizer, and figures in the units of the page."""
    packages = {cells[1].split()[0] for cells in ROWS.values()} - {"–"}
    assert len(packages) >= 10
    for cells in ROWS.values():
        launches, share, eager, compiled = cells[4:8]
        assert int(launches) < int(cells[3])
        assert share.endswith("%")
        assert eager.endswith(" ms")
        assert compiled.endswith(" ms")


@pytest.mark.parametrize("training", TRAININGS, ids=lambda training: training.name)
def test_lines_and_launches_are_those_of_the_tests(training: Training) -> None:
    cells = ROWS[training.name]
    assert len(cells) == len(COLUMNS)
    assert int(cells[2]) == training.lines
    # a tail's first step is not compiled
    assert int(cells[4]) == round(training.launches / (STEPS - bool(training.compiled)))

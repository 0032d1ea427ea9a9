"""Shares of the slow tests: each test is in one, and a commit names one."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests import ROOT
from tests.tools.share import parsed, quick_of, share_of


def test_every_test_is_in_one_share() -> None:
    tests = [f"tests/test_x.py::test_y[{k}]" for k in range(200)]
    shares = [share_of(test, 10) for test in tests]
    assert set(shares) == set(range(10))
    assert shares == [share_of(test, 10) for test in tests]


def test_a_commit_names_a_share() -> None:
    assert {parsed("10", f"{k:x}")[0] for k in range(100)} == set(range(10))
    assert parsed("3/10", "ff") == (3, 10)


@pytest.mark.parametrize("share", ["x", "0", "10/10", "1/", "-1/3"])
def test_what_is_no_share_is_refused(share: str) -> None:
    with pytest.raises(pytest.UsageError, match="--share"):
        parsed(share, "ff")


@pytest.mark.parametrize("cases", [1, 2, 5, 200])
@pytest.mark.parametrize("many", [2, 10, 50])
def test_of_a_family_few_cases_are_quick_and_never_none(cases: int, many: int) -> None:
    names = [f"tests/test_x.py::test_y[{k}]" for k in range(cases)]
    quick = quick_of(names, many)
    assert quick <= set(names)
    assert len(quick) == max(1, round(cases / many))
    assert quick == quick_of(names[::-1], many)


@pytest.mark.slow
def test_shares_are_all_of_a_file() -> None:
    """Collected in a process of its own, as `make test-share` does."""
    found: list[str] = []
    file = "tests/tools/test_structure.py"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--collect-only", file]
    for k in range(3):
        done = subprocess.run(
            [*command, "-p", "tests.tools.share", "--share", f"{k}/3"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found += [x for x in done.stdout.split("\n") if x.startswith(file)]
    whole = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    every = [x for x in whole.stdout.split("\n") if x.startswith(file)]
    assert sorted(found) == sorted(every)
    assert len(every) > 100


@pytest.mark.slow
def test_of_every_family_a_case_is_quick() -> None:
    """Else `make test` would leave out all that the test asks."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--collect-only"]
    found = []
    for which in (["-m", "not slow"], []):
        done = subprocess.run(
            [*command, *which, "tests"], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        cases = [x for x in done.stdout.split("\n") if "::" in x]
        found.append({x.split("[")[0] for x in cases})
    quick, every = found
    families = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text(encoding="utf-8")
        marked = re.findall(r"^@pytest.mark.family.*?^def (\w+)", text, re.M | re.S)
        families |= {f"{name}::{function}" for function in marked}
    assert len(families) > 50
    assert families <= every
    assert sorted(families - quick) == []

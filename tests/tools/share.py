"""A share of the tests, another one for each commit: `-p tests.tools.share --share 10`.

The slow tests take longer than a run of CI should. Of ten shares each run takes the one
that its commit's hash names, so that every test is asked now and then, and a run of the
same commit asks the same ones. The share is printed: `--share 3/10` runs it again.
"""

from __future__ import annotations

import hashlib
import subprocess

import pytest

from tests import ROOT


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share", default="", help="N: one of N shares, or K/N: share K of them"
    )


def commit() -> str:
    """The hash of the commit that is checked out; "0" where there is no repository."""
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "0"


def parsed(share: str, head: str) -> tuple[int, int]:
    """Which share, of how many. Raises UsageError for what is neither N nor K/N."""
    k, _, n = share.rpartition("/")
    try:
        many = int(n)
        which = int(k) if k else int(head, 16) % many
    except (ValueError, ZeroDivisionError):
        raise pytest.UsageError(f"--share takes N or K/N, not {share!r}") from None
    if not 0 <= which < many:
        raise pytest.UsageError(f"--share {share}: there is no such share")
    return which, many


def share_of(test: str, many: int) -> int:
    """The share that a test belongs to."""
    return int(hashlib.sha256(test.encode()).hexdigest(), 16) % many


def quick_of(cases: list[str], many: int) -> set[str]:
    """Of the cases of a family, one in `many`, and at least one: those that have the
    least hashes.
    """
    keep = max(1, round(len(cases) / many))
    return set(sorted(cases, key=lambda x: share_of(x, 2**64))[:keep])


def pytest_report_header(config: pytest.Config) -> str | None:
    share = config.getoption("--share")
    if not share:
        return None
    which, many = parsed(share, commit())
    return f"share {which} of {many}: run it again with --share {which}/{many}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    share = config.getoption("--share")
    if not share:
        return
    which, many = parsed(share, commit())
    others = [x for x in items if share_of(x.nodeid, many) != which]
    if others:
        items[:] = [x for x in items if share_of(x.nodeid, many) == which]
        config.hook.pytest_deselected(items=others)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a failed test at once: a run that is cut off never comes to its summary."""
    if report.failed:
        print(f"\nfailed: {report.nodeid}", flush=True)

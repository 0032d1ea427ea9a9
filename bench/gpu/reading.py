"""In: the figures of a section's cases. Out: what their summary and the page count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from bench.results import Figures


class Outcome(NamedTuple):
    """How cases that compare bits ended, by name: the message of those that failed, the
    ulps of those that are known to differ, the reason of those that did not run; and
    how many have eager's bits.
    """

    failed: dict[str, str]
    known: dict[str, float]
    missing: dict[str, str]
    exact: int


def outcome(done: Mapping[str, Figures]) -> Outcome:
    """Sort cases by how they ended."""
    failed = {n: f["failed"] for n, f in done.items() if "failed" in f}
    known = {n: f["ulp"] for n, f in done.items() if f.get("ulp")}
    missing = {n: f["not_run"] for n, f in done.items() if "not_run" in f}
    exact = len(done) - len(failed) - len(known) - len(missing)
    return Outcome(failed, known, missing, exact)


def rivals(contenders: Mapping[str, Figures]) -> dict[str, Figures]:
    """The contenders that are neither fuseopt nor a bound."""
    ours = ("fuseopt", "copy", "floor")
    return {n: f for n, f in contenders.items() if not n.startswith(ours)}


def succeeded(
    done: Mapping[str, Figures], lines: list[str]
) -> Iterator[tuple[str, Any]]:
    """Yield the cases that did not fail; of the others add a line to `lines`."""
    for name, f in done.items():
        if "failed" in f:
            lines.append(f"FAILED {name}: {f['failed'][:150]}")
        else:
            yield name, f

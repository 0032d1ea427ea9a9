"""In: the figures of a case. Out: the JSON file of this machine and torch version.

    {"environment": {...}, "cases": {"step/resnet50/AdamW/float32": {...}, ...}}

A case is written as soon as it is measured, so that a run that was interrupted goes on
where it stopped: `done` says what was measured with the code as it is.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from bench.environment import Environment, code_version, environment, file_name, today

FOLDER = Path(__file__).parent / "results"

Figures = dict[str, Any]


class Results:
    """The results file of one environment; cases of another one are not kept."""

    def __init__(self, path: Path, now: Environment, code: str) -> None:
        self.path = path
        self.environment = now
        self.code = code
        self.cases: dict[str, Figures] = {}
        if path.exists():
            kept = read(path)
            if kept["environment"] == now:
                self.cases = kept["cases"]

    def done(self, case: str) -> bool:
        """Was this case measured to its end, with the code as it is now?"""
        return self.cases.get(case, {}).get("code") == self.code

    def put(self, case: str, figures: Figures) -> None:
        """Write a case, at once and whole."""
        self.cases[case] = {"code": self.code, "date": today(), **rounded(figures)}
        content = {
            "environment": self.environment,
            "cases": dict(sorted(self.cases.items())),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(f".{os.getpid()}.part")
        unfinished.write_text(dumped(content))
        unfinished.replace(self.path)


def results(device: str = "cpu", folder: Path = FOLDER) -> Results:
    """Return the results file of this machine, torch version and device."""
    now = environment(device)
    return Results(folder / file_name(now), now, code_version())


def read(path: Path) -> Figures:
    """Return the content of a results file."""
    return json.loads(path.read_text())


def rounded(value: Any) -> Any:
    """Return figures with the four digits that a measurement may have."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(inner) for inner in value]
    return value


def dumped(content: Any) -> str:
    """Return JSON with a line for each contender: small files, readable differences."""
    return _lines(content, 0, ("environment", "cases", "contenders")) + "\n"


def _lines(value: Any, depth: int, opened: tuple[str, ...]) -> str:
    """The first two levels, and what `opened` names, have a line for each entry."""
    inner = " " * (depth + 1)
    lines = (
        f"{inner}{json.dumps(key)}: "
        + (
            _lines(item, depth + 1, opened)
            if isinstance(item, dict) and item and (key in opened or depth == 1)
            else json.dumps(item)
        )
        for key, item in value.items()
    )
    return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}"

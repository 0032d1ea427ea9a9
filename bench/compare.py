"""In: two results files. Out: where exact counts differ, and where times moved.

    python -m bench compare OLD NEW

Counts (launches, builds, bytes, ...) do not depend on how busy a machine is: where they
differ, the exit status is 1. Times only warn, and only as ratios within one run: a
step's to the copy beside it, a first step's to the older one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.results import Figures

EXACT = (
    "tensors elements least_bytes launches externs graphs graph_breaks builds bytes "
    "source_bytes imports_inductor fallback"
).split()
#: how far a ratio may move before it is worth a line
STEP, FIRST = 1.1, 1.3


@dataclass
class Comparison:
    """What differs. `failures` are of exact counts; `warnings` of anything else."""

    failures: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    cases: int = 0


def compare(old: Figures, new: Figures) -> Comparison:
    """Compare the content of two results files, case by case."""
    found = Comparison()
    for key, value in old["environment"].items():
        if new["environment"].get(key) != value:
            now = new["environment"].get(key)
            found.warnings.append(f"environment: {key} was {value}, is {now}")
    for name, before in old["cases"].items():
        after = new["cases"].get(name)
        if after is None:
            found.warnings.append(f"{name}: not measured any more")
            continue
        found.cases += 1
        _counts(found, name, before, after)
        _first(found, name, before, after)
        for who, told in _parts(before).items():
            now = _parts(after).get(who)
            if now is None or ("skipped" in now) != ("skipped" in told):
                reason = (now or told).get("skipped", "left out")
                found.warnings.append(f"{name}: {who} ran in one of the two: {reason}")
                continue
            _counts(found, f"{name}: {who}", told, now)
            _first(found, f"{name}: {who}", told, now)
            _step(found, f"{name}: {who}", (before, told), (after, now))
    return found


def _parts(case: Figures) -> dict[str, Figures]:
    """A case's contenders; of a first step, the cold one and the warm one."""
    apart = {key: case[key] for key in ("cold", "warm") if key in case}
    return apart | case.get("contenders", {})


def _counts(found: Comparison, name: str, before: Figures, after: Figures) -> None:
    if "cached" in before or "cached" in after:
        return  # what was compiled earlier is not counted
    for key in EXACT:
        if key in before and before[key] != after.get(key):
            now = after.get(key, "missing")
            found.failures.append(f"{name}: {key} was {before[key]}, is {now}")


def _step(
    found: Comparison,
    name: str,
    before: tuple[Figures, Figures],
    after: tuple[Figures, Figures],
) -> None:
    pair = []
    for case, told in (before, after):
        copied = case.get("contenders", {}).get("copy", {}).get("p50")
        if told.get("p50") is None or copied is None:
            return
        pair.append(told["p50"] / copied)
    _ratio(found, f"{name}: time ÷ the copy's", *pair, STEP)


def _first(found: Comparison, name: str, before: Figures, after: Figures) -> None:
    for key in ("first_step_seconds", "backend_seconds", "host_microseconds"):
        if before.get(key) and after.get(key):
            _ratio(found, f"{name}: {key}", before[key], after[key], FIRST)


def _ratio(found: Comparison, name: str, old: float, new: float, most: float) -> None:
    if not 1 / most <= new / old <= most:
        found.warnings.append(f"{name}: {old:.3g} -> {new:.3g} ({new / old:.2f}x)")

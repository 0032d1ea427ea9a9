"""A process that does cases of one section, and says so line by line.

On stdin a line of JSON: the place, the section, the cases. On stdout lines of JSON:
{"begin": case}, {"case": ..., "figures" or "failed": ...}, and {"ready": true} when all
are prepared and only wait for their turn to measure, which is a line on stdin. A case
that fails does not end the others; one that kills the process is known by its "begin".
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from bench.results import Figures, rounded


def main() -> None:
    """Read what to do, do it, tell."""
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def tell(**content: Any) -> None:
        print(json.dumps(content), file=told, flush=True)

    task = json.loads(sys.stdin.readline())
    serve(task, tell, sys.stdin.readline)


def serve(
    task: dict[str, Any],
    tell: Callable[..., None],
    wait: Callable[[], object],
) -> None:
    """Do the cases of a task; `tell(**content)` is the answer, `wait()` the turn."""
    from bench.gpu.place import place_of

    place = place_of(task["place"])
    place.prepare()
    section = importlib.import_module(task["module"])
    measures: list[tuple[str, Callable[[], Figures]]] = []
    for case in task["cases"]:
        name = case["name"]
        tell(begin=name)
        with _Failures(name, tell) as kept:
            kept.measure = section.prepare(case, place)
        place.free()  # what making it ready took; others need the memory
        if kept.measure is None:
            continue
        if section.ALONE:
            measures.append((name, kept.measure))
        else:
            _measure(name, kept.measure, tell)
            kept.measure = None
            place.free()
    if not section.ALONE:
        return
    tell(ready=True)
    wait()
    while measures:
        name, measure = measures.pop(0)
        tell(begin=name)
        _measure(name, measure, tell)
        del measure
        place.free()


def _measure(name: str, measure: Callable[[], Figures], tell: Any) -> None:
    begin = time.perf_counter()
    with _Failures(name, tell):
        figures = measure()
        seconds = time.perf_counter() - begin
        tell(case=name, figures=rounded({**figures, "seconds": seconds}))


class _Failures:
    """Tells of an exception instead of raising it."""

    def __init__(self, name: str, tell: Callable[..., None]) -> None:
        self.name = name
        self.tell = tell
        self.measure: Callable[[], Figures] | None = None

    def __enter__(self) -> _Failures:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        lines = traceback.format_exception(error)
        text = f"{type(error).__name__}: {str(error).strip()}"
        more = {"cause": error.cause} if getattr(error, "cause", "") else {}
        trace_text = "".join(lines)[-1500:]
        self.tell(case=self.name, failed=text[:1500], trace=trace_text, **more)
        return True


if __name__ == "__main__":
    main()

"""The ways that a run takes through its code are those of every run."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from fuseopt.compiler import code_paths
from fuseopt.compiler.code_paths import Paths

TEXT = """
def rate(t):
    return 1 - 0.9**t if t < 3 else 0.5

def step(n):
    total = 0.0
    for k in range(n):
        total += rate(k)
    return total
"""


def made() -> Any:
    """A function that never ran."""
    names: dict[str, Any] = {}
    exec(compile(TEXT, "a_step_of_mine.py", "exec"), names)
    return names["step"]


def taken(step: Any, n: int) -> set[Any]:
    with Paths() as paths:
        step(n)
    return {(code.co_name, a, b) for code, a, b in paths.taken}


def test_the_first_run_is_seen_as_every_other() -> None:
    """From Python 3.12 on a trace function saw nothing of code that was new to it, and
    steps that keep numbers were traced for all lanes.
    """
    step = made()
    first = taken(step, 3)
    assert {name for name, _, _ in first} == {"step", "rate"}
    assert len(first) > 15
    assert taken(step, 3) == first
    assert taken(made(), 3) == first
    assert taken(step, 2) == first
    assert taken(step, 4) > first


@pytest.mark.skipif(sys.version_info < (3, 12), reason="nothing is monitored there")
def test_nobody_monitors_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    def free() -> bool:
        tools = map(code_paths.monitoring.get_tool, code_paths.TOOLS)
        return all(tool is None for tool in tools)

    step = made()
    taken(step, 3)
    assert free()
    with pytest.raises(TypeError), Paths():
        step("no number")
    assert free()
    with Paths() as outer, Paths() as inner:
        step(3)
    assert free()
    assert inner.taken
    assert not outer.taken - inner.taken
    monkeypatch.setattr(code_paths, "TOOLS", ())
    step(1)
    taken(step, 3)  # as before 3.12


def test_other_threads_and_what_is_hidden_are_not_seen() -> None:
    step = made()
    with Paths() as paths:
        other = threading.Thread(target=step, args=(4,))
        other.start()
        other.join()
        paths.hidden(step, 4)
        step(3)
    seen = {(code.co_name, a, b) for code, a, b in paths.taken}
    assert seen == taken(made(), 3)

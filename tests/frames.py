"""Which functions a call enters, and which lines it runs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import CodeType
from typing import Any


def entered(call: Callable[[], object]) -> list[CodeType]:
    """The functions of Python that a call enters, in this thread, in their order."""
    codes: list[CodeType] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            codes.append(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return codes


def lines(call: Callable[[], object], inside: str = "") -> Counter[tuple[str, int]]:
    """How often a call runs each line of Python, in this thread. `inside`: a part of
    the path of the files that count.
    """
    found: Counter[tuple[str, int]] = Counter()

    def note(frame: Any, event: str, _: Any) -> Any:
        if inside not in frame.f_code.co_filename:
            return None
        if event == "line":
            found[frame.f_code.co_filename, frame.f_lineno] += 1
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        call()
    finally:
        sys.settrace(before)
    return found

"""Which functions a call enters."""

from __future__ import annotations

import sys
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

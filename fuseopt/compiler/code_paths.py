"""The ways that a run of a step takes through its code."""

from __future__ import annotations

import os
import sys
import sysconfig
import types
from collections.abc import Callable
from typing import Any

import torch

#: Code that is nobody's own: the ways through it are not noted.
KNOWN = (
    os.path.dirname(torch.__file__) + os.sep,
    sysconfig.get_path("stdlib") + os.sep,
    "<frozen",
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
)
SITE = os.sep + "site-packages" + os.sep
PLAIN = (int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device)


def every_code(code: types.CodeType) -> list[types.CodeType]:
    """Code, and what is defined in it."""
    inner = [x for x in code.co_consts if isinstance(x, types.CodeType)]
    return [code, *(c for x in inner for c in every_code(x))]


def is_known(code: types.CodeType) -> bool:
    """Does code come from torch or from Python's own library?"""
    name = code.co_filename
    if name.startswith(KNOWN[1]):
        return SITE not in name or name.startswith(KNOWN[0])
    return name.startswith(KNOWN)


class Paths:
    """The ways that runs take through code that is not torch's: pairs of places.

    A context; `hidden(f)` runs f unseen within it.
    """

    def __init__(self) -> None:
        self.taken: set[tuple[types.CodeType, int, int]] = set()
        self._before: Any = None
        # by identity, for a code object's hash goes over all of it
        self._known: dict[int, types.CodeType] = {}

    def _trace(self, frame: types.FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if event != "call" or id(code) in self._known:
            return None
        if is_known(code):
            self._known[id(code)] = code
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        taken = self.taken
        last = -1

        def step(frame: types.FrameType, event: str, _: Any) -> Any:
            nonlocal last
            now = frame.f_lasti
            taken.add((code, last, now))
            last = now
            return step

        return step

    def __enter__(self) -> Paths:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def hidden(self, f: Callable[..., Any], *args: Any) -> Any:
        """f(*args), whose own way is not noted."""
        sys.settrace(None)
        try:
            return f(*args)
        finally:
            sys.settrace(self._trace)

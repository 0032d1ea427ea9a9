"""Record the paths that runs of a step take through its code, by instructions."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import types
from collections.abc import Callable
from typing import Any

import torch

#: Folders of torch, Python and fuseopt: paths through their code are not recorded.
KNOWN = (
    os.path.dirname(torch.__file__) + os.sep,
    sysconfig.get_path("stdlib") + os.sep,
    "<frozen",
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
)
SITE = os.sep + "site-packages" + os.sep
#: `sys.monitoring`, from Python 3.12 on, and its general-purpose tool ids.
monitoring: Any = getattr(sys, "monitoring", None)
TOOLS = (3, 4)
PLAIN = (int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device)


def every_code(code: types.CodeType) -> list[types.CodeType]:
    """Return code, and all code that is defined in it."""
    inner = [x for x in code.co_consts if isinstance(x, types.CodeType)]
    return [code, *(c for x in inner for c in every_code(x))]


def is_known(code: types.CodeType) -> bool:
    """Does code belong to torch, Python's own library or fuseopt?"""
    name = code.co_filename
    if name.startswith(KNOWN[1]):
        return SITE not in name or name.startswith(KNOWN[0])
    return name.startswith(KNOWN)


class Paths:
    """Records paths through the user's code. `taken`: (code, instruction, next
    instruction).

    A context manager; `hidden(f)` runs f unrecorded within it. From Python 3.12 on, a
    trace function gets no instruction events for code that runs for the first time.
    `sys.monitoring` is used there.
    """

    def __init__(self) -> None:
        self.taken: set[tuple[types.CodeType, int, int]] = set()
        self._before: Any = None
        # by id, since the hash of a code object takes time
        self._known: dict[int, types.CodeType] = {}
        self._watched: dict[int, types.CodeType] = {}
        #: the last instruction of each frame, by id (a later frame may have the same)
        self._last: dict[int, int] = {}
        self._tool: int | None = None
        self._thread = 0

    def _trace(self, frame: types.FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if event != "call" or id(code) in self._known:
            return None
        if id(code) not in self._watched and is_known(code):
            self._known[id(code)] = code
            return None
        if self._tool is not None:
            if id(code) not in self._watched:
                self._watched[id(code)] = code
                monitoring.set_local_events(
                    self._tool, code, monitoring.events.INSTRUCTION
                )
            self._last[id(frame)] = -1
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

    def _at(self, code: types.CodeType, place: int) -> None:
        """Record an instruction that is about to run, in this thread or another."""
        if threading.get_ident() == self._thread and sys.gettrace() is not None:
            frame = id(sys._getframe(1))
            self.taken.add((code, self._last.get(frame, -1), place))
            self._last[frame] = place

    def __enter__(self) -> Paths:
        self._thread = threading.get_ident()
        self._tool = _free_tool()
        if self._tool is not None:
            monitoring.use_tool_id(self._tool, "fuseopt")
            instruction = monitoring.events.INSTRUCTION
            monitoring.register_callback(self._tool, instruction, self._at)
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
        if self._tool is not None:
            for code in self._watched.values():
                monitoring.set_local_events(self._tool, code, 0)
            instruction = monitoring.events.INSTRUCTION
            monitoring.register_callback(self._tool, instruction, None)
            monitoring.free_tool_id(self._tool)
            self._watched.clear()
            self._tool = None

    def hidden(self, f: Callable[..., Any], *args: Any) -> Any:
        """Return f(*args) without recording its path."""
        sys.settrace(None)
        try:
            return f(*args)
        finally:
            sys.settrace(self._trace)


def _free_tool() -> int | None:
    """Return a free tool id of sys.monitoring; None if there is none."""
    if monitoring is None:
        return None
    return next((x for x in TOOLS if monitoring.get_tool(x) is None), None)

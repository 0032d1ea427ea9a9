"""Output of torch's compilers for TORCH_COMPILE_DEBUG and TORCH_TRACE."""

from __future__ import annotations

import os
from collections.abc import Callable

from .capability import probed
from .names import find, takes


@probed(
    "debug-files",
    "dumps lie beside those of TORCH_COMPILE_DEBUG, and tlparse shows them",
    "compile_debug and TORCH_TRACE show nothing of fuseopt's",
)
def DEBUG_FILES() -> None:
    takes(find("torch._dynamo.utils:get_debug_dir"))
    takes(find("torch._logging._internal:trace_structured"), "name", "metadata_fn")


def debug_folder() -> str | None:
    """Return a folder beside theirs, for this run; None if torch names none.

    Relies on the function that names it.
    """
    get_debug_dir = find("torch._dynamo.utils:get_debug_dir", None)
    if get_debug_dir is None or not DEBUG_FILES.available():
        return None
    return os.path.join(get_debug_dir(), "fuseopt")


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Add a text to the trace of TORCH_TRACE, which tlparse shows.

    `text` is called only if the trace is on. Relies on the function of torch's
    compilers for this; if it differs, nothing is written.
    """
    if not DEBUG_FILES.available():
        return
    find("torch._logging._internal:trace_structured")(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=text,
        expect_trace_id=False,
    )

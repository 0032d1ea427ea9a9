"""Where torch's compilers write what TORCH_COMPILE_DEBUG and TORCH_TRACE ask for."""

from __future__ import annotations

import os
from collections.abc import Callable


def debug_folder() -> str | None:
    """A folder beside theirs, for this run; None where torch does not say where.

    Relies on the function that names it (torch 2.11.0, 2.13.0).
    """
    try:
        from torch._dynamo.utils import get_debug_dir
    except ImportError:
        return None
    return os.path.join(get_debug_dir(), "fuseopt")


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Put a text into the trace that TORCH_TRACE asks for, and tlparse shows.

    `text` is called where somebody asked. Relies on the function with which torch's
    compilers do so (torch 2.11.0, 2.13.0); where it is another, nothing is written.
    """
    try:
        from torch._logging._internal import trace_structured
    except ImportError:
        return
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=text,
        expect_trace_id=False,
    )

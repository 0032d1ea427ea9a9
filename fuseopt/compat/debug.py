"""Where torch's compilers write what TORCH_COMPILE_DEBUG asks for."""

from __future__ import annotations

import os


def debug_folder() -> str | None:
    """A folder beside theirs, for this run; None where torch does not say where.

    Relies on the function that names it (torch 2.11.0, 2.13.0).
    """
    try:
        from torch._dynamo.utils import get_debug_dir
    except ImportError:
        return None
    return os.path.join(get_debug_dir(), "fuseopt")

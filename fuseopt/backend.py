"""Entry point of the backend: Dynamo loads `fuseopt.backend:fuseopt` for the name.

Importing this module imports the object that Dynamo calls, and no compiler code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .compiler.entry import BACKEND, attach, attach_to_loaded, take_bound_steps

if TYPE_CHECKING:
    import torch

    from .compat import CompileArguments

    fuseopt = BACKEND


def __getattr__(name: str) -> Any:
    """Return the backend when Dynamo loads `fuseopt.backend:fuseopt` by its name."""
    if name != "fuseopt":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    attach_to_loaded()
    return BACKEND


def _take(step: Any, optimizer: torch.optim.Optimizer, given: CompileArguments) -> Any:
    from .compat import disabled
    from .errors import UnsupportedInput
    from .isolate.compile import compile_bound

    # Dynamo would pass over a step that torch has marked, without a word
    reason = disabled(optimizer)
    if reason:
        raise UnsupportedInput(reason)
    return compile_bound(step, optimizer, given)


take_bound_steps(_take)

__all__ = ["BACKEND", "attach", "fuseopt"]

"""Compile optimizer steps: `torch.compile(opt.step, backend="fuseopt")`.

    compile(opt)        return the optimizer, its step compiled separately
    explain(opt)        plan a step without running it
    tail(opt, ...)      everything after backward(): unscale, clip, step, average
    clip_grad_norm_     torch's function, in two launches
    NormGroup(params)   parameters whose gradients processes share, for clips
    in_backward(...)    an optimizer that steps during the backward
    refresh(opt)        refresh the numbers of a step in your own CUDA graph
    full_precision(d)   unpack a state dict, for the plain optimizer
    reports()           Reports of this process, oldest first
    Report              describes what one graph was compiled to
    errors              one class for each kind of failure

Names load on first use, so that parts without torch can be imported alone.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from . import errors
    from .backend import fuseopt
    from .backward.handle import in_backward
    from .compiler.report import Report
    from .compiler.session import reports
    from .explanation import explain
    from .isolate.compile import compile
    from .isolate.refresh import refresh
    from .storage.checkpoints import full_precision
    from .storage.rule import Storage
    from .tails.clip import clip_grad_norm_
    from .tails.make import tail
    from .tails.norm_groups import NormGroup

__version__ = "0.1.0"
__all__ = [
    "NormGroup",
    "Report",
    "Storage",
    "__version__",
    "clip_grad_norm_",
    "compile",
    "errors",
    "explain",
    "full_precision",
    "fuseopt",
    "in_backward",
    "refresh",
    "reports",
    "tail",
]

_HOMES = {
    "compile": "isolate.compile",
    "tail": "tails.make",
    "clip_grad_norm_": "tails.clip",
    "NormGroup": "tails.norm_groups",
    "in_backward": "backward.handle",
    "explain": "explanation",
    "full_precision": "storage.checkpoints",
    "Storage": "storage.rule",
    "refresh": "isolate.refresh",
    "fuseopt": "backend",
    "reports": "compiler.session",
    "Report": "compiler.report",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module(f"{__name__}.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'fuseopt' has no attribute {name!r}")
    home = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    value = globals()[name] = getattr(home, name)
    return value


class _Module(types.ModuleType):
    """This module; calling it raises NotABackend, which names the backend."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        from .compiler.entry import refuse_module

        refuse_module()


sys.modules[__name__].__class__ = _Module

"""timm: its `create_optimizer_v2`, with a compiled step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import timm.optim
from torch.optim import Optimizer

from ..isolate.compile import compile


def create_optimizer_v2(
    model_or_params: Any,
    *args: Any,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Optimizer:
    """Call timm's function of this name with its arguments, and compile the result.

    `options`: those of `fuseopt.compile`. For a wrapper (Lookahead) this compiles the
    step of the inner optimizer.
    """
    made: Any = timm.optim.create_optimizer_v2(model_or_params, *args, **kwargs)
    inner = getattr(made, "_base_optimizer", made)
    compile(inner, **(options or {}))
    wrapped: Optimizer = made
    return wrapped

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
    """As timm's function of this name, whose arguments it takes; `options`: of
    `fuseopt.compile`.

    Of a wrapper (Lookahead) the step of the optimizer within is compiled.
    """
    made: Any = timm.optim.create_optimizer_v2(model_or_params, *args, **kwargs)
    inner = getattr(made, "_base_optimizer", made)
    compile(inner, **(options or {}))
    wrapped: Optimizer = made
    return wrapped

"""Have Dynamo guard that a parameter has no state yet where a traced step begins one.

Dynamo guards the state of one parameter of each group, as if all had begun alike, and
of the others each tensor that a graph uses: where there is none, nothing. A graph that
begins the momentum of one parameter then begins it anew at each call, with any backend
(torch 2.11 to 2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .dynamo import leads_to
from .hooks import Hook, around


def guard_states(backend: Callable[..., Any]) -> None:
    """Where Dynamo traces for `backend`, guard each state that is not all tensors.

    Relies on the method with which it guards what `_init_group` reads, and on its names
    for the values of a dict. Where they are others, it guards what it does anyway.
    """
    try:
        from torch._dynamo.source import (
            AttrSource,
            ConstDictKeySource,
            DictGetItemSource,
        )
        from torch._dynamo.variables.base import VariableTracker
        from torch._dynamo.variables.lazy import LazyVariableTracker
        from torch._dynamo.variables.optimizer import OptimizerVariable
    except ImportError:
        return

    def install(original: Hook, self: Any, tx: Any) -> None:
        original(self, tx)
        if self.source is None or not leads_to(tx.output.compiler_fn, backend):
            return
        states = AttrSource(self.source, "state")
        for i, state in enumerate(self.value.state.values()):
            if not _is_all_tensors(state):
                source = DictGetItemSource(states, ConstDictKeySource(states, i))
                LazyVariableTracker.realize_all(
                    VariableTracker.build(tx, state, source)
                )

    if hasattr(OptimizerVariable, "map_sources_and_install_guards"):
        around(OptimizerVariable, "map_sources_and_install_guards", install)


def _is_all_tensors(state: Any) -> bool:
    values = state.values() if isinstance(state, dict) else ()
    return bool(values) and all(isinstance(x, torch.Tensor) for x in values)

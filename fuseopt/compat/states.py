"""Make Dynamo guard that a parameter has no state yet where a traced step begins one.

Dynamo guards the state of one parameter of each group, as if all had begun alike. For
the others it guards each tensor that a graph uses; a missing state has no guard. A
graph that begins the momentum of one parameter then begins it anew at each call, with
any backend (torch 2.11 to 2.15).
"""

from __future__ import annotations

from typing import Any

import torch

from .layers import traces_for
from .names import find
from .patches import Hook, Patcher, patch


@patch(
    "guard-states",
    "a guard that a parameter has no state yet where a step begins one",
    "a step that begins some parameters' state, while others have theirs, runs in "
    "eager where torch.compile was given a function that calls it",
    bits=True,
)
def STATES(patcher: Patcher) -> None:
    """Guard each state that is not all tensors.

    Relies on the method with which Dynamo guards what `_init_group` reads, and on its
    names for the values of a dict.
    """
    AttrSource = find("torch._dynamo.source:AttrSource")
    ConstDictKeySource = find("torch._dynamo.source:ConstDictKeySource")
    DictGetItemSource = find("torch._dynamo.source:DictGetItemSource")
    VariableTracker = find("torch._dynamo.variables.base:VariableTracker")
    LazyVariableTracker = find("torch._dynamo.variables.lazy:LazyVariableTracker")
    kind = find("torch._dynamo.variables.optimizer:OptimizerVariable")
    backend = patcher.backend

    def install(original: Hook, self: Any, tx: Any) -> None:
        original(self, tx)
        if self.source is None or not traces_for(tx, backend):
            return
        states = AttrSource(self.source, "state")
        for i, state in enumerate(self.value.state.values()):
            if not is_all_tensors(state):
                source = DictGetItemSource(states, ConstDictKeySource(states, i))
                LazyVariableTracker.realize_all(
                    VariableTracker.build(tx, state, source)
                )

    patcher.around(kind, "map_sources_and_install_guards", install, "self", "tx")


def is_all_tensors(state: Any) -> bool:
    """Is there a state with nothing but tensors?"""
    values = state.values() if isinstance(state, dict) else ()
    return bool(values) and all(isinstance(x, torch.Tensor) for x in values)

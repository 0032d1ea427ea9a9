"""State dicts of an optimizer whose state is packed.

torch's `load_state_dict` casts what it loads to the dtype of the parameter. Packed
tensors are kept from it, and put back as they were saved. A state dict of the plain
optimizer is packed at the next step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from .packing import packed_in


def keep_dtypes(optimizer: Optimizer) -> Callable[[], None]:
    """Let the optimizer load packed tensors as they are; returns what ends that."""
    #: by the number of a parameter, while a state dict is loaded
    loading: dict[Any, dict[str, torch.Tensor]] = {}

    def before(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        loading.clear()
        states = {}
        for number, state in state_dict.get("state", {}).items():
            every = packed_in(state) if isinstance(state, dict) else {}
            keys = {key for _, parts in every.values() for key in parts.values()}
            if keys:
                loading[number] = {key: state[key] for key in state if key in keys}
                # None keeps the place of each key
                state = {k: None if k in keys else v for k, v in state.items()}
            states[number] = state
        return {**state_dict, "state": states} if loading else None

    def after(loaded: Optimizer) -> None:
        params = [p for group in loaded.param_groups for p in group["params"]]
        for number, tensors in loading.items():
            p = params[number]
            # torch gives the tensors that it loads as they are too
            loaded.state[p].update({k: t.to(p.device) for k, t in tensors.items()})
        loading.clear()

    handles = [
        optimizer.register_load_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_post_hook(after),
    ]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


class Checkpoints:
    """Keeps the dtypes of packed state for as long as it is."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.end = weakref.finalize(self, keep_dtypes(optimizer))
        self.end.atexit = False

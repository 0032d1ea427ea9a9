"""Save and load the state dicts of an optimizer whose state is packed.

torch's `load_state_dict` casts loaded tensors to the dtype of the parameter. So this
module hides packed tensors from it, and puts them back unchanged. The next step packs a
state dict of the plain optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from . import packing
from .packing import packed_in


def full_precision(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict of an optimizer with packed state, in float32.

    The plain optimizer can load the result. A state dict without packed state is
    returned unchanged.
    """
    states = {
        number: packing.full_precision(state) if isinstance(state, dict) else state
        for number, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def keep_dtypes(optimizer: Optimizer) -> Callable[[], None]:
    """Let the optimizer load packed tensors unchanged; return a function that ends
    this.
    """
    #: the packed tensors of each parameter in order, while a state dict is loaded
    loading: list[dict[str, torch.Tensor]] = []

    def before(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        loading.clear()
        states = dict(state_dict.get("state", {}))
        for group in state_dict["param_groups"]:
            for name in group["params"]:
                state = states.get(name, {})
                every = packed_in(state).values()
                keys = {key for _, parts in every for key in parts.values()}
                loading.append({key: state[key] for key in state if key in keys})
                if keys:  # None keeps the place of each key
                    kept = ((k, None if k in keys else v) for k, v in state.items())
                    states[name] = dict(kept)
        return {**state_dict, "state": states}

    def after(loaded: Optimizer) -> None:
        params = [p for group in loaded.param_groups for p in group["params"]]
        for p, tensors in zip(params, loading, strict=True):
            if tensors:
                # torch does not copy a tensor that needs no cast, and neither does this
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
    """Keep the dtypes of packed state while the state is packed."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.end = weakref.finalize(self, keep_dtypes(optimizer))
        self.end.atexit = False

"""Save and load the state dicts of an optimizer whose state is packed.

torch's `load_state_dict` casts loaded tensors to the dtype of the parameter. So this
module hides packed tensors from it, and puts them back unchanged. The next step packs a
state dict of the plain optimizer.
"""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from . import packing
from .packed_state import DICTS
from .packing import packed_in, whole_in


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


def load_unpacked(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """Unpack packed state, as a hook of `load_state_dict` of an optimizer that keeps
    its state in float32. Return None if nothing is packed.
    """
    states = state_dict.get("state")
    every = states.values() if isinstance(states, dict) else ()
    if not any(packed_in(x) for x in every if isinstance(x, dict)):
        return None
    return full_precision(state_dict)


def copied_unpacked(optimizer: Optimizer) -> Callable[[], None]:
    """Let copies and pickles of the optimizer have its state in float32, since they are
    plain optimizers; return a function that ends this.

    Python looks up `__getstate__` on the object, so an attribute counts.
    """
    itself = weakref.ref(optimizer)

    def getstate() -> Any:
        present = itself()
        assert present is not None
        found = type(present).__getstate__(present)
        if not isinstance(found, dict) or found.get("state") is not present.state:
            return found
        wide: Any = defaultdict(dict)
        for p, state in present.state.items():
            wide[p] = _unpacked(state) if type(state) in DICTS else state
        return {**found, "state": wide}

    held: Any = optimizer
    held.__getstate__ = getstate

    def end() -> None:
        present: Any = itself()
        if present is not None:
            vars(present).pop("__getstate__", None)

    return end


def _unpacked(state: Any) -> Any:
    """Return a copy of a state in full precision, of the same type."""
    found = copy.copy(state)
    found.clear()
    found.update(packing.full_precision(state))
    return found


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
                every = whole_in(state).values()
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
    """Keep the dtypes of packed state while it is packed; copies are in float32."""

    def __init__(self, optimizer: Optimizer) -> None:
        ends = keep_dtypes(optimizer), copied_unpacked(optimizer)
        self._ends = [weakref.finalize(self, end) for end in ends]
        for end in self._ends:
            end.atexit = False

    def end(self) -> None:
        """Let the optimizer load and copy its state as torch does."""
        for end in self._ends:
            end()

"""State dicts of an optimizer whose state is packed.

torch's `load_state_dict` casts what it loads to the dtype of the parameter. Packed
tensors are kept from it, and put back as they were saved. A state dict of the plain
optimizer is packed at the next step.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from . import packing
from .packing import check_whole, packed_in


def full_precision(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict of an optimizer with packed state, in float32: the plain optimizer
    can load it. Other state dicts are returned as they are.
    """
    states = {
        number: packing.full_precision(state) if isinstance(state, dict) else state
        for number, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def load_unpacked(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """A hook of `load_state_dict`: unpack what is packed, for an optimizer that keeps
    its state in float32. None where nothing is packed.
    """
    states = state_dict.get("state")
    every = states.values() if isinstance(states, dict) else ()
    if not any(packed_in(x) for x in every if isinstance(x, dict)):
        return None
    return full_precision(state_dict)


def copied_unpacked(optimizer: Optimizer) -> Callable[[], None]:
    """Let copies and pickles of the optimizer have its state in float32, since they are
    plain optimizers; returns what ends that.

    Python asks the object for `__getstate__`, so that an attribute counts.
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
            wide[p] = packing.full_precision(state) if type(state) is dict else state
        return {**found, "state": wide}

    held: Any = optimizer
    held.__getstate__ = getstate

    def end() -> None:
        present: Any = itself()
        if present is not None:
            vars(present).pop("__getstate__", None)

    return end


def keep_dtypes(optimizer: Optimizer) -> Callable[[], None]:
    """Let the optimizer load packed tensors as they are; returns what ends that."""
    #: while a state dict is loaded: of each of its parameters in order, what is packed
    loading: list[dict[str, torch.Tensor]] = []

    def before(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        loading.clear()
        states = dict(state_dict.get("state", {}))
        for group in state_dict["param_groups"]:
            for name in group["params"]:
                state = states.get(name, {})
                check_whole(state)
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
                # torch gives tensors that it need not cast as they are too
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
    """For as long as it is, packed state is loaded as it is, and copied in float32."""

    def __init__(self, optimizer: Optimizer) -> None:
        ends = keep_dtypes(optimizer), copied_unpacked(optimizer)
        self._ends = [weakref.finalize(self, end) for end in ends]
        for end in self._ends:
            end.atexit = False

    def end(self) -> None:
        """Let the optimizer load and copy its state as torch does."""
        for end in self._ends:
            end()

"""Keys of a lane's packed tensors in its state.

A tensor of the state `exp_avg` that is stored in bfloat16 has the key `exp_avg@bf16`. A
format of several parts adds a key for each: `exp_avg@bf16-stochastic.draw`. While a
step runs, three keys stand for tensors outside the state. These are a parameter
(PARAM), a gradient (GRAD), which is only unpacked, and a copy of the parameter (COPY),
which is only packed.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ..capture.fx.interpreter import OWN
from ..errors import UnsupportedInput
from .formats import FORMATS, WIDE, Format, Parts

_AT = "@"
PARAM, GRAD, COPY = "@param", "@grad", "@copy"
State = Mapping[str, Any]


def key_of(target: str, form: Format, part: str = "") -> str:
    """Return the key of a part of a packed tensor."""
    return f"{target}{_AT}{form.name}" + (f".{part}" if part else "")


def packed_in(state: State) -> dict[str, tuple[Format, dict[str, str]]]:
    """Return the packed tensors of a lane, by their unpacked key: the format, and the
    key of each part.
    """
    found: dict[str, tuple[Format, dict[str, str]]] = {}
    for key in state:
        target, at, rest = key.rpartition(_AT) if isinstance(key, str) else ("", "", "")
        name, _, part = rest.partition(".")
        if at and name in FORMATS:
            found.setdefault(target, (FORMATS[name], {}))[1][part] = key
    return found


def parts_of(state: State, keys: Mapping[str, str]) -> Parts:
    """Return the packed tensors under these keys, by part."""
    return {part: state[key] for part, key in keys.items()}


@functools.cache
def _names_of_parts(name: str) -> tuple[str, ...]:
    return (*FORMATS[name].empty(torch.empty(2), 0),)


def whole_in(state: State) -> dict[str, tuple[Format, dict[str, str]]]:
    """Return `packed_in(state)`. Raise UnsupportedInput if a tensor lacks a part."""
    packed = packed_in(state)
    for target, (form, keys) in packed.items():
        lacks = [x for x in _names_of_parts(form.name) if x not in keys]
        if lacks:
            raise UnsupportedInput(
                f"storage: the state has {', '.join(keys.values())} without "
                f"{key_of(target, form, lacks[0])}. Load a state dict that has both"
            )
    return packed


@torch.no_grad()
def full_precision(
    state: State, targets: Collection[str] | None = None
) -> dict[str, Any]:
    """Return the same state with these targets unpacked, in the places of their first
    parts. None unpacks all of them. Raises UnsupportedInput if a part is missing.
    """
    chosen = {
        keys[""]: (target, form, keys)
        for target, (form, keys) in whole_in(state).items()
        if targets is None or target in targets
    }
    parts = {key for _, _, keys in chosen.values() for key in keys.values()}
    wide: dict[str, Any] = {}
    for key, value in state.items():
        if key in chosen:
            target, form, keys = chosen[key]
            wide[target] = form.unpack(parts_of(state, keys))
        elif key not in parts:
            wide[key] = value
    return wide


def like_unpacked(parts: Parts) -> torch.Tensor:
    """Return a tensor of float32 like the packed one, without contents."""
    return torch.empty_like(parts[""], dtype=WIDE)


def packed_of(
    param: torch.Tensor, state: State
) -> dict[str, tuple[Format, dict[str, str]]]:
    """Return `packed_in(state)`; of a lane without a gradient only the parameter."""
    packed = packed_in(state)
    if param.grad is None:
        return {x: held for x, held in packed.items() if x == PARAM}
    return packed


def unpacked_in(param: torch.Tensor, state: State) -> dict[str, torch.Tensor]:
    """Return the tensors of a lane that hold its unpacked state, by target."""
    own = {PARAM: param, GRAD: param.grad}
    targets = [x for x in packed_of(param, state) if x != COPY]
    found = {x: own[x] if x in own else state[x] for x in targets}
    return {x: t for x, t in found.items() if t is not None}


class LanePacking:
    """Packing of an optimizer's lanes; see `Packing` in replicate."""

    def __init__(self) -> None:
        def unpack(lanes: Sequence[Mapping[str, torch.Tensor]]) -> None:
            for lane in lanes:
                for target, (form, keys) in packed_in(lane).items():
                    if target != COPY:
                        lane[target].copy_(form.unpack(parts_of(lane, keys)))

        def pack(lanes: Sequence[Mapping[str, torch.Tensor]]) -> None:
            for lane in lanes:
                for target, (form, keys) in packed_in(lane).items():
                    if target != GRAD:
                        form.pack(lane[target], parts_of(lane, keys))

        def restore(lanes: Sequence[Mapping[str, torch.Tensor]]) -> None:
            for lane in lanes:
                form, keys = packed_in(lane)[PARAM]
                lane[PARAM].copy_(form.unpack(parts_of(lane, keys)))

        for function in (unpack, pack, restore):
            setattr(function, OWN, True)
        self.unpack, self.pack, self.restore = unpack, pack, restore

    def of(self, param: torch.Tensor, state: State) -> dict[str, torch.Tensor]:
        """Return the tensors of a lane for `unpack` and `pack`: the packed ones by key,
        those with memory by target.
        """
        packed = packed_of(param, state)
        keys = (key for _, of_one in packed.values() for key in of_one.values())
        copied = {COPY: param} if COPY in packed else {}
        return {**{key: state[key] for key in keys}, **copied}

    def unpacked(self, param: torch.Tensor, state: State) -> dict[str, torch.Tensor]:
        """Return the tensors of a lane without memory, by target."""
        return unpacked_in(param, state)

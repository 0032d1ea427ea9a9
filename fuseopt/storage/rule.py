"""What a user wants packed: which keys of the state, in which format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UnsupportedInput
from .formats import WIDE, Format, format_named


@dataclass(frozen=True)
class Rule:
    """Which tensors of the state are packed.

    `formats`: by key of the state; `every`: the format of all other keys, None: they
    stay as they are. Only tensors of float32 with the sizes and strides of their
    parameter are packed.
    """

    formats: Mapping[str, Format]
    every: Format | None = None

    def wanted(self, key: str) -> Format | None:
        """The format that is wanted for a key, if it can be had."""
        return self.formats.get(key) or self.every

    def of(self, key: str, value: Any, param: torch.Tensor) -> Format | None:
        """The format for an entry of a parameter's state; None if it is not packed.
        Raises UnsupportedInput where the user names a key that cannot be packed.
        """
        named, form = self.formats.get(key), self.wanted(key)
        if form is None or not isinstance(value, torch.Tensor):
            return None
        why = _refusal(value, param) or form.refusal(value)
        if why and named is not None:
            raise UnsupportedInput(f"storage {form.name!r} of the state {key!r}: {why}")
        return None if why else form


def _refusal(value: torch.Tensor, param: torch.Tensor) -> str:
    if value.dtype != WIDE:
        return f"it is {value.dtype}, and only {WIDE} is packed"
    if not param.dim():
        return "its parameter has no dimensions"
    if value.shape != param.shape or value.stride() != param.stride():
        return f"its layout {tuple(value.shape)} is not the parameter's"
    if not value.is_contiguous():
        return "it is not contiguous"
    return ""


def rule_of(storage: Any) -> Rule:
    """The rule for the option `storage`: a format for all, or formats by key.

    Raises UnsupportedInput for anything else.
    """
    if isinstance(storage, Mapping):
        for key in storage:
            if not isinstance(key, str):
                raise UnsupportedInput(f"storage: {key!r} is no key of a state")
        return Rule({key: format_named(name) for key, name in storage.items()})
    return Rule({}, format_named(storage))

"""Rule of a user's option `storage`: a format for each tensor of the state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.optim import Optimizer

from ..errors import UnsupportedInput
from .formats import WIDE, Format, format_named

#: Least elements of a parameter for formats of blocks, unless a user gives a number.
#: bitsandbytes and torchao have the same one.
USUAL_LEAST = 4096
#: Name in place of a format that leaves the state unpacked.
PLAIN = "fp32"


@dataclass(frozen=True)
class Storage:
    """Choice of a format, for the option `storage`. In a list of choices, the first one
    that fits a tensor counts.

    `format` is the name of a format; "fp32" leaves the tensor unpacked. `keys` are keys
    of the state; None means all. `names` selects parameters, by patterns of `fnmatch`
    or a function of the name; None means all. `least` is the least number of elements
    of the parameter. None means 4096 for formats with blocks, else 0.
    """

    format: str
    keys: str | Sequence[str] | None = None
    names: str | Sequence[str] | Callable[[str], bool] | None = None
    least: int | None = None


@dataclass(frozen=True)
class Choice:
    """Parsed Storage. `keys` is None for all; `named` is true if it selects by
    names.
    """

    form: Format | None
    keys: tuple[str, ...] | None
    names: Callable[[str], bool] | None
    least: int

    def fits(self, key: str, name: str | None, numel: int) -> bool:
        """Does the choice fit an entry of the state of a parameter?"""
        if self.keys is not None and key not in self.keys:
            return False
        if numel < self.least:
            return False
        return self.names is None or (name is not None and self.names(name))


@dataclass(frozen=True)
class Rule:
    """Choices of formats for tensors of the state; the first of `choices` that fits
    counts. A packed tensor has type float32, and the sizes and strides of its
    parameter.
    """

    choices: tuple[Choice, ...] = ()

    @property
    def keys(self) -> list[str]:
        """Return the keys that the user names."""
        return [key for x in self.choices for key in x.keys or ()]

    def names(self, optimizer: Optimizer) -> Mapping[torch.Tensor, str]:
        """Return the names of an optimizer's parameters, if a choice selects by names.

        Raises UnsupportedInput where they have none.
        """
        if all(x.names is None for x in self.choices):
            return {}
        found: dict[torch.Tensor, str] = {}
        for group in optimizer.param_groups:
            if "param_names" not in group:
                raise UnsupportedInput(
                    "storage: parameters have no names; make the optimizer with "
                    "model.named_parameters()"
                )
            found.update(zip(group["params"], group["param_names"], strict=False))
        return found

    def wanted(self, key: str, param: torch.Tensor, name: str | None) -> Choice | None:
        """Return the choice for a key of a parameter's state."""
        numel = param.numel()
        return next((x for x in self.choices if x.fits(key, name, numel)), None)

    def of(
        self, key: str, value: Any, param: torch.Tensor, name: str | None = None
    ) -> Format | None:
        """Return the format for an entry of a parameter's state; None leaves it
        unpacked. Raises UnsupportedInput where the user names a key that cannot be
        packed.
        """
        choice = self.wanted(key, param, name)
        form = None if choice is None else choice.form
        if choice is None or form is None or not isinstance(value, torch.Tensor):
            return None
        why = _refusal(value, param) or form.refusal(value)
        if why and choice.keys is not None:
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
    """Return the rule for the option `storage`: a format for all tensors, a Storage,
    formats by key, or a list of Storages.

    Raises UnsupportedInput for any other value.
    """
    if isinstance(storage, Mapping):
        for key in storage:
            if not isinstance(key, str):
                raise UnsupportedInput(f"storage: {key!r} is no key of a state")
        storage = [Storage(name, keys=key) for key, name in storage.items()]
    if not isinstance(storage, (list, tuple)):
        storage = [storage if isinstance(storage, Storage) else Storage(storage)]
    for x in storage:
        if not isinstance(x, Storage):
            raise UnsupportedInput(f"storage: {x!r} stands in a list of Storages")
    return Rule(tuple(map(_choice, storage)))


def _choice(x: Storage) -> Choice:
    form = None if x.format == PLAIN else format_named(x.format)
    keys = (x.keys,) if isinstance(x.keys, str) else x.keys
    least = x.least
    has_blocks = "/" in getattr(form, "name", "")
    if least is None:
        least = USUAL_LEAST if has_blocks else 0
    if not isinstance(least, int) or least < 0:
        raise UnsupportedInput(f"storage: least={least!r} is no number of elements")
    if keys is not None and not all(isinstance(key, str) for key in keys):
        raise UnsupportedInput(f"storage: {keys!r} are no keys of a state")
    least = max(least, 2) if has_blocks else least  # one element has no blocks
    return Choice(form, None if keys is None else tuple(keys), _names(x.names), least)


def _names(names: Any) -> Callable[[str], bool] | None:
    """Return a function that checks whether a name is one of these."""
    if names is None:
        return None
    if callable(names):
        given: Callable[[str], bool] = names
        return given
    patterns = (names,) if isinstance(names, str) else tuple(names)
    return _Patterns(patterns)


@dataclass(frozen=True)
class _Patterns:
    patterns: tuple[str, ...]

    def __call__(self, name: str) -> bool:
        return any(fnmatchcase(name, x) for x in self.patterns)

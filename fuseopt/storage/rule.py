"""What a user wants packed: which tensors of the state, in which format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.optim import Optimizer

from ..errors import UnsupportedInput
from .formats import WIDE, Format, format_named

#: Elements of a parameter from which on its state is kept in formats of blocks, where
#: a user says nothing else: as in bitsandbytes and torchao.
USUAL_LEAST = 4096
#: The name of no format: the state stays as it is.
PLAIN = "fp32"


@dataclass(frozen=True)
class Storage:
    """One choice of a format, for the option `storage`; of a list of them, the first
    one that fits a tensor counts.

    `format`: its name; "fp32" leaves the tensor as it is. `keys`: of the state, None:
    all. `names`: of parameters, patterns as of `fnmatch` or a function of the name;
    None: all. `least`: elements that the parameter has at least; None: 4096 for formats
    with blocks, else 0.
    """

    format: str
    keys: str | Sequence[str] | None = None
    names: str | Sequence[str] | Callable[[str], bool] | None = None
    least: int | None = None


@dataclass(frozen=True)
class Choice:
    """A Storage, read. `keys`: None for all; `named`: does it ask for names?"""

    form: Format | None
    keys: tuple[str, ...] | None
    names: Callable[[str], bool] | None
    least: int

    def fits(self, key: str, name: str | None, numel: int) -> bool:
        """Does it choose for an entry of the state of a parameter?"""
        if self.keys is not None and key not in self.keys:
            return False
        if numel < self.least:
            return False
        return self.names is None or (name is not None and self.names(name))


@dataclass(frozen=True)
class Rule:
    """Which tensors of the state are packed: the first of `choices` that fits counts.
    Only tensors of float32 with the sizes and strides of their parameter are packed.
    """

    choices: tuple[Choice, ...] = ()

    @property
    def keys(self) -> list[str]:
        """The keys that a user names."""
        return [key for x in self.choices for key in x.keys or ()]

    def names(self, optimizer: Optimizer) -> Mapping[torch.Tensor, str]:
        """The names of an optimizer's parameters, if a choice asks for them.

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
        """The choice for a key of a parameter's state."""
        numel = param.numel()
        return next((x for x in self.choices if x.fits(key, name, numel)), None)

    def of(
        self, key: str, value: Any, param: torch.Tensor, name: str | None = None
    ) -> Format | None:
        """The format for an entry of a parameter's state; None if it is not packed.
        Raises UnsupportedInput where the user names a key that cannot be packed.
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
    """The rule for the option `storage`: a format for all, a Storage, formats by key,
    or a list of Storages.

    Raises UnsupportedInput for anything else.
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
    """A function that says whether a name is one of these."""
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

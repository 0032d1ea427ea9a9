"""Inputs of a step: meta twins of its tensors, their names, and refusals."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule

from ...compat import FAKE, keeps_class, wraps_others
from ...errors import EagerOnly, UnsupportedInput


def attribute(gm: GraphModule, target: str) -> Any:
    """Return the value of a get_attr node."""
    value: Any = gm
    for part in target.split("."):
        value = getattr(value, part)
    return value


def static_tensors(gm: GraphModule) -> dict[str, torch.Tensor]:
    """Return the graph's own tensors (parameters, state) by name, in a fixed order.

    Dynamo registers them on the GraphModule and removes them when the optimizer dies.
    So no other object may keep them alive.
    """
    return {**gm._buffers, **gm._parameters}  # type: ignore[dict-item]


def short_names(sources: Mapping[int, str]) -> dict[int, str]:
    """Return short names of numbers, from Dynamo's sources.

    "L['self'].param_groups[0]['lr']" becomes `lr`, or `param_groups[0]['lr']` if
    several numbers have that name.
    """
    whole = {
        i: re.sub(r"^L\['(\w+)'\]", r"\1", x).removeprefix("self.")
        for i, x in sources.items()
    }
    last = {i: re.findall(r"\w+", x)[-1:] for i, x in whole.items()}
    names = {}
    for i, words in last.items():
        (word,) = words or ("",)
        plain = word.isidentifier() and not keyword.iskeyword(word)
        alone = list(last.values()).count(words) == 1
        names[i] = word if plain and alone else whole[i]
    return names


def check_tensor(name: str, t: torch.Tensor) -> None:
    """Refuse a tensor that no kernel can address, before anything is written.

    Raises UnsupportedInput.
    """
    if t.layout != torch.strided:
        raise UnsupportedInput(
            f"{name} is sparse (layout {t.layout}); fuseopt needs strided tensors. "
            "Make the gradient dense (sparse=False), or leave this optimizer "
            "uncompiled."
        )
    if t.is_quantized:
        raise UnsupportedInput(f"{name} is quantized; dequantize it first")


def check_memory(name: str, t: torch.Tensor) -> None:
    """Refuse a tensor whose elements have no memory, before anything is written.

    Raises EagerOnly for one that eager can use: a subclass that wraps other tensors.
    Raises UnsupportedInput as `check_freed` does.
    """
    if wraps_others(t) and not isinstance(t, FAKE):
        raise EagerOnly(
            f"{name} is a {type(t).__name__}, a wrapper subclass without memory"
        )
    check_freed(name, t)


def check_freed(name: str, t: torch.Tensor) -> None:
    """Raise UnsupportedInput if some of a tensor's memory was freed.

    Eager's kernels would crash the process.
    """
    if wraps_others(t) or t.device.type == "meta":
        return
    if t.layout != torch.strided or t.numel() == 0:
        return
    steps = zip(t.shape, t.stride(), strict=True)
    last = t.storage_offset() + sum((n - 1) * s for n, s in steps)
    if t.untyped_storage().nbytes() < (last + 1) * t.element_size():
        raise UnsupportedInput(
            f"{name} has {t.numel()} elements and no memory for them: its storage was "
            "made smaller, as by untyped_storage().resize_(0). Give it memory before "
            "the step"
        )


def check_contents(tensors: Iterable[Any]) -> None:
    """Refuse tensors without contents: a step can be planned for them, but not run.

    Raises EagerOnly for a fake tensor and for a meta tensor.
    """
    for t in tensors:
        if isinstance(t, FAKE):
            raise EagerOnly(f"a tensor of shape {tuple(t.shape)} is a FakeTensor")
        if isinstance(t, torch.Tensor) and t.device.type == "meta":
            raise EagerOnly(
                f"a tensor of shape {tuple(t.shape)} is on the device meta, where "
                "there is no memory"
            )


def lasting_class(tensors: Iterable[Any]) -> str:
    """Return the name of the first class of tensors that results keep, or ""."""
    kinds = (type(t) for t in tensors if isinstance(t, torch.Tensor))
    return next((x.__name__ for x in kinds if keeps_class(x)), "")


class MetaInputs:
    """Meta twins of real tensors; twins share storage where the tensors do."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.Tensor] = {}
        self._alive: list[Any] = []

    def make(self, t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        key = storage._cdata
        shape, stride, offset = t.shape, t.stride(), t.storage_offset()
        if not t.numel():
            # two empty tensors at one place of a storage are distinct
            return torch.empty_strided(shape, stride, dtype=t.dtype, device="meta")
        if key not in self._storages:
            self._alive.append(storage)
            if offset == 0:
                twin = torch.empty_strided(shape, stride, dtype=t.dtype, device="meta")
                self._storages[key] = twin
                return twin
            size = storage.nbytes()
            base = torch.empty(int(size), dtype=torch.uint8, device="meta")
            self._storages[key] = base
        base = self._storages[key]
        twin = torch.empty(0, dtype=t.dtype, device="meta")
        twin.set_(base.untyped_storage(), offset, tuple(shape), stride)
        return twin

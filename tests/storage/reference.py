"""The meaning of packed state, in eager: unpack all of it, step, pack what is left.

Nothing here knows how fuseopt keeps what is packed. The functions of a format are its
definition, and tested in test_formats.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from fuseopt.storage.formats import FORMATS
from tests import steps
from tests.steps import turned

Params = list[torch.nn.Parameter]


SIZES: Sequence[tuple[int, ...]] = ((5, 8), (16,), (37,))


def params_of(
    n: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    sizes: Sequence[tuple[int, ...]] = SIZES,
) -> Params:
    """Parameters of these sizes in turn, the same for each call."""
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(sizes[i % len(sizes)], generator=generator) for i in range(n))
    return [torch.nn.Parameter(x.to(dtype)) for x in drawn]


def give_grads(step: int, *lists: Params, missing: int = 0) -> None:
    """The same gradients for each list; every `missing`-th has none."""
    generator = torch.Generator().manual_seed(1000 + step)
    for i, params in enumerate(zip(*lists, strict=True)):
        grad = torch.randn(params[0].shape, generator=generator).to(params[0].dtype)
        absent = missing and (i + step) % missing == 0
        for p in params:
            p.grad = None if absent else grad.clone()


def turn_grads(*lists: Params) -> None:
    """Give all gradients other strides."""
    for params in lists:
        for p in params:
            p.grad = turned(p.grad)


def packs(p: torch.Tensor, value: Any) -> bool:
    """Is a value of a parameter's state such that it is packed?"""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == torch.float32
        and p.dim() > 0
        and value.is_contiguous()
        and (value.shape, value.stride()) == (p.shape, p.stride())
    )


class Reference:
    """An optimizer whose state is packed between its steps."""

    def __init__(self, optimizer: Optimizer, formats: Any) -> None:
        self.optimizer = optimizer
        self.formats = formats
        #: by parameter and key
        self.packed: dict[tuple[torch.Tensor, str], Any] = {}
        #: how many tensors were ever packed
        self.n = 0

    def _name(self, key: str) -> str | None:
        return self.formats if isinstance(self.formats, str) else self.formats.get(key)

    def step(self) -> None:
        """One step. What is not packed yet is packed first."""
        state = self.optimizer.state
        self._pack_new()
        ready = [(p, k) for p, k in self.packed if p.grad is not None]
        for p, key in ready:
            form = FORMATS[self._name(key) or ""]
            state[p][key] = form.unpack(self.packed[p, key])
        self.optimizer.step()
        for p, key in ready:
            FORMATS[self._name(key) or ""].pack(state[p][key], self.packed[p, key])
        self._pack_new()

    def _pack_new(self) -> None:
        for p, values in self.optimizer.state.items():
            if not isinstance(p, torch.Tensor):
                continue
            for key, value in values.items():
                name = self._name(key)
                if name is None or not packs(p, value):
                    continue
                if FORMATS[name].refusal(value):
                    continue
                if (p, key) not in self.packed:
                    parts = FORMATS[name].empty(value, self.n)
                    self.n += 1
                    FORMATS[name].pack(value.detach(), parts)
                    self.packed[p, key] = parts

    def content(self, p: torch.Tensor) -> dict[str, Any]:
        """The state of a parameter, packed, by the keys that fuseopt gives it."""
        found: dict[str, Any] = {}
        for key, value in self.optimizer.state.get(p, {}).items():
            name, parts = self._name(key), self.packed.get((p, key))
            if parts is None:
                found[key] = value
            else:
                for part, t in parts.items():
                    found[f"{key}@{name}" + (f".{part}" if part else "")] = t
        return found


def same_bits(a: Any, b: Any) -> bool:
    """Have two values the same type and bits?"""
    if not isinstance(a, torch.Tensor):
        return type(a) is type(b) and repr(a) == repr(b)
    return steps.same_bits(a.detach(), b.detach())


def assert_same(
    reference: Reference, theirs: Params, ours: Params, optimizer: Any
) -> None:
    """Have both runs the same parameters and state, bit for bit?"""
    for i, (p, q) in enumerate(zip(theirs, ours, strict=True)):
        assert same_bits(p, q), f"parameter {i}"
        want, have = reference.content(p), dict(optimizer.state.get(q, {}))
        assert [*want] == [*have], f"keys of the state {i}"
        for key, value in want.items():
            assert same_bits(value, have[key]), f"state {i} {key}"

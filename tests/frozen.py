"""What an optimizer and all around it hold, as plain values that compare by `==`.

`frozen(module, opt, ps)` has the bits of every parameter, gradient, state tensor and
attribute, the types and values of all else, the order of dicts, and what is one object
in two places; identities become places among the parameters, so that what two runs
hold can be compared. NaNs are all alike.
"""

from __future__ import annotations

import array
import collections
import contextlib
import datetime
import decimal
import itertools
import operator
import types
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

#: What they hold is in what they are written as.
TOLD = (
    *(itertools.count, decimal.Decimal, range, slice, bytearray, array.array),
    *(datetime.datetime, datetime.timedelta),
)
#: What torch and a compiled step keep on an optimizer for themselves.
OWN = frozenset(("step", "zero_grad", "defaults", "param_groups", "state"))


def bits(t: Tensor) -> tuple[Any, ...]:
    """What a tensor is, without where it lies."""
    t = t.detach()
    if t.layout is not torch.strided:
        return ("sparse", str(t.layout), t.dtype, tuple(t.shape))
    if t.is_floating_point() or t.is_complex():
        t = torch.where(t.isnan(), torch.full_like(t, float("nan")), t)
    data = t.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return (str(t.dtype), tuple(t.shape), str(t.device), data)


class Freezer:
    """Freezes values of one run."""

    def __init__(self, ps: Sequence[Tensor]) -> None:
        self.place = {id(p): n for n, p in enumerate(ps)}
        self.at = {p.data_ptr(): n for n, p in enumerate(ps)}
        self.seen: dict[int, int] = {}
        self.kept: list[Any] = []  # an address is one object's while it lives
        self.memory: dict[int, int] = {}

    def tensor(self, t: Tensor) -> Any:
        where = t.data_ptr() if t.layout is torch.strided and t.numel() else -1
        memory = self.memory.setdefault(where, len(self.memory)) if where >= 0 else -1
        layout = t.stride() if t.layout is torch.strided else ()
        layout = layout if t.numel() > 1 else ()
        return (
            type(t).__name__,
            t.requires_grad,
            memory,
            layout,
            bits(t),
            self.own(t),
        )

    def value(self, x: Any) -> Any:
        """Of anything."""
        kind = type(x).__name__
        if isinstance(x, Tensor) and id(x) in self.place:
            return ("parameter", self.place[id(x)])
        if isinstance(x, float):
            return (kind, x.hex() if x == x else "nan")
        if isinstance(x, int) and not isinstance(x, bool):
            if x in self.at and x > 4096:
                return ("address", self.at[x])
            return ("id", self.place[x]) if x in self.place else (kind, x)
        if isinstance(x, str):
            return (kind, str.__str__(x))  # whatever its class says of equality
        if isinstance(x, (bytes, bool, complex, type(None), torch.dtype)):
            return (kind, x)
        if isinstance(x, (type, types.ModuleType)):
            return (kind, x.__name__)
        if id(x) in self.seen:
            return ("again", self.seen[id(x)])
        self.kept.append(x)
        self.seen[id(x)] = len(self.seen)
        if isinstance(x, Tensor):
            return self.tensor(x)
        if isinstance(x, torch.Size):
            return (kind, tuple(x))
        if isinstance(x, dict):
            return (kind, [(self.value(k), self.value(v)) for k, v in x.items()])
        if isinstance(x, (list, tuple)):
            return (kind, [self.value(y) for y in x])
        if isinstance(x, (set, frozenset)):
            return (kind, sorted(map(repr, map(self.value, x))))
        if isinstance(x, np.ndarray):
            return (kind, str(x.dtype), x.shape, x.tobytes())
        if isinstance(x, np.generic):
            return (kind, x.item())
        if isinstance(x, collections.deque):
            return (kind, x.maxlen, [self.value(y) for y in x])
        if hasattr(x, "__length_hint__"):
            return (kind, operator.length_hint(x))  # how much of an iterator is left
        if isinstance(x, TOLD):
            return (kind, repr(x))
        if isinstance(x, types.GeneratorType):
            frame = x.gi_frame
            at = None if frame is None else (frame.f_lasti, self.value(frame.f_locals))
            return (kind, at)
        if isinstance(x, types.FunctionType):
            cells = [self._cell(c) for c in x.__closure__ or ()]
            return (kind, x.__name__, self.value(x.__defaults__), cells, self.own(x))
        if isinstance(x, Optimizer):
            return (kind,)
        if getattr(x, "__name__", "") == "step" and isinstance(
            getattr(x, "__self__", None), Optimizer
        ):
            return ("step of an optimizer",)  # what compiles it is nobody's content
        return (kind, self.own(x))

    def own(self, x: Any) -> Any:
        """Of the attributes of an object."""
        found = {**getattr(x, "__dict__", {}), **_slots(x)}
        return [
            (k, self.value(v))
            for k, v in found.items()
            if not k.startswith(("__", "_dynamo"))
        ]

    def _cell(self, cell: Any) -> Any:
        try:
            return self.value(cell.cell_contents)
        except ValueError:
            return "empty"


def _slots(x: Any) -> dict[str, Any]:
    """What an object holds in slots."""
    slots = [vars(kind).get("__slots__", ()) for kind in type(x).__mro__]
    names = [y for z in slots for y in ((z,) if isinstance(z, str) else z)]
    own = object.__getattribute__
    found = {}
    for name in names:
        with contextlib.suppress(AttributeError):
            found[name] = own(x, name)
    return found


def frozen(module: Any, opt: Optimizer, ps: Sequence[Tensor]) -> dict[str, Any]:
    """All that a step, or a user, may have changed."""
    freezer = Freezer(ps)
    found: dict[str, Any] = {}
    for n, p in enumerate(ps):
        found[f"parameter {n}"] = freezer.tensor(p)
        found[f"gradient {n}"] = freezer.value(p.grad)
    lanes = {str(freezer.value(key)): own for key, own in opt.state.items()}
    for name in sorted(lanes):
        own = lanes[name]
        if isinstance(own, dict):
            for k in sorted(own, key=str):
                found[f"state of {name}: {k}"] = freezer.value(own[k])
            found[f"state of {name}: order"] = list(map(str, own))
        else:
            found[f"state of {name}"] = freezer.value(own)
    for n, group in enumerate(opt.param_groups):
        for k, v in group.items():
            found[f"group {n}: {k}"] = freezer.value(v)
    for k, v in vars(opt).items():
        if k not in OWN and not k.startswith("_"):
            found[f"attribute {k}"] = freezer.value(v)
    for cls in type(opt).__mro__:
        if cls.__module__ == module.__name__:
            for k, v in vars(cls).items():
                if not k.startswith("_") and not callable(v):
                    found[f"class {cls.__name__}.{k}"] = freezer.value(v)
    for k, v in vars(module).items():
        if not k.startswith("_") and not isinstance(v, (type, types.ModuleType)):
            found[f"global {k}"] = freezer.value(v)
    found["order of the state"] = list(lanes)
    return found


def unlike(mine: dict[str, Any], theirs: dict[str, Any]) -> Iterator[str]:
    """Names under which two runs hold other things, and what."""
    for name in [*theirs, *(k for k in mine if k not in theirs)]:
        got, want = mine.get(name, "nothing"), theirs.get(name, "nothing")
        if got != want:
            yield f"{name}: {str(got)[:200]}, in eager {str(want)[:200]}"

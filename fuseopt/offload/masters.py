"""Masters: parameters of float32 for a user's parameters of 16 bits.

The kernel of a step widens gradients of 16 bits, and writes the user's parameters. So a
step moves each number once, and no gradient of float32 lies in memory.

A master has one of two formats. "fp32" stores it in float32. "split" stores the 16 bits
that the user's parameter lacks; the master then has no memory, and the two together are
the float32.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import compress, repeat
from operator import attrgetter, is_not, ne, or_
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from ..errors import UnsupportedInput
from ..replicate.models import without_contents
from ..storage.beside import Beside, holds
from ..storage.formats import FORMATS, WIDE, Format, Parts
from ..storage.packing import COPY, GRAD, PARAM, key_of

KINDS = ("fp32", "split")
_CASTS = {torch.bfloat16: FORMATS["bf16"], torch.float16: FORMATS["fp16"]}
_TYPES = (torch.Tensor, torch.nn.Parameter)
_GRAD = attrgetter("grad")
_POINTER, _STRIDE = torch.Tensor.data_ptr, torch.Tensor.stride


class Master(NamedTuple):
    """Parameter of the user's, and its master.

    `gradient` takes the memory of each gradient; `hollow` is the master's gradient,
    without memory. `cast` is the format of the gradient. `form` is the format in which
    the master is written to `weight`. `beside` has all of these, by key. `state` is for
    a master without state in the optimizer.
    """

    param: torch.Tensor
    master: torch.nn.Parameter
    gradient: torch.Tensor
    hollow: torch.Tensor
    cast: Format
    form: Format
    weight: Parts
    beside: dict[str, torch.Tensor]
    state: dict[str, Any]

    @property
    def split(self) -> bool:
        """Is the master stored in halves, without memory?"""
        return "low" in self.weight

    def fill(self) -> None:
        """Allocate the master's memory, and write its contents."""
        if self.split:
            n_bytes = self.master.itemsize * self.master.numel()
            self.master.untyped_storage().resize_(n_bytes)
            self.master.copy_(self.form.unpack(self.weight))

    def empty(self) -> None:
        """Free the master's memory."""
        if self.split:
            self.master.untyped_storage().resize_(0)

    @torch.no_grad()
    def wide(self) -> torch.Tensor:
        """Return a copy of the master's numbers."""
        return self.form.unpack(self.weight) if self.split else self.master.clone()

    @torch.no_grad()
    def set(self, wide: torch.Tensor) -> None:
        """Write other numbers to the master, and the nearest ones to its parameter."""
        wide = wide.to(self.param.device, WIDE)
        self.form.pack(wide, self.weight)
        if not self.split:
            self.master.copy_(wide)


@torch.no_grad()
def master_of(param: torch.Tensor, kind: str) -> Master:
    """Return a master of a parameter. Raises UnsupportedInput for a parameter that has
    not 16 bits or is not contiguous.
    """
    cast = _CASTS.get(param.dtype)
    if cast is None or not param.is_contiguous() or type(param) not in _TYPES:
        raise UnsupportedInput(
            f"a parameter is a {type(param).__name__} of {param.dtype} with strides "
            f"{param.stride()}; a master is of a contiguous tensor of bfloat16 or "
            "float16"
        )
    if kind == "split" and param.dtype != torch.bfloat16:
        raise UnsupportedInput(f"a parameter of {param.dtype} has no split master")
    form, target = (FORMATS["split"], PARAM) if kind == "split" else (cast, COPY)
    wide = param.detach().to(WIDE, copy=True)
    parts = {**form.empty(wide, 0), "": param}
    if kind == "split":
        form.pack(wide, parts)  # the parameter keeps its number
    master = torch.nn.Parameter(wide)
    gradient = torch.empty_like(param).detach()
    beside = {key_of(target, form, x): t for x, t in parts.items()}
    beside[key_of(GRAD, cast)] = gradient
    hollow = without_contents(torch.empty_like(wide))
    made = Master(param, master, gradient, hollow, cast, form, parts, beside, {})
    made.empty()
    return made


class _Columns:
    """The same tensors of all masters, in lists."""

    def __init__(self, every: Sequence[Master]) -> None:
        self.params = [x.param for x in every]
        self._masters = [x.master for x in every]
        self._gradients = [x.gradient for x in every]
        self._hollows = [x.hollow for x in every]
        self.stored = {id(x.master): x.gradient for x in every}

    def take_gradients(self, only: Collection[int] | None) -> None:
        """See `Masters.take_gradients`."""
        grads = [*map(_GRAD, self.params)]
        if only is not None:
            pairs = zip(self.params, grads, strict=True)
            grads = [g if id(p) in only else None for p, g in pairs]
        pairs = zip(grads, self._hollows, strict=True)
        hollows = [None if g is None else hollow for g, hollow in pairs]
        if any(map(is_not, map(_GRAD, self._masters), hollows)):
            calls = map(setattr, self._masters, repeat("grad"), hollows)
            collections.deque(calls, 0)
        there = [*map(is_not, grads, repeat(None))]
        new, held = [*compress(grads, there)], [*compress(self._gradients, there)]
        moved = map(ne, map(_POINTER, new), map(_POINTER, held))
        turned = map(ne, map(_STRIDE, new), map(_STRIDE, held))
        others = [*map(or_, moved, turned)]
        if any(others):
            changed = compress(held, others), repeat("data"), compress(new, others)
            collections.deque(map(setattr, *changed), 0)


class _Places:
    """The states that get the packed tensors of masters while these step."""

    def __init__(self, every: Sequence[Master], state: Mapping[Any, Any]) -> None:
        self._n = len(every)
        self._entries = [*state], [*state.values()]
        # while it steps, a master without state has one of its packed tensors alone
        self._without: dict[torch.Tensor, dict[str, Any]] = {
            x.master: x.state for x in every if x.master not in state
        }
        held = [state.get(x.master, x.state) for x in every]
        self._beside = Beside(held, [x.beside for x in every])

    def fit(self, every: Sequence[Master], state: Mapping[Any, Any]) -> bool:
        """Are these the masters, and their state the same dicts?"""
        return len(every) == self._n and holds(state, *self._entries)

    @contextlib.contextmanager
    def within(self, state: dict[Any, Any]) -> Iterator[None]:
        """Add the packed tensors to the states within the context."""
        try:
            state.update(self._without)
            with self._beside.within():
                yield
        finally:
            try:
                self._drop(state)
            finally:
                self._drop(state)  # an interrupt may come before

    def _drop(self, state: dict[Any, Any]) -> None:
        """Remove states that have nothing else."""
        for master, own in self._without.items():
            if not own:
                state.pop(master, None)


class Masters:
    """Masters of an optimizer: the packed tensors beside its state, see
    `storage/step.py`.
    """

    def __init__(self, kind: str) -> None:
        if kind not in KINDS:
            raise UnsupportedInput(f"master={kind!r}: expected one of {KINDS}")
        self.kind = kind
        self.every: list[Master] = []
        self.optimizer: Optimizer | None = None
        #: see `storage.step.OtherPacked`
        self.is_wide = False
        self._columns = _Columns([])
        self._places = _Places([], {})

    def add(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Make masters and return them. A parameter of float32 is its own master."""
        wide: list[torch.Tensor] = []
        for p in params:
            if p.dtype == WIDE:
                wide.append(p)
                continue
            self.every.append(master_of(p, self.kind))
            wide.append(self.every[-1].master)
        return wide

    def take_gradients(self, only: Collection[int] | None = None) -> None:
        """Set the gradients of the masters to those of their parameters. `only`: the
        ids of the parameters that are stepped; None steps all.
        """
        if len(self._columns.params) != len(self.every):
            self._columns = _Columns(self.every)
        self._columns.take_gradients(only)

    @property
    def stored(self) -> Mapping[int, torch.Tensor]:
        """Return the stored gradient of each master, by id, after `take_gradients`."""
        return self._columns.stored

    def hollow(self) -> contextlib.AbstractContextManager[None]:
        """Add the packed tensors to the state within the context."""
        assert self.optimizer is not None
        state = self.optimizer.state
        if not self._places.fit(self.every, state):
            self._places = _Places(self.every, state)
        return self._places.within(state)

    @contextlib.contextmanager
    def unpacked(self) -> Iterator[None]:
        """Allocate masters and their gradients within the context, and pack the stepped
        masters at its end.
        """
        with contextlib.nullcontext() if self.is_wide else self.widened():
            stepped = [x for x in self.every if x.master.grad is not None]
            try:
                yield
            finally:
                with torch.no_grad():
                    for x in stepped:
                        x.form.pack(x.master, x.weight)

    @contextlib.contextmanager
    def widened(self) -> Iterator[None]:
        """Allocate masters and their gradients within the context; pack nothing."""
        stepped = [x for x in self.every if x.master.grad is not None]
        self.is_wide = True
        try:
            with torch.no_grad():
                for x in self.every:
                    x.fill()
                for x in stepped:
                    x.master.grad = x.cast.unpack({"": x.gradient})
            yield
        finally:
            self.is_wide = False
            for x in stepped:
                x.master.grad = x.hollow
            for x in self.every:
                x.empty()

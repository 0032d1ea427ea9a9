"""Masters: parameters of float32 for a user's parameters of 16 bits.

The kernel of a step widens gradients of 16 bits, and writes the user's parameters. So a
step moves each number once, and no gradient of float32 lies in memory.

A master has one of two formats. "fp32" stores it in float32. "split" stores the 16 bits
that the user's parameter lacks; the master then has no memory, and the two together are
the float32.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from ..errors import UnsupportedInput
from ..replicate.models import without_contents
from ..runtime.undo import at_once
from ..storage.formats import FORMATS, WIDE, Format, Parts
from ..storage.packing import COPY, GRAD, PARAM, key_of

KINDS = ("fp32", "split")
_CASTS = {torch.bfloat16: FORMATS["bf16"], torch.float16: FORMATS["fp16"]}
_TYPES = (torch.Tensor, torch.nn.Parameter)


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
        for x in self.every:
            grad = x.param.grad if only is None or id(x.param) in only else None
            x.master.grad = None if grad is None else x.hollow
            if grad is not None and x.gradient.data_ptr() != grad.data_ptr():
                x.gradient.data = grad

    @contextlib.contextmanager
    def hollow(self) -> Iterator[None]:
        """Add the packed tensors to the state within the context."""
        assert self.optimizer is not None
        state = self.optimizer.state
        # while it steps, a master without state has one of its packed tensors alone
        without: dict[torch.Tensor, dict[str, Any]] = {
            x.master: x.state for x in self.every if x.master not in state
        }
        pairs = [(state.get(x.master, x.state), x.beside) for x in self.every]
        adds = [functools.partial(dict.update, held, beside) for held, beside in pairs]
        drops: list[Callable[[], object]] = [
            functools.partial(dict.pop, held, key, None)
            for held, beside in pairs
            for key in beside
        ]
        try:
            state.update(without)
            at_once(adds)
            yield
        finally:
            try:
                self._drop(drops, without)
            finally:
                self._drop(drops, without)  # an interrupt may come before

    def _drop(
        self,
        drops: Sequence[Callable[[], object]],
        without: Mapping[torch.Tensor, dict[str, Any]],
    ) -> None:
        assert self.optimizer is not None
        at_once(drops)
        for master, own in without.items():
            if not own:
                self.optimizer.state.pop(master, None)

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

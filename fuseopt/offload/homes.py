"""Places where an optimizer's weights are stepped."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

Tensors = Sequence[torch.Tensor]


class Home(Protocol):
    """Place where weights are stepped. A weight has the dtype and sizes of its
    parameter.
    """

    def weights_of(self, params: Tensors) -> list[torch.Tensor]:
        """Return the weights to step for new parameters."""

    def take_gradients(self, only: Collection[int] | None = None) -> None:
        """Copy the gradients of the parameters to their weights. `only`: the ids of the
        parameters that are stepped; other weights get no gradient. None steps all.
        """

    def give_weights(self) -> None:
        """Copy the stepped weights to the parameters. Parameters without a gradient
        stay unchanged.
        """

    def give_all_weights(self) -> None:
        """Copy all weights to the parameters."""

    def take_weights(self) -> None:
        """Copy the parameters to the weights."""

    def stepped(self, only: Collection[int]) -> Collection[int] | None:
        """Return the ids of the weights that are stepped, of those with a gradient;
        None for all of them.
        """

    def beside(self) -> AbstractContextManager[None]:
        """Copy weights beside the current stream within the context."""

    def join(self) -> None:
        """Let the current stream wait for the copies beside it."""


class InPlaceHome:
    """Step parameters where they lie."""

    def weights_of(self, params: Tensors) -> list[torch.Tensor]:
        """Return the parameters."""
        return [*params]

    def take_gradients(self, only: Collection[int] | None = None) -> None:
        """Do nothing; the weights are the parameters."""

    give_weights = give_all_weights = take_weights = join = take_gradients

    def stepped(self, only: Collection[int]) -> Collection[int] | None:
        """Return the ids of the parameters."""
        return only

    def beside(self) -> AbstractContextManager[None]:
        """Do nothing; there are no copies."""
        return contextlib.nullcontext()


class _Pair(NamedTuple):
    """Parameter, its weight on the CPU, and the memory of the weight's gradient."""

    param: torch.Tensor
    weight: torch.nn.Parameter
    gradient: torch.Tensor


class CPUHome:
    """Step weights in pinned CPU memory; parameters lie on an accelerator.

    A gradient is copied when the backward has accumulated it, on a side stream. A
    gradient that changes later is copied again at the step.
    """

    def __init__(self) -> None:
        self._pairs: list[_Pair] = []
        self._hooks: list[Any] = []
        # the hooks hold no reference to this home, and end with it
        weakref.finalize(self, _remove, self._hooks).atexit = False
        self._streams: dict[torch.device, torch.Stream] = {}
        #: since the last step, by id of a parameter: the gradient that was copied, its
        #: version at that time, and the event after the copy
        self._copied: dict[int, tuple[torch.Tensor, int, torch.Event]] = {}
        #: true while weights are copied beside the current stream
        self._beside = False
        #: events after which weights may be written: copies read the weights until then
        self._given: list[torch.Event] = []

    @torch.no_grad()
    def weights_of(self, params: Tensors) -> list[torch.Tensor]:
        """Return copies of parameters in pinned memory."""
        weights: list[torch.Tensor] = []
        for p in params:
            weight = torch.nn.Parameter(_pinned(p))
            weight.copy_(p)
            pair = _Pair(p, weight, _pinned(p))
            self._pairs.append(pair)
            weights.append(weight)
            if p.requires_grad:
                self._hooks.append(_hook(p, len(self._pairs) - 1, self))
        return weights

    def copy(self, pair: _Pair) -> None:
        """Begin to copy a gradient to the CPU."""
        grad = pair.param.grad
        assert grad is not None
        device = grad.device
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.accelerator.current_stream(device))
        with torch.no_grad(), stream:
            pair.gradient.copy_(grad, non_blocking=True)
        grad.record_stream(stream)
        done = torch.Event(device)
        done.record(stream)
        self._copied[id(pair.param)] = grad, grad._version, done

    def take_gradients(self, only: Collection[int] | None = None) -> None:
        """Wait for the gradients."""
        copies = []
        for pair in self._pairs:
            key, grad = id(pair.param), pair.param.grad
            if grad is None or (only is not None and key not in only):
                pair.weight.grad = None
                continue
            found = self._copied.get(key)
            if found is None or found[0] is not grad or found[1] != grad._version:
                self.copy(pair)
            copies.append(self._copied.pop(key)[2])
            pair.weight.grad = pair.gradient
        for event in copies:
            event.synchronize()
        for event in self._given:
            event.synchronize()
        self._given.clear()
        if only is None:
            self._copied.clear()

    def stepped(self, only: Collection[int]) -> Collection[int] | None:
        """Return None: weights that are not stepped have no gradient."""
        return None

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """See Home. The copies wait for those of the gradients, and these for what
        computed the gradients.
        """
        self._beside = True
        try:
            yield
        finally:
            self._beside = False

    def join(self) -> None:
        """See Home."""
        for device, stream in self._streams.items():
            torch.accelerator.current_stream(device).wait_stream(stream)

    def give_weights(self) -> None:
        """Begin to copy the stepped weights, on the current stream."""
        stepped = [pair for pair in self._pairs if pair.weight.grad is not None]
        for pair in stepped:
            pair.weight.grad = None
        self._give(stepped)

    def give_all_weights(self) -> None:
        """Begin to copy all weights, on the current stream."""
        self._give(self._pairs)

    @torch.no_grad()
    def _give(self, pairs: Sequence[_Pair]) -> None:
        for device in {pair.param.device for pair in pairs}:
            current = torch.accelerator.current_stream(device)
            stream = self._streams[device] if self._beside else current
            with stream:
                for pair in pairs:
                    if pair.param.device == device:
                        pair.param.copy_(pair.weight, non_blocking=True)
            event = torch.Event(device)
            event.record(stream)
            self._given.append(event)

    @torch.no_grad()
    def take_weights(self) -> None:
        """Copy all parameters to the CPU."""
        for pair in self._pairs:
            pair.weight.copy_(pair.param)


def _remove(hooks: Sequence[Any]) -> None:
    """Remove hooks of parameters."""
    for hook in hooks:
        hook.remove()


def _hook(param: Any, number: int, home: CPUHome) -> Any:
    """Copy each new gradient of a parameter while its home exists."""
    itself = weakref.ref(home)

    def arrived(_: torch.Tensor) -> None:
        home = itself()
        if home is not None:
            home.copy(home._pairs[number])

    return param.register_post_accumulate_grad_hook(arrived)


def _pinned(t: torch.Tensor) -> torch.Tensor:
    return torch.empty(t.shape, dtype=t.dtype, pin_memory=True)

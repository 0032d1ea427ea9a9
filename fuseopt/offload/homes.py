"""Places where an optimizer's weights are stepped."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

Tensors = Sequence[torch.Tensor]


class Home(Protocol):
    """Place where weights are stepped. A weight has the dtype and sizes of its
    parameter.
    """

    def weights_of(self, params: Tensors) -> list[torch.Tensor]:
        """Return the weights to step for new parameters."""

    def take_gradients(self) -> None:
        """Copy the gradients of the parameters to their weights."""

    def give_weights(self) -> None:
        """Copy the stepped weights to the parameters. Parameters without a gradient
        stay unchanged.
        """

    def give_all_weights(self) -> None:
        """Copy all weights to the parameters."""

    def take_weights(self) -> None:
        """Copy the parameters to the weights."""


class InPlaceHome:
    """Step parameters where they lie."""

    def weights_of(self, params: Tensors) -> list[torch.Tensor]:
        """Return the parameters."""
        return [*params]

    def take_gradients(self) -> None:
        """Do nothing; the weights are the parameters."""

    give_weights = give_all_weights = take_weights = take_gradients


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
        #: since the last step, by id of a parameter: the gradient that was copied, and
        #: its version at that time
        self._copied: dict[int, tuple[torch.Tensor, int]] = {}
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
        self._copied[id(pair.param)] = grad, grad._version

    def take_gradients(self) -> None:
        """Wait for the gradients."""
        for pair in self._pairs:
            grad = pair.param.grad
            if grad is None:
                pair.weight.grad = None
                continue
            copied, version = self._copied.get(id(pair.param), (None, 0))
            if copied is not grad or version != grad._version:
                self.copy(pair)
            pair.weight.grad = pair.gradient
        for stream in self._streams.values():
            stream.synchronize()
        for event in self._given:
            event.synchronize()
        self._given.clear()
        self._copied.clear()

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
        for pair in pairs:
            pair.param.copy_(pair.weight, non_blocking=True)
        for device in {pair.param.device for pair in pairs}:
            event = torch.Event(device)
            event.record(torch.accelerator.current_stream(device))
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

"""Where the weights of an optimizer lie while they are stepped."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

Tensors = Sequence[torch.Tensor]


class Home(Protocol):
    """Where weights are stepped. A weight has the dtype and sizes of its parameter."""

    def weights_of(self, params: Tensors) -> list[torch.Tensor]:
        """The weights that are stepped for new parameters."""

    def take_gradients(self) -> None:
        """Have the gradients of the parameters in those of their weights."""

    def give_weights(self) -> None:
        """Have the weights in the parameters; those that have no gradient are as they
        were.
        """

    def give_all_weights(self) -> None:
        """The same of all parameters."""

    def take_weights(self) -> None:
        """Have the parameters in the weights."""


class Here:
    """Parameters are stepped where they lie."""

    def weights_of(self, params: Tensors) -> list[torch.Tensor]:
        """The parameters."""
        return [*params]

    def take_gradients(self) -> None:
        """They are there."""

    give_weights = give_all_weights = take_weights = take_gradients


class _Pair(NamedTuple):
    """A parameter, its weight on the CPU, and the memory of the weight's gradient."""

    param: torch.Tensor
    weight: torch.nn.Parameter
    gradient: torch.Tensor


class OnCPU:
    """Weights lie in pinned memory of the CPU; parameters on an accelerator.

    A gradient is copied when the backward has added it up, on a stream beside the
    backward. One that changes later is copied again at the step.
    """

    def __init__(self) -> None:
        self._pairs: list[_Pair] = []
        self._hooks: list[Any] = []
        # they hold nothing of this home, and end with it
        weakref.finalize(self, _remove, self._hooks).atexit = False
        self._streams: dict[torch.device, torch.Stream] = {}
        #: since the last step, by id of a parameter: the gradient that was copied, and
        #: its version then
        self._copied: dict[int, tuple[torch.Tensor, int]] = {}
        #: what must be done before weights are written: they are being copied
        self._given: list[torch.Event] = []

    @torch.no_grad()
    def weights_of(self, params: Tensors) -> list[torch.Tensor]:
        """Copies of parameters in pinned memory."""
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
        """Begin to copy the weights that were stepped, on the current stream."""
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
    for hook in hooks:
        hook.remove()


def _hook(param: Any, number: int, home: OnCPU) -> Any:
    """Have each gradient of the parameter of a pair copied, for as long as its home is
    there.
    """
    itself = weakref.ref(home)

    def arrived(_: torch.Tensor) -> None:
        home = itself()
        if home is not None:
            home.copy(home._pairs[number])

    return param.register_post_accumulate_grad_hook(arrived)


def _pinned(t: torch.Tensor) -> torch.Tensor:
    return torch.empty(t.shape, dtype=t.dtype, pin_memory=True)

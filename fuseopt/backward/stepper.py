"""Buckets of an optimizer's parameters -> each stepped by itself, with eager's bits.

One optimizer has the truth. A step of a bucket is its step on an object like it that
has the bucket's parameters alone, compiled once for all buckets. That this is what the
step of all does is shown before it is first done (`apart`), and again wherever Dynamo
traces anew or the kinds of parameters change.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.optim import Optimizer

from ..compiler.diagnostics import tell_of_step
from ..compiler.entry import attach
from ..config import resolve
from ..errors import CaptureError, UnsupportedInput
from ..isolate.isolated import Isolated, Wanted
from ..shadow.double import holdings, own_attributes
from ..shadow.lanes import Unlike
from ..tails.arguments import parameters_of
from ..tails.steps import function_of
from .apart import ReadsSizes, Universe
from .part import Part

#: Sets of lanes that are kept beyond one for each bucket.
BEYOND = 8
#: Sets of kinds for which it is kept that it was shown.
UNIVERSES = 32
_LAYOUT = attrgetter("dtype", "requires_grad", "shape", "is_leaf")


class Stepper:
    """What steps some parameters of an optimizer.

    Raises UnsupportedInput for an optimizer whose parameters cannot be stepped some at
    a time.
    """

    def __init__(self, optimizer: Optimizer, options: Mapping[str, Any]) -> None:
        self.optimizer = optimizer
        self.kept = BEYOND
        #: one thread at a time
        self.lock = threading.RLock()
        config = resolve(None, options)
        if config.verify:
            raise UnsupportedInput("verify=True compares steps of all parameters")
        self._strict = config.fallback == "error"
        self._function, why = function_of(optimizer)
        if why:
            raise self._refused(why)
        attach()
        self._universe: Universe | None = None
        #: those for which it was shown, by their keys
        self._universes: dict[Any, Universe] = {}
        #: are parameters of other sizes of one kind?
        self._loose = True
        self._seen: Any = None
        self._state = optimizer.state
        self._shown: Any = None
        try:
            self._part = Part(optimizer)
            itself = self._part.itself
            self._isolated = Isolated(itself, self._function, Wanted(dict(options)))
        except Unlike as error:
            raise self._refused(str(error)) from error
        self.look()

    def look(self) -> None:
        """Take note of the kinds of parameters, at the begin of a backward. Raises
        UnsupportedInput.
        """
        # what was shown in the last one is not known to hold: code may have changed
        self._shown = None
        optimizer = self.optimizer
        if optimizer.state is not self._state:
            self.forget()
        params = parameters_of([optimizer])
        states = [*optimizer.state.values()]
        seen: Any = (
            [len(group["params"]) for group in optimizer.param_groups],
            [*map(id, params)],
            [*map(_LAYOUT, params)],
            [*map(id, states)],
            [*map(len, states)],
        )
        if seen == self._seen:
            return
        try:
            for p in params:
                if type(p) not in (torch.Tensor, torch.nn.Parameter):
                    raise Unlike(f"a parameter is a {type(p).__name__}")
            if optimizer.defaults.get("differentiable"):
                raise Unlike("it is differentiable")
            self._survey()
        except Unlike as error:
            raise self._refused(str(error)) from error
        self._seen = seen

    def forget(self) -> None:
        """Other state was loaded: keep nothing of what there was."""
        with self.lock:
            self._state = self.optimizer.state
            self._isolated.forget()

    def _survey(self) -> None:
        """Have it shown for the kinds of parameters that there are now."""
        try:
            made = Universe(self.optimizer, self._loose)
            known = self._universes.get(made.key)
            if known is not None:
                self._universe = known
                return
            self._universe = made
            self._apart()
        except ReadsSizes:
            if not self._loose:
                raise
            self._loose = False
            self._survey()

    def _apart(self) -> None:
        """Raise Unlike unless it is shown, in this backward and for what the optimizer
        holds now.
        """
        optimizer = self.optimizer
        groups = [
            {key: x for key, x in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        held = holdings([own_attributes(optimizer), groups], id)
        if self._shown is None or self._shown != held:
            assert self._universe is not None
            self._universe.check(optimizer, self._function)
            self._shown = held
            self._universes[self._universe.key] = self._universe
            if len(self._universes) > UNIVERSES:
                del self._universes[next(iter(self._universes))]

    def _refused(self, why: str) -> UnsupportedInput:
        return UnsupportedInput(
            f"{type(self.optimizer).__name__} cannot step its parameters bucket by "
            f"bucket: {why}"
        )

    def step(self, params: Sequence[torch.Tensor]) -> None:
        """Step those parameters that have a gradient, and free it. Raises
        UnsupportedInput; then nothing was written.
        """
        ready = [p for p in params if p.grad is not None]
        if not ready:
            return
        device = ready[0].device.type
        with self.lock, torch.no_grad(), contextlib.ExitStack() as stack:
            if torch.is_autocast_enabled(device):
                # of the forward, within which a backward may be called
                stack.enter_context(torch.autocast(device, enabled=False))
            self._step(params, ready)
            for p in ready:
                p.grad = None

    def _apart_again(self) -> None:
        """The same, where a step was traced anew: what was shown before may have been
        of other code.
        """
        if self._shown is None:
            self._universes.clear()
        self._apart()

    def _step(
        self, params: Sequence[torch.Tensor], ready: Sequence[torch.Tensor]
    ) -> None:
        part, optimizer = self._part, self.optimizer
        try:
            # the same ones in each call, also those without a gradient
            n = part.take(optimizer, {*map(id, params)})
            if n != len(params):
                raise Unlike("a parameter is no longer in its groups")
            for p in ready:
                _check_gradient(p)
            why = self._isolated.led(self._apart_again, self.kept)
            if why is not None:
                # as it is; is that still the step of all?
                self._apart_again()
                if why and self._strict:
                    raise CaptureError(
                        f"{type(optimizer).__name__}.step cannot be compiled: {why} "
                        "(options={'fallback': 'error'} was given)"
                    )
                if why:
                    tell_of_step(optimizer, why)
                self._function(part.itself)
            part.give_back(optimizer)
        except Unlike as error:
            raise self._refused(str(error)) from error
        finally:
            part.drop()


def _check_gradient(p: torch.Tensor) -> None:
    """Raise Unlike unless a gradient is as those with which it was shown."""
    grad = p.grad
    assert grad is not None
    if type(grad) is not torch.Tensor or grad.layout != torch.strided:
        raise Unlike(f"a gradient is a {type(grad).__name__}, {grad.layout}")
    if grad.dtype != p.dtype:
        raise Unlike("a gradient has another dtype than its parameter")
    if grad.requires_grad:
        raise Unlike("a gradient has a graph of its own")


class Streams:
    """Where the gradients of a bucket came to be, on a device that has streams."""

    def __init__(self) -> None:
        self._streams: dict[Any, Any] = {}

    def arrived(self, p: torch.Tensor) -> None:
        """A gradient has come, on the stream that is current."""
        if p.device.type != "cpu":
            stream = torch.accelerator.current_stream(p.device)
            self._streams[stream] = stream

    def join(self, params: Sequence[torch.Tensor]) -> None:
        """Let the stream that is current wait for all of them."""
        if not self._streams:
            return
        now = torch.accelerator.current_stream(params[0].device)
        for stream in self._streams:
            if stream != now:
                now.wait_stream(stream)
        if any(stream != now for stream in self._streams):
            for p in params:
                if p.grad is not None:
                    with contextlib.suppress(NotImplementedError):
                        p.grad.record_stream(now)

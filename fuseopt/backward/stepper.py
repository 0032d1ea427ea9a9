"""Step the buckets of an optimizer's parameters one by one, with eager's bits.

The step of a bucket is the optimizer's step on a stand-in that has only the bucket's
parameters (`partial_optimizer`). It is compiled once for all buckets. Before the first
step `bucket_proof` proves that this has the effect of the step of all parameters. It
proves so again if Dynamo retraces the step or the kinds of parameters change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch.optim import Optimizer

from ..compiler.diagnostics import warn_of_step
from ..compiler.entry import attach
from ..config import resolve
from ..errors import CaptureError, UnsupportedInput
from ..inputs.keys import LanesDiffer
from ..inputs.values import holdings, own_attributes
from ..isolate.compilations import CompileOptions
from ..isolate.compile import packs
from ..isolate.isolated import OptimizerCompiler
from ..locks import new_rlock
from ..runtime.recent import Recent
from ..tails.arguments import parameters_of
from ..tails.steps import function_of
from .bucket_proof import KindModels, ReadsSizes
from .partial_optimizer import PartialOptimizer

#: Number of sets of lanes that are kept besides those of buckets.
BEYOND = 8
#: Most sets of kinds whose proof is kept.
MAX_PROVEN = 32
_LAYOUT = attrgetter("dtype", "requires_grad", "shape", "is_leaf")
_GRAD, _DTYPE = attrgetter("grad"), attrgetter("dtype")
_MEMORY = attrgetter("layout", "requires_grad")


class Stepper:
    """Step of some parameters of an optimizer.

    `kept` is the number of sets of lanes that are kept. Raises UnsupportedInput for an
    optimizer whose parameters cannot be stepped in buckets.
    """

    def __init__(self, optimizer: Optimizer, options: Mapping[str, Any]) -> None:
        self.optimizer = optimizer
        self.kept = BEYOND
        self.frees = True
        #: one thread at a time
        self.lock = new_rlock()
        config = resolve(None, options)
        if config.verify:
            raise UnsupportedInput("verify=True compares steps of all parameters")
        self._strict = config.fallback == "error"
        self._function, refusal = function_of(optimizer)
        if not refusal and packs(optimizer) is not None:
            refusal = f"the state of {type(optimizer).__name__} is kept packed"
        if refusal:
            raise self._refused(refusal)
        attach()
        self._kind_models: KindModels | None = None
        #: sets of kinds with a proof, by their keys
        self._proven: Recent[KindModels] = Recent(MAX_PROVEN)
        #: true while parameters of one kind may have different sizes
        self._ignore_sizes = True
        self._layout: Any = None
        self._state = optimizer.state
        self._proven_for: Any = None
        try:
            self._part = PartialOptimizer(optimizer)
            itself = self._part.stand_in
            self._isolated = OptimizerCompiler(
                itself, self._function, CompileOptions(dict(options))
            )
        except LanesDiffer as error:
            raise self._refused(str(error)) from error
        self.refresh()

    def refresh(self) -> None:
        """Read the kinds of parameters, at the beginning of a backward, and prove the
        step for new ones. Raises UnsupportedInput.
        """
        # a proof of the last backward may not hold: code may have changed
        self._proven_for = None
        optimizer = self.optimizer
        if optimizer.state is not self._state:
            self.forget()
        params = parameters_of([optimizer])
        states = [*optimizer.state.values()]
        layout: Any = (
            [len(group["params"]) for group in optimizer.param_groups],
            [*map(id, params)],
            [*map(_LAYOUT, params)],
            [*map(id, states)],
            [*map(len, states)],
        )
        if layout == self._layout:
            return
        try:
            for p in params:
                if type(p) not in (torch.Tensor, torch.nn.Parameter):
                    raise LanesDiffer(f"a parameter is a {type(p).__name__}")
            if optimizer.defaults.get("differentiable"):
                raise LanesDiffer("it is differentiable")
            self._survey()
        except LanesDiffer as error:
            raise self._refused(str(error)) from error
        self._layout = layout

    def forget(self) -> None:
        """Release what was compiled for a state that has been replaced."""
        with self.lock:
            self._state = self.optimizer.state
            self._part.forget()
            self._isolated.forget()

    def _survey(self) -> None:
        """Prove the step for the present kinds of parameters."""
        try:
            kind_models = KindModels(self.optimizer, self._ignore_sizes)
            proven = self._proven.get(kind_models.key)
            if proven is not None:
                self._kind_models = proven
                return
            self._kind_models = kind_models
            self._prove()
        except ReadsSizes:
            if not self._ignore_sizes:
                raise
            self._ignore_sizes = False
            self._survey()

    def _prove(self) -> None:
        """Raise LanesDiffer unless the step has a proof. It must be of this backward,
        and of the optimizer's present attributes and groups.
        """
        optimizer = self.optimizer
        groups = [
            {key: x for key, x in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        numbers = holdings([own_attributes(optimizer), groups], id)
        if self._proven_for is None or self._proven_for != numbers:
            assert self._kind_models is not None
            self._kind_models.check(optimizer, self._function)
            self._proven_for = numbers
            self._proven.use(self._kind_models.key, self._kind_models)

    def _refused(self, refusal: str) -> UnsupportedInput:
        return UnsupportedInput(
            f"{type(self.optimizer).__name__} cannot step its parameters bucket by "
            f"bucket: {refusal}"
        )

    def step(self, params: Sequence[torch.Tensor]) -> None:
        """Step the parameters that have a gradient, and free it if `frees`. Raises
        UnsupportedInput, and then writes nothing.
        """
        ready = params
        if any(map(is_, map(_GRAD, params), repeat(None))):
            ready = [p for p in params if p.grad is not None]
        if not ready:
            return
        device = ready[0].device.type
        with self.lock, torch.no_grad(), contextlib.ExitStack() as stack:
            if torch.is_autocast_enabled(device):
                # the autocast of a forward that calls this backward
                stack.enter_context(torch.autocast(device, enabled=False))
            self._step(params, ready)
            for p in ready if self.frees else ():
                p.grad = None

    def wait(self) -> None:
        """Do nothing: a step is done when its call returns."""

    def _prove_again(self) -> None:
        """Prove the step when it is retraced, since older proofs may be of other
        code.
        """
        if self._proven_for is None:
            self._proven.clear()
        self._prove()

    def _step(
        self, params: Sequence[torch.Tensor], ready: Sequence[torch.Tensor]
    ) -> None:
        part, optimizer = self._part, self.optimizer
        try:
            # the same parameters in each call, with or without a gradient
            if part.take(optimizer, params) != len(params):
                raise LanesDiffer("a parameter is no longer in its groups")
            _check_gradients(ready)
            refusal = self._isolated.led(self._prove_again, self.kept)
            if refusal is not None:
                # it runs in eager, so its effect may differ from the step of all
                self._prove_again()
                if refusal and self._strict:
                    raise CaptureError(
                        f"{type(optimizer).__name__}.step cannot be compiled: "
                        f"{refusal} (options={{'fallback': 'error'}} was given)"
                    )
                if refusal:
                    warn_of_step(optimizer, refusal)
                self._function(part.stand_in)
            part.give_back(optimizer)
        except LanesDiffer as error:
            raise self._refused(str(error)) from error
        finally:
            part.drop()


def _check_gradients(params: Sequence[torch.Tensor]) -> None:
    """Raise LanesDiffer unless the gradients are like those of the proof."""
    grads = [*map(_GRAD, params)]
    if (
        {*map(type, grads)} != {torch.Tensor}
        or {*map(_MEMORY, grads)} != {(torch.strided, False)}
        or [*map(_DTYPE, grads)] != [*map(_DTYPE, params)]
    ):
        for p in params:
            _check_gradient(p)


def _check_gradient(p: torch.Tensor) -> None:
    grad = p.grad
    assert grad is not None
    if type(grad) is not torch.Tensor or grad.layout != torch.strided:
        raise LanesDiffer(f"a gradient is a {type(grad).__name__}, {grad.layout}")
    if grad.dtype != p.dtype:
        raise LanesDiffer("a gradient has another dtype than its parameter")
    if grad.requires_grad:
        raise LanesDiffer("a gradient has a graph (create_graph=True)")


class Streams:
    """Streams on which the gradients of a bucket were computed. `stream_of` returns the
    current one of the bucket's device; None on a CPU.
    """

    def __init__(self, stream_of: Callable[[], Any] | None) -> None:
        self._stream_of = stream_of
        self._streams: dict[Any, Any] = {}

    def arrived(self) -> None:
        """Note the current stream, on which a gradient has been computed."""
        if self._stream_of is not None:
            stream = self._stream_of()
            self._streams[stream] = stream

    def join(self, params: Sequence[torch.Tensor]) -> None:
        """Let the current stream wait for all of the streams."""
        if self._stream_of is None:
            return
        current = self._stream_of()
        others = [stream for stream in self._streams if stream != current]
        for stream in others:
            current.wait_stream(stream)
        for p in params if others else ():
            if p.grad is not None:
                with contextlib.suppress(NotImplementedError):
                    p.grad.record_stream(current)

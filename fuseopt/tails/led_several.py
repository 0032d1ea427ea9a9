"""Tail of several led optimizers, or of masters: a launch for the norm, one for each.

Each step is led as it is without a tail, with its state packed and its gradients in 16
bits, as the case may be. The first launch reads all gradients, and computes one norm,
and flags and factors for each optimizer. The kernel of a step multiplies gradients by
these factors, so that no pass over gradients writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from .. import compat
from ..compiler.report import Report
from ..compiler.session import session
from ..config import Config
from ..errors import FuseoptError
from ..inputs.last_call import LastCall
from ..isolate.compile import packs
from ..replicate.driver import LedOptimizer
from ..uniformity import prove
from .adaptive import adapt
from .arguments import gradients_of, overlap, parameters_of, stepped
from .columns import LastArguments, columns_of, shared_of
from .fused import REFUSALS
from .led import LedTail, TailPlan
from .led_packed import LedPacked
from .masters import HasMasters, widened
from .sequence import TailInputs, afterwards, clamp
from .shared_totals import SharedTotals
from .totals import NormLaunch
from .totals_graph import Factors

Tensors = list[torch.Tensor]
#: From so many lanes on, optimizers without packed state or masters are led.
MANY = 64
#: Options that have no form here, and how a user names them.
WITHOUT = {
    "models": "averaged models",
    "objects": "averages of other packages",
    "measured": "stats",
}


class SharedMemory(FuseoptError):
    """Gradients of a call overlap; nothing was done."""


class _Led(LedTail):
    """Tail of one of several optimizers, led at any number of lanes."""

    led_at_any_size = True

    def _leader_of(self, form: TailPlan) -> LedOptimizer:
        leader = super()._leader_of(form)
        leader.want()
        return leader


class _Part(NamedTuple):
    """One optimizer: what leads it, and the optimizer with its masters, if any."""

    led: LedTail
    held: HasMasters | None
    arguments: LastArguments

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer whose step is led."""
        return self.led.optimizer

    def read(self) -> Tensors:
        """Return its gradients where they lie in memory."""
        if self.held is not None:
            return self.held.stored_gradients()
        return gradients_of(parameters_of([self.optimizer]))


class LedSeveral:
    """Tail of optimizers, each with a launch. `refusal` is the reason why it is in
    pieces from now on, or "".

    `held` has for each optimizer the one that keeps its masters, or None.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        functions: Sequence[Callable[..., Any]],
        held: Sequence[HasMasters | None],
        config: Config,
        options: Mapping[str, Any],
    ) -> None:
        self.config = config
        self.refusal = ""
        self.parts: list[_Part] = []
        for optimizer, function, x in zip(optimizers, functions, held, strict=True):
            common = optimizer, function, config, options
            compiler = packs(optimizer)
            led = _Led(*common) if compiler is None else LedPacked(*common, compiler)
            self.parts.append(_Part(led, x, LastArguments()))
        self.last_call = LastCall()
        self._judged: str | None = None
        #: the addresses of gradients that do not overlap
        self._places: list[int] = []
        self._new_totals()

    def _new_totals(self) -> None:
        # the Report of the first launch is added to that of the first step
        notify = self.parts[0].led.compiling.first_launch
        self.totals = SharedTotals(self.config, notify)

    def release(self) -> None:
        """Release everything that was compiled."""
        for part in self.parts:
            part.led.release()
            part.led.refusal = ""
        self._new_totals()
        self.refusal, self._judged = "", None

    def begins(self) -> bool:
        """Must a step run in eager, since it makes state?"""
        leds = [part.led for part in self.parts]
        return any(isinstance(x, LedPacked) and x.begins() for x in leds)

    @property
    def pays(self) -> bool:
        """Have the optimizers so many lanes that a launch for each pays? Dynamo would
        trace all lanes of a single graph.
        """
        optimizers = [part.optimizer for part in self.parts]
        return len(parameters_of(optimizers)) >= MANY and not self._refusal_of_code()

    def _refusal_of_code(self) -> str:
        """Return the reason why one of the steps cannot be led, or ""."""
        if self._judged is None:
            proofs = (prove(x.led.compiling.function, x.optimizer) for x in self.parts)
            self._judged = next((x.refusal for x in proofs if x.refusal), "")
        return self._judged

    def why_not(self, tail_inputs: Mapping[str, Any]) -> str:
        """Return the reason why a call runs in pieces, or ""."""
        if self.refusal or self.config.verify:
            return self.refusal or "the option verify is on"
        for name, what in WITHOUT.items():
            if tail_inputs[name]:
                return f"{what} need optimizers without packed state and masters"
        if not all(part.led.wants(tail_inputs) for part in self.parts):
            return "adaptive clipping with a flag needs another clip"
        if any(compat.are_spread(parameters_of([x.optimizer])) for x in self.parts):
            return "parameters are DTensors"
        return ""

    def step(
        self, tail_inputs: Mapping[str, Any], drops: bool, params: Tensors
    ) -> tuple[torch.Tensor, ...] | str:
        """Do one tail. Return the result of `sequence.whole`, or the reason why nothing
        was written.
        """
        if refusal := self.why_not(tail_inputs):
            return refusal
        if not self.last_call.begin():
            self.totals.forget()
        try:
            grads = gradients_of(params)
            self._check_separate(grads)
            columns = columns_of(tail_inputs, params)
            read = [part.read() for part in self.parts]
            wide = [part.held is not None for part in self.parts]
            factors, results = self.totals(tail_inputs, grads, read, wide)
        except SharedMemory as error:
            self.last_call.ended = True
            return str(error)  # the next call may succeed
        except REFUSALS as error:
            self.refusal = compat.reason_of(error)
            self.last_call.ended = True
            return self.refusal
        first = 0
        for k, part in enumerate(self.parts):
            n = len(parameters_of([part.optimizer]))
            own = [column[first : first + n] for column in columns]
            inputs = _of_part(tail_inputs, k, own, params[first : first + n])
            first += n
            refusal = self._led(part, inputs, factors[k], drops, own)
            if refusal and not k:
                self.refusal = refusal
                self.last_call.ended = True
                return refusal
            if refusal:
                self._in_pieces(part, inputs, factors[k], refusal)
        self.last_call.ended = True
        return tuple(results)

    def _check_separate(self, grads: Tensors) -> None:
        """Raise SharedMemory if two gradients overlap: a step that writes one scales
        the other. Gradients without memory are of masters, and no step writes them.
        """
        places = [*map(torch.Tensor.data_ptr, grads)]
        if places != self._places and overlap(grads):
            raise SharedMemory("gradients share memory")
        self._places = places

    def _led(
        self,
        part: _Part,
        inputs: Mapping[str, Any],
        factors: Factors,
        drops: bool,
        columns: Sequence[Tensors],
    ) -> str:
        """Step one optimizer, with these factors; return the reason if nothing was
        done.
        """
        led = part.led
        params = parameters_of([part.optimizer])
        try:
            shared = shared_of(inputs, factors, params[0].device)
            leader = led._form(inputs, factors, drops, params, columns)
            arguments = part.arguments.of(columns, shared, factors.skip)
            launch = NormLaunch(None, (), list, [], factors)
            if led._done(leader, arguments, launch) is None:
                return led.refusal
        except REFUSALS as error:
            return compat.reason_of(error)
        return ""

    def _in_pieces(
        self,
        part: _Part,
        inputs: Mapping[str, Any],
        factors: Factors,
        refusal: str,
    ) -> None:
        """Do the part of one optimizer in eager, since others have stepped already."""
        self.refusal = refusal
        what = f"{type(part.optimizer).__name__} of a tail is stepped in eager"
        session.reports.append(Report(fallback=f"{what}: {refusal}"))
        held = [] if part.held is None else [part.held]
        with widened(held), torch.no_grad():
            params = stepped([part.optimizer])
            grads = gradients_of(params)
            if inputs["divisor"] is not None:
                torch._foreach_div_(grads, inputs["divisor"])
            for factor in (factors.unscales, factors.clips):
                if factor is not None:
                    torch._foreach_mul_(grads, factor)
            if inputs["max_value"] is not None:
                clamp(grads, inputs["max_value"])
            if inputs["adaptive"] is not None:
                factor, eps = inputs["adaptive"]
                adapt(params, grads, factor, eps, grads)
            if factors.skip is None or not factors.skip.item():
                part.optimizer.step()
            afterwards(TailInputs(**inputs))
            if inputs["zeroed"]:
                torch._foreach_zero_(grads)


def _of_part(
    tail_inputs: Mapping[str, Any], k: int, columns: Sequence[Tensors], params: Tensors
) -> dict[str, Any]:
    """Return the inputs of one optimizer's part, with its columns."""
    n = len(tail_inputs["averages"])
    pairs = [(column, params) for column in columns]
    return {
        **tail_inputs,
        "founds": [tail_inputs["founds"][k]],
        "averages": pairs[:n],
        "copies": pairs[n:],
    }

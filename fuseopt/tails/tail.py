"""`fuseopt.tail`: the whole tail of a training step, as one callable object.

It unscales, measures, clips, steps, averages and clears gradients, in the order of
trainers. Where possible it does so in one graph (`single_graph`). It runs in pieces
(`pieces`) if code of the user, such as hooks, runs between the parts, and in the call
that creates the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch.optim import Optimizer

from .. import compat
from ..compiler.entry import attach
from ..compiler.report import Report
from ..compiler.session import session
from ..config import resolve
from ..errors import CaptureError, UnsupportedInput
from ..inputs.change import SAME
from ..inputs.tails import TailRecord, may_last, options_of, steps_of
from ..isolate.compile import compile_bound
from ..isolate.quick import TRACES
from ..locks import new_rlock
from .adaptive import checked_adaptive
from .arguments import (
    check_zero_grad,
    checked_limit,
    clear,
    gradients_of,
    parameters_of,
)
from .averages import Averages
from .deferred import settle_of
from .led_parts import ClipAlone
from .lists import Lists
from .masters import inner_of, masters_of, on_masters, parameters_of_users, widened
from .norm_groups import NormGroups, step_of_groups
from .order import ClipOrder
from .outcome import Outcome
from .pieces import run
from .single import single_tail
from .single_graph import SingleGraph
from .stats import COLUMNS, row_names
from .steps import function_of, has_gradients, has_state, marks

Tensors = list[torch.Tensor]


class Tail:
    """Tail of a training step. Call it after `backward()`, in place of all of it.

    `clip_grad_norm`, `clip_grad_value`, `clip_grad_adaptive`, `norm_type`, `zero_grad`,
    `skip_nonfinite`, `stats`, `grad_divisor` and the `decays` of the averages may be
    set between calls.
    """

    #: names of the columns of `Outcome.stats`
    stats_names = COLUMNS

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        scaler: torch.amp.GradScaler | None,
        beside: Averages,
        order: ClipOrder,
        **options: Any,
    ) -> None:
        self.optimizers = [*optimizers]
        #: the optimizers that step masters, for those whose parameters have any
        self._inner = [*map(inner_of, optimizers)]
        self._held = [x for x in map(masters_of, optimizers) if x is not None]
        self.scaler = scaler
        self.decays = [*beside.decays]
        self.clip_grad_norm: Any = None
        self.clip_grad_value: Any = None
        self.clip_grad_adaptive: Any = None
        self.norm_type = 2.0
        self.error_if_nonfinite = False
        self.skip_nonfinite = False
        self.zero_grad: Any = False
        self.stats = False
        self.grad_divisor: Any = None
        #: names of the parameters: a list, or a module that holds them
        self.names: Any = None
        #: one thread at a time
        self._lock = new_rlock(self._forget)
        self._averages = beside
        self._order = order
        self._lists = Lists(beside, order)
        self._options = options
        #: for each optimizer true if it has stepped in this tail, so that its state
        #: exists
        self._begun = [False for _ in optimizers]
        self._steps: list[Any] | None = None
        self._reported: set[str] = set()
        self._fused: SingleGraph | None = None
        #: the optimizers' steps, and the functions of these: see `function_of`
        self._seen: list[Any] = []
        self._functions: list[tuple[Any, str]] = []
        self._steady: TailRecord | None = None
        self.norm_groups: NormGroups | None = None

    def __call__(
        self,
        average: bool = True,
        accumulated: Any = None,
        step: int | None = None,
    ) -> Outcome:
        """Do the tail of one training step.

        `average=False` leaves the averages as they are. `accumulated` replaces
        `grad_divisor` in this call. `step` is passed to averages of other packages
        whose update takes a step. Raises ValueError, TypeError, RuntimeError,
        UnsupportedInput before anything is written.
        """
        if torch.compiler.is_dynamo_compiling():
            what = "a fuseopt.tail compiles itself: call it outside of torch.compile"
            raise UnsupportedInput(what)
        repeatable = accumulated is None and step is None
        with self._lock:
            steady = self._steady if repeatable else None
            if steady is not None and steady.single is not None:
                result = steady.single(self, average)
                if result is not None:
                    return self._fused_outcome(
                        steady.tail_inputs, result, steady.params
                    )
                steady.single = None
            settle_of(self.optimizers, "the tail")
            self._averages.set_call(average, step)
            if self._lists.follow():
                self._steady = None
            if steady is not None and self._steady is steady:
                outcome = self._again(steady, average)
                if outcome is not None:
                    return outcome
            repeated = average if repeatable else None
            if not self._held:
                return self._anew(accumulated, repeated)
            with on_masters(self._held):
                outcome = self._anew(accumulated, repeated)
            for x in self.optimizers if self.zero_grad else ():
                x.zero_grad(set_to_none=bool(self.zero_grad != "zeros"))
            return outcome

    def _anew(self, accumulated: Any, average: bool | None) -> Outcome:
        """Check the options, and do a call; see `_call`."""
        params = parameters_of(self.optimizers)
        tail_inputs = self._content(accumulated, params)
        self._steady = None
        if self.norm_groups is not None:
            return step_of_groups(self, self._call, tail_inputs, params)
        return self._call(tail_inputs, params, average)

    def forget(self) -> None:
        """Release what was compiled: the optimizer's state is stored otherwise now."""
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        self._fused = self._steps = self._steady = None

    def _again(self, steady: TailRecord, average: bool) -> Outcome | None:
        """Repeat the last call if this one has the same options; else return None."""
        fused = self._fused
        if fused is None or fused.refusal or compat.stance() not in TRACES:
            return None
        if (found := steady.compare(self, average)) is not SAME:
            found.log("a tail is checked anew")
            return None
        recorded = torch.is_grad_enabled()
        compat.GRAD_SWITCH(False)
        try:
            result = fused.again()
        finally:
            compat.GRAD_SWITCH(recorded)
        if result is None:
            self._steady = None
            return None
        if isinstance(result, ClipAlone):
            self._steady = None
            return self._after_clip(steady.tail_inputs, result)
        if steady.attempts.due():
            steady.single = single_tail(self, steady)
        return self._fused_outcome(steady.tail_inputs, result, steady.params)

    def _call(
        self, tail_inputs: dict[str, Any], params: list[Any], average: bool | None
    ) -> Outcome:
        """Do a call. `average` is its argument, None if `_again` may not repeat it."""
        refusal = self._why_not_fused(tail_inputs)
        if not refusal:
            self._averages.trace(tail_inputs)
            outcome = self._in_one(tail_inputs, params, average)
            if isinstance(outcome, Outcome):
                return outcome
            if isinstance(outcome, ClipAlone):
                return self._after_clip(tail_inputs, outcome)
            refusal = outcome
            if tail_inputs["objects"]:
                # without these objects it may be one graph
                self._averages.alone, tail_inputs["objects"] = refusal, []
                self._fused = None
                return self._call(tail_inputs, params, average)
        return self._in_pieces(tail_inputs, refusal)

    def _after_clip(self, tail_inputs: Mapping[str, Any], clip: ClipAlone) -> Outcome:
        """Do the rest of a call that has clipped."""
        remaining = {**tail_inputs, "divisor": None, "max_norm": None}
        return Outcome(clip.norm, self._in_pieces(remaining, clip.refusal).skips)

    def _in_one(
        self, tail_inputs: dict[str, Any], params: list[Any], average: bool | None
    ) -> Outcome | ClipAlone | str:
        """Do a call in one graph; return the reason if nothing was written."""
        assert self._fused is not None
        grads = gradients_of(params)
        if self._averages.alone:
            self._warn("an average runs its own update", self._averages.alone)
        # 1 and NumPy's True are accepted like True
        drops = bool(self.zero_grad) and not tail_inputs["zeroed"]
        with torch.no_grad(), marks(self.optimizers):
            result = self._fused.step(tail_inputs, drops, params, grads)
        if isinstance(result, (str, ClipAlone)):
            return result
        if self._fused.repeats and average is not None:
            options = options_of(self)
            if may_last(tail_inputs, options):
                record = options, average, tail_inputs, params
                self._steady = TailRecord(*record, self._order.strangers(params))
        return self._fused_outcome(tail_inputs, result, params)

    @property
    def stats_rows(self) -> list[str]:
        """Return the names of the rows of `Outcome.stats`, one for each parameter."""
        return row_names(self.names, parameters_of(self.optimizers))

    def __reduce__(self) -> Any:
        raise TypeError("a fuseopt.tail cannot be copied or pickled. Make a new one")

    def __repr__(self) -> str:
        names = ", ".join(type(x).__name__ for x in self.optimizers)
        return f"<tail of {names}>"

    # ---------------------------------------------------------------- inputs

    def _content(self, accumulated: Any, params: list[Any]) -> dict[str, Any]:
        """Return the checked inputs of a call; see `sequence.TailInputs`."""
        if accumulated is None:
            accumulated = self.grad_divisor
        max_norm = checked_limit("clip_grad_norm", self.clip_grad_norm)
        max_value = checked_limit("clip_grad_value", self.clip_grad_value)
        check_zero_grad(self.zero_grad)
        scale = None
        founds: list[torch.Tensor | None] = [None for _ in self.optimizers]
        if self.scaler is not None and self.scaler.is_enabled():
            scale = compat.scale_of(self.scaler)
            if self._held and params:
                scale = scale.to(params[0].device)  # masters may be elsewhere
            for k, optimizer in enumerate(self.optimizers):
                founds[k] = self._found_before(optimizer)
        return {
            "divisor": checked_limit("grad_divisor", accumulated),
            "scale": scale,
            "founds": founds,
            "max_norm": max_norm,
            "max_value": max_value,
            "adaptive": checked_adaptive(self.clip_grad_adaptive),
            "norm_type": float(self.norm_type),
            "places": self._order.places(
                parameters_of_users(self.optimizers) if self._held else params
            ),
            "judged": bool(self.skip_nonfinite),
            **self._averages.tail_inputs(params, self.decays),
            "zeroed": bool(self.zero_grad == "zeros"),
            "measured": bool(self.stats),
            "factor": None,
        }

    def _found_before(self, optimizer: Optimizer) -> torch.Tensor | None:
        """Return the scaler's `found_inf` if the user called `unscale_`, else None."""
        scaler = self.scaler
        assert scaler is not None
        stage = compat.stage_of(scaler, optimizer)
        if stage is compat.STAGES.STEPPED:
            what = "this tail has been called already since the last update() of its"
            raise RuntimeError(f"{what} scaler")
        grads = gradients_of(parameters_of([optimizer]))
        if not grads:
            raise UnsupportedInput(
                f"all gradients of {type(optimizer).__name__} are None, so the scaler "
                "cannot tell whether to skip its step"
            )
        if stage is compat.STAGES.READY:
            if torch.float16 in {g.dtype for g in grads}:
                raise ValueError("Attempting to unscale FP16 gradients.")
            return None
        (found_inf, *_) = compat.founds_of(scaler, optimizer).values()
        return found_inf

    # ---------------------------------------------------------------- one graph

    def _why_not_fused(self, tail_inputs: dict[str, Any]) -> str:
        """Return the reason why this call runs in pieces, or "". The reason "begin"
        needs no Report.
        """
        self._follow_steps()
        for k, optimizer in enumerate(self._inner):
            if not self._begun[k] and not has_state(optimizer):
                return "begin"
            if not compat.unhooked(optimizer):
                return "hooks run, or a mode is on, around a step"
            if optimizer.defaults.get("differentiable"):
                return "a step is differentiable"
        if self.error_if_nonfinite:
            return "error_if_nonfinite reads the norm before the first write"
        if compat.stance() not in TRACES:
            return "begin"
        self._fused = self._fused or self._new_in_one()
        if self._fused.refusal:
            return self._fused.refusal
        if self._fused.packed and self._fused.begins():
            return "begin"
        return "" if all(map(has_gradients, self.optimizers)) else "begin"

    def _follow_steps(self) -> None:
        """Release what was compiled if the step of an optimizer was replaced."""
        every = dict.fromkeys((*self.optimizers, *self._inner))
        steps = [x for optimizer in every for x in steps_of(optimizer)]
        if len(steps) == len(self._seen) and all(map(is_, steps, self._seen)):
            return
        functions = [function_of(optimizer) for optimizer in self._inner]
        if functions != self._functions or any(refusal for _, refusal in functions):
            self._fused = self._steps = None
        self._functions, self._seen = functions, steps

    def _new_in_one(self) -> SingleGraph:
        attach()
        functions, reasons = zip(*self._functions, strict=True)
        disabled = map(compat.disabled, self._inner)
        refusal = next(filter(None, [*reasons, *disabled]), "")
        options = self._options
        single_graph = SingleGraph(
            self._inner,
            functions,
            resolve(None, options),
            options,
            [*map(masters_of, self.optimizers)],
        )
        single_graph.whole.refusal = single_graph.refusal or refusal
        return single_graph

    def _fused_outcome(
        self,
        tail_inputs: Mapping[str, Any],
        result: Sequence[torch.Tensor],
        params: Sequence[Any],
    ) -> Outcome:
        remaining, n = [*result], len(self.optimizers)
        skips: list[bool | torch.Tensor] = [False] * n
        founds = tail_inputs["founds"]
        if tail_inputs["scale"] is not None or tail_inputs["judged"]:
            skips, remaining = [*remaining[:n]], remaining[n:]
        for k, optimizer in enumerate(self.optimizers):
            # a scheduler wraps the step, and checks that the wrapper was called
            step = vars(optimizer).get("step")
            if step is not None and hasattr(step, "_wrapped_by_lr_sched"):
                optimizer._opt_called = True  # type: ignore[attr-defined]
            compat.ran(optimizer)
            if tail_inputs["scale"] is not None:
                flag = None if founds[k] is not None else remaining.pop(0)
                assert self.scaler is not None
                compat.has_stepped(self.scaler, optimizer, flag)
        self._end(tail_inputs, params)
        stats = remaining.pop() if tail_inputs["measured"] else None
        return Outcome(remaining[0] if remaining else None, skips, stats)

    # ---------------------------------------------------------------- in pieces

    def _in_pieces(self, tail_inputs: dict[str, Any], refusal: str) -> Outcome:
        eager = refusal == "begin"
        if not eager:
            self._warn("a tail runs in pieces", refusal)
        eager = eager or bool(self._held)
        steps = [x.step for x in self._inner] if eager else self._compiled_steps()
        raises = bool(self.error_if_nonfinite)
        scaler = None if tail_inputs["scale"] is None else self.scaler
        arguments = self.optimizers, steps, scaler, tail_inputs, raises
        with widened(self._held):
            norm, skips, stats = run(*arguments, compiled=not eager)
        for k, skip in enumerate(skips):
            self._begun[k] |= not skip
        self._end(tail_inputs, parameters_of(self.optimizers))
        return Outcome(norm, skips, stats)

    def _warn(self, what: str, refusal: str) -> None:
        message = f"{what}: {refusal}"
        config = resolve(None, self._options)
        if config.fallback == "error" and not self.error_if_nonfinite:
            raise CaptureError(f"{message} (options={{'fallback': 'error'}} was given)")
        if message not in self._reported:
            self._reported.add(message)
            session.reports.append(Report(fallback=message[0].upper() + message[1:]))

    def _compiled_steps(self) -> list[Callable[[], Any]]:
        if self._steps is None:
            self._steps = []
            for optimizer in self.optimizers:
                options = compat.CompileArguments(None, self._options)
                compiled = compile_bound(optimizer.step, optimizer, options)
                self._steps.append(compiled or optimizer.step)
        return self._steps

    def _end(self, tail_inputs: Mapping[str, Any], params: Sequence[Any]) -> None:
        """Do the host's work after the launches."""
        self._averages.end(tail_inputs)
        if self.zero_grad and not tail_inputs["zeroed"]:
            clear(params)

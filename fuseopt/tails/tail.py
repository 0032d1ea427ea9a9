"""`fuseopt.tail`: the whole tail of a training step, as one object that is called.

It unscales, measures, clips, steps, averages and clears, in the order in which trainers
do, in one graph where that can be (`fused`); where hooks or other code of the user's
run between the parts, and in the call that makes an optimizer's state, in pieces.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch.optim import Optimizer

from .. import compat
from ..compiler.entry import attach
from ..compiler.report import Report
from ..compiler.session import session
from ..config import resolve
from ..errors import CaptureError, FuseoptError, UnsupportedInput
from ..isolate.compile import compile_bound
from ..isolate.isolated import TRACES
from .adaptive import checked_adaptive
from .arguments import (
    checked_limit,
    checked_scaler,
    clear,
    gradients_of,
    optimizers_of,
    parameters_of,
)
from .beside import Beside
from .in_one import InOne
from .led_parts import Clipped
from .order import ClipOrder
from .outcome import Outcome
from .pieces import run
from .stats import COLUMNS, row_names
from .steady import Steady, asked_of, may_last
from .steps import function_of, has_gradients, has_state, steps_of

Tensors = list[torch.Tensor]


class Tail:
    """The tail of a training step. Called after `backward()`, in place of all of it.

    `clip_grad_norm`, `clip_grad_value`, `clip_grad_adaptive`, `norm_type`, `zero_grad`,
    `skip_nonfinite`, `stats`, `grad_divisor` and the `decays` of the averages may be
    set between calls.
    """

    #: what the columns of `stats` are
    stats_names = COLUMNS

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        scaler: torch.amp.GradScaler | None,
        beside: Beside,
        order: ClipOrder,
        **options: Any,
    ) -> None:
        self.optimizers = [*optimizers]
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
        self._lock = threading.RLock()
        self._beside = beside
        self._order = order
        self._options = options
        #: of each optimizer: has it stepped before, so that its state is there?
        self._begun = [False for _ in optimizers]
        self._steps: list[Any] | None = None
        self._told: set[str] = set()
        self._fused: InOne | None = None
        #: what their steps are, and the functions of those: see `function_of`
        self._seen: list[Any] = []
        self._functions: list[tuple[Any, str]] = []
        self._steady: Steady | None = None

    def __call__(
        self,
        average: bool = True,
        accumulated: Any = None,
        step: int | None = None,
    ) -> Outcome:
        """Do it; `average=False` leaves the averages as they are. `accumulated` stands
        for `grad_divisor` in this call; `step` is for averages of other packages whose
        update takes one. Raises ValueError, TypeError, UnsupportedInput
        before anything is written.
        """
        if torch.compiler.is_dynamo_compiling():
            raise UnsupportedInput(
                "a fuseopt.tail compiles itself: call it outside of torch.compile"
            )
        with self._lock:
            self._beside.ask(average, step)
            if accumulated is None and step is None and self._steady is not None:
                done = self._again(self._steady, average)
                if done is not None:
                    return done
            params = parameters_of(self.optimizers)
            content = self._content(accumulated, params)
            self._steady = None
            lasts = accumulated is None and step is None
            return self._call(content, params, average if lasts else None)

    def _again(self, steady: Steady, average: bool) -> Outcome | None:
        """Do what the last call did, if this one is asked for the same; else None."""
        fused = self._fused
        if fused is None or fused.why or compat.stance() not in TRACES:
            return None
        if not steady.holds(self, average):
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
        return self._fused_outcome(steady.content, result, steady.params)

    def _call(
        self, content: dict[str, Any], params: list[Any], average: bool | None
    ) -> Outcome:
        """Do it. `average`: of a call that may be done again, was it asked for?"""
        why = self._why_not_fused(content)
        if not why:
            self._beside.trace(content)
            done = self._in_one(content, params, average)
            if isinstance(done, Outcome):
                return done
            if isinstance(done, Clipped):
                rest = {**content, "divisor": None, "max_norm": None}
                return Outcome(done.norm, self._in_pieces(rest, done.why).skips)
            why = done
            if content["objects"]:
                # without them it may be one graph
                self._beside.alone, content["objects"] = why, []
                self._fused = None
                return self._call(content, params, average)
        return self._in_pieces(content, why)

    def _in_one(
        self, content: dict[str, Any], params: list[Any], average: bool | None
    ) -> Outcome | Clipped | str:
        """Do it in one graph; or why nothing was done, or no more than the clip."""
        assert self._fused is not None
        grads = gradients_of(params)
        if self._beside.alone:
            self._tell("an average is updated by itself", self._beside.alone)
        drops = self.zero_grad is True
        with torch.no_grad(), self._marks():
            result = self._fused.step(content, drops, params, grads)
        if isinstance(result, (str, Clipped)):
            return result
        if self._fused.repeats and average is not None:
            asked = asked_of(self)
            if may_last(content, asked):
                strangers = self._order.strangers(params)
                self._steady = Steady(asked, average, content, params, strangers)
        return self._fused_outcome(content, result, params)

    @property
    def stats_rows(self) -> list[str]:
        """What the rows of `stats` are: the names of all parameters."""
        return row_names(self.names, parameters_of(self.optimizers))

    def __reduce__(self) -> Any:
        raise TypeError("a fuseopt.tail cannot be copied or pickled; make another one")

    def __repr__(self) -> str:
        names = ", ".join(type(x).__name__ for x in self.optimizers)
        return f"<tail of {names}>"

    # ---------------------------------------------------------------- what is given

    def _content(self, accumulated: Any, every: list[Any]) -> dict[str, Any]:
        """What a call is done with, all of it checked; see `sequence.Given`. `every`:
        all parameters.
        """
        if accumulated is None:
            accumulated = self.grad_divisor
        max_norm = checked_limit("clip_grad_norm", self.clip_grad_norm)
        max_value = checked_limit("clip_grad_value", self.clip_grad_value)
        if self.zero_grad not in (True, False, "zeros"):
            raise ValueError(
                f"zero_grad is {self.zero_grad!r}; it is True (set to None), 'zeros' "
                "or False"
            )
        scale = None
        founds: list[torch.Tensor | None] = [None for _ in self.optimizers]
        if self.scaler is not None and self.scaler.is_enabled():
            scale = compat.scale_of(self.scaler)
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
            "places": self._order.places(every),
            "judged": bool(self.skip_nonfinite),
            **self._beside.content(every, self.decays),
            "zeroed": self.zero_grad == "zeros",
            "measured": bool(self.stats),
            "factor": None,
        }

    def _found_before(self, optimizer: Optimizer) -> torch.Tensor | None:
        """What the scaler found where the user has called `unscale_` already."""
        scaler = self.scaler
        assert scaler is not None
        stage = compat.stage_of(scaler, optimizer)
        if stage is compat.STAGES.STEPPED:
            raise RuntimeError(
                "this tail has been called already since the last update() of its "
                "scaler"
            )
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
        (found, *_) = compat.founds_of(scaler, optimizer).values()
        return found

    # ---------------------------------------------------------------- one graph

    def _why_not_fused(self, content: dict[str, Any]) -> str:
        """Why this call is done in pieces; "" if it is to be one graph."""
        self._follow_steps()
        for k, optimizer in enumerate(self.optimizers):
            if not self._begun[k] and not has_state(optimizer):
                return "begin"
            if not compat.unhooked(optimizer):
                return "hooks run, or a mode is on, around a step"
            if optimizer.defaults.get("differentiable"):
                return "a step is differentiable"
        if self.error_if_nonfinite:
            return "error_if_nonfinite asks for the norm before anything is written"
        if compat.stance() not in TRACES:
            return "begin"
        if self._fused is None:
            self._fused = self._made()
        if self._fused.why:
            return self._fused.why
        return "" if all(map(has_gradients, self.optimizers)) else "begin"

    def _follow_steps(self) -> None:
        """Let nothing count that was made for steps of which optimizers have others."""
        now = [x for optimizer in self.optimizers for x in steps_of(optimizer)]
        if len(now) == len(self._seen) and all(map(is_, now, self._seen)):
            return
        functions = [function_of(optimizer) for optimizer in self.optimizers]
        if functions != self._functions or any(why for _, why in functions):
            self._fused = self._steps = None
        self._functions, self._seen = functions, now

    def _made(self) -> InOne:
        attach()
        functions, reasons = zip(*self._functions, strict=True)
        disabled = map(compat.disabled, self.optimizers)
        why = next(filter(None, [*reasons, *disabled]), "")
        options = self._options
        made = InOne(self.optimizers, functions, resolve(None, options), options)
        made.whole.why = made.why or why
        return made

    @contextlib.contextmanager
    def _marks(self) -> Any:
        """The marks that profilers are given of each step."""
        with contextlib.ExitStack() as stack:
            for optimizer in self.optimizers:
                if not compat.undisturbed(optimizer):
                    name = f"Optimizer.step#{type(optimizer).__name__}.step"
                    mark = torch.autograd.profiler.record_function(name)
                    stack.enter_context(mark)
            yield

    def _fused_outcome(
        self,
        content: Mapping[str, Any],
        result: Sequence[torch.Tensor],
        params: Sequence[Any],
    ) -> Outcome:
        rest = [*result]
        n = len(self.optimizers)
        skips: list[bool | torch.Tensor] = [False] * n
        founds = content["founds"]
        known = content["scale"] is not None or content["judged"]
        if known:
            skips, rest = [*rest[:n]], rest[n:]
        for k, optimizer in enumerate(self.optimizers):
            # a scheduler puts its mark on a step of the optimizer's own
            own = vars(optimizer).get("step")
            if own is not None and hasattr(own, "_wrapped_by_lr_sched"):
                optimizer._opt_called = True  # type: ignore[attr-defined]
            compat.ran(optimizer)
            if content["scale"] is not None:
                found = None if founds[k] is not None else rest.pop(0)
                assert self.scaler is not None
                compat.has_stepped(self.scaler, optimizer, found)
        self._end(content, params)
        stats = rest.pop() if content["measured"] else None
        return Outcome(rest[0] if rest else None, skips, stats)

    # ---------------------------------------------------------------- in pieces

    def _in_pieces(self, content: dict[str, Any], why: str) -> Outcome:
        eager = why == "begin"
        if not eager:
            self._tell("a tail runs in pieces", why)
        steps = self._eager_steps() if eager else self._compiled_steps()
        raises = bool(self.error_if_nonfinite)
        scaler = None if content["scale"] is None else self.scaler
        given = self.optimizers, steps, scaler, content, raises
        norm, skips, stats = run(*given, compiled=not eager)
        for k, skip in enumerate(skips):
            self._begun[k] |= not skip
        self._end(content, parameters_of(self.optimizers))
        return Outcome(norm, skips, stats)

    def _tell(self, what: str, why: str) -> None:
        said = f"{what}: {why}"
        if said in self._told:
            return
        self._told.add(said)
        config = resolve(None, self._options)
        if config.fallback == "error" and not self.error_if_nonfinite:
            raise CaptureError(f"{said} (options={{'fallback': 'error'}} was given)")
        session.reports.append(Report(fallback=said[0].upper() + said[1:]))

    def _eager_steps(self) -> list[Callable[[], Any]]:
        return [optimizer.step for optimizer in self.optimizers]

    def _compiled_steps(self) -> list[Callable[[], Any]]:
        if self._steps is None:
            self._steps = []
            for optimizer in self.optimizers:
                asked = compat.Asked(None, self._options)
                step = compile_bound(optimizer.step, optimizer, asked)
                self._steps.append(step or optimizer.step)
        return self._steps

    def _end(self, content: Mapping[str, Any], params: Sequence[Any]) -> None:
        """What is left for the host."""
        self._beside.end(content)
        if self.zero_grad is True:
            clear(params)


# ---------------------------------------------------------------- the door


def tail(
    optimizers: Optimizer | Sequence[Optimizer],
    *,
    clip_grad_norm: float | torch.Tensor | None = None,
    norm_type: float = 2.0,
    clip_parameters: Iterable[torch.Tensor] | torch.nn.Module | None = None,
    clip_grad_value: float | torch.Tensor | None = None,
    clip_grad_adaptive: float | tuple[Any, Any] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    ema: Iterable[Any] = (),
    copies: Iterable[torch.Tensor] | None = None,
    zero_grad: bool | str = False,
    error_if_nonfinite: bool = False,
    skip_nonfinite: bool = False,
    grad_divisor: float | torch.Tensor | None = None,
    stats: bool = False,
    names: Iterable[str] | torch.nn.Module | None = None,
    **options: Any,
) -> Tail:
    """The tail of a training step: what is called after `backward()`.

    `ema`: pairs of a list of averages, in the order of the parameters of all groups,
    and a decay; or (averages, what they are of, decay); or an AveragedModel, or such an
    object of another package, and the model or the parameters that it is of.
    `copies`: tensors that get what the parameters are, in other dtypes. `zero_grad`:
    True sets gradients to None and never writes the clipped ones, "zeros" fills them,
    False leaves them clipped. `clip_parameters`: the parameters, or the model, in whose
    order the total norm is added up; as groups have them where it is not given.
    `clip_grad_adaptive`: a factor, or (factor, eps). `grad_divisor`: what gradients are
    divided by before all else, such as the number of micro-batches that they are sums
    over. `stats`: measure each parameter; `names`: theirs, or the model that has them.
    `options` are those of fuseopt.config.

    Raises NotAnOptimizer, ConfigError; TypeError and ValueError for what no tail can
    do.
    """
    every = optimizers_of(optimizers)
    resolve(None, options)
    for optimizer in every:
        known = session.tails.get(optimizer)
        if known is not None and known() is not None:
            raise FuseoptError(
                f"this {type(optimizer).__name__} has a tail already; drop that one "
                "before another is made"
            )
    beside = Beside(ema, copies)
    order = ClipOrder(clip_parameters)
    made = Tail(every, checked_scaler(scaler), beside, order, **options)
    made.clip_grad_norm, made.clip_grad_value = clip_grad_norm, clip_grad_value
    made.clip_grad_adaptive = clip_grad_adaptive
    made.norm_type, made.zero_grad = norm_type, zero_grad
    made.error_if_nonfinite, made.skip_nonfinite = error_if_nonfinite, skip_nonfinite
    made.stats, made.grad_divisor = stats, grad_divisor
    made.names = names if isinstance(names, torch.nn.Module) else [*(names or ())]
    # what can be told now is told now
    checked_limit("clip_grad_norm", clip_grad_norm)
    checked_limit("clip_grad_value", clip_grad_value)
    checked_limit("grad_divisor", grad_divisor)
    checked_adaptive(clip_grad_adaptive)
    beside.check(parameters_of(every))
    for optimizer in every:
        session.tails[optimizer] = weakref.ref(made)
    return made

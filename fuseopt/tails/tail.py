"""`fuseopt.tail`: the whole tail of a training step, as one object that is called.

It unscales, measures, clips, steps, averages and clears, in the order in which trainers
do, in one graph where that can be (`fused`); where hooks or other code of the user's
run between the parts, and in the call that makes an optimizer's state, in pieces.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

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
    check_beside,
    checked_decay,
    checked_limit,
    checked_scaler,
    optimizers_of,
    parameters_of,
)
from .fused import Fused
from .models import Averaged
from .outcome import Outcome
from .pieces import run
from .stats import COLUMNS, row_names
from .steps import function_of, has_gradients, has_state

Tensors = list[torch.Tensor]
#: The tail of each optimizer that has one.
_tails: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Tail]] = (
    weakref.WeakKeyDictionary()
)


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
        averages: Sequence[tuple[Tensors, Tensors | None]],
        decays: Sequence[Any],
        models: Sequence[Averaged],
        copies: Tensors | None,
        **options: Any,
    ) -> None:
        self.optimizers = [*optimizers]
        self.scaler = scaler
        self.decays = [*decays]
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
        self._averages = averages
        self._models = models
        self._copies = copies
        self._options = options
        #: of each optimizer: has it stepped before, so that its state is there?
        self._begun = [False for _ in optimizers]
        self._steps: list[Any] | None = None
        self._told: set[str] = set()
        self._fused: Fused | None = None
        self._checked: list[int] = []
        self._beside: tuple[list[Any], list[Any]] = [], []

    def __call__(self, average: bool = True, accumulated: Any = None) -> Outcome:
        """Do it; `average=False` leaves the averages as they are. `accumulated` stands
        for `grad_divisor` in this call. Raises ValueError, TypeError, UnsupportedInput
        before anything is written.
        """
        if torch.compiler.is_dynamo_compiling():
            raise UnsupportedInput(
                "a fuseopt.tail compiles itself: call it outside of torch.compile"
            )
        with self._lock:
            return self._call(average, accumulated)

    def _call(self, average: bool, accumulated: Any) -> Outcome:
        content = self._content(average, accumulated)
        why = self._why_not_fused(content)
        if not why:
            assert self._fused is not None
            drops = self.zero_grad is True
            with torch.no_grad(), self._marks():
                result = self._fused.step(content, drops)
            if result is not None:
                return self._fused_outcome(content, result)
            why = self._fused.why
        return self._in_pieces(content, why)

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

    def _content(self, average: bool, accumulated: Any) -> dict[str, Any]:
        """What a call is done with, all of it checked; see `sequence.Given`."""
        if accumulated is None:
            accumulated = self.grad_divisor
        max_norm = checked_limit("clip_grad_norm", self.clip_grad_norm)
        max_value = checked_limit("clip_grad_value", self.clip_grad_value)
        if self.zero_grad not in (True, False, "zeros"):
            raise ValueError(
                f"zero_grad is {self.zero_grad!r}; it is True (set to None), 'zeros' "
                "or False"
            )
        if len(self.decays) != len(self._averages):
            raise ValueError(
                f"{len(self.decays)} decays for {len(self._averages)} averages"
            )
        decays = [checked_decay(decay) for decay in self.decays]
        averages, copies = self._checked_beside()
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
            "judged": bool(self.skip_nonfinite),
            "averages": averages if average else [],
            "decays": decays if average else [],
            "models": [x.update() for x in self._models] if average else [],
            "copies": copies,
            "zeroed": self.zero_grad == "zeros",
            "measured": bool(self.stats),
        }

    def _checked_beside(self) -> tuple[list[Any], list[Any]]:
        """Averages and copies, each with what they are of."""
        every = parameters_of(self.optimizers)
        known = [*map(id, every)]
        if known != self._checked:
            averages = []
            for k, (own, source) in enumerate(self._averages):
                of = every if source is None else source
                check_beside(f"average {k}", own, of)
                averages.append((own, of))
            copies = []
            if self._copies is not None:
                check_beside("copies", self._copies, every)
                copies = [(self._copies, every)]
            self._beside, self._checked = (averages, copies), known
        return self._beside

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
        grads = [
            p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        if not grads:
            raise UnsupportedInput(
                f"all gradients of {type(optimizer).__name__} are None, so the scaler "
                "cannot tell whether to skip its step"
            )
        if stage is compat.STAGES.READY:
            if any(g.dtype == torch.float16 for g in grads):
                raise ValueError("Attempting to unscale FP16 gradients.")
            return None
        (found, *_) = compat.founds_of(scaler, optimizer).values()
        return found

    # ---------------------------------------------------------------- one graph

    def _why_not_fused(self, content: dict[str, Any]) -> str:
        """Why this call is done in pieces; "" if it is to be one graph."""
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
        grads = [p.grad for p in parameters_of(self.optimizers) if p.grad is not None]
        if not grads:
            return "begin"
        if len({*map(id, grads)}) < len(grads):
            return "parameters share a gradient, which is scaled twice"
        if len({g.device for g in grads}) > 1:
            return "gradients lie on several devices"
        scale = content["scale"]
        if scale is not None and scale.device != grads[0].device:
            return "the scaler's scale lies on another device"
        if any(not o for o in map(has_gradients, self.optimizers)):
            return "begin"
        return ""

    def _made(self) -> Fused:
        attach()
        functions, why = [], ""
        for optimizer in self.optimizers:
            function, reason = function_of(optimizer)
            functions.append(function)
            why = why or reason or compat.disabled(optimizer)
        made = Fused(
            self.optimizers, functions, resolve(None, self._options), self._options
        )
        made.why = made.why or why
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
        self, content: dict[str, Any], result: Sequence[torch.Tensor]
    ) -> Outcome:
        rest = [*result]
        n = len(self.optimizers)
        skips: list[bool | torch.Tensor] = [False] * n
        founds = content["founds"]
        known = content["scale"] is not None or content["judged"]
        if known:
            skips, rest = [*rest[:n]], rest[n:]
        for k, optimizer in enumerate(self.optimizers):
            if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
                optimizer._opt_called = True  # type: ignore[attr-defined]
            compat.ran(optimizer)
            if content["scale"] is not None:
                found = None if founds[k] is not None else rest.pop(0)
                assert self.scaler is not None
                compat.has_stepped(self.scaler, optimizer, found)
        self._end(content)
        stats = rest.pop() if content["measured"] else None
        return Outcome(rest[0] if rest else None, skips, stats)

    # ---------------------------------------------------------------- in pieces

    def _in_pieces(self, content: dict[str, Any], why: str) -> Outcome:
        eager = why == "begin"
        if not eager:
            self._tell(why)
        steps = self._eager_steps() if eager else self._compiled_steps()
        raises = bool(self.error_if_nonfinite)
        scaler = None if content["scale"] is None else self.scaler
        norm, skips, stats = run(self.optimizers, steps, scaler, content, raises)
        for k, skip in enumerate(skips):
            self._begun[k] |= not skip
        self._end(content)
        return Outcome(norm, skips, stats)

    def _tell(self, why: str) -> None:
        if why in self._told:
            return
        self._told.add(why)
        config = resolve(None, self._options)
        if config.fallback == "error" and not self.error_if_nonfinite:
            raise CaptureError(
                f"a tail runs in pieces: {why} (options={{'fallback': 'error'}} was "
                "given)"
            )
        session.reports.append(Report(fallback=f"A tail runs in pieces: {why}"))

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

    def _end(self, content: dict[str, Any]) -> None:
        """What is left for the host."""
        for x in self._models if content["models"] else ():
            x.updated()
        if self.zero_grad is True:
            for p in parameters_of(self.optimizers):
                p.grad = None


# ---------------------------------------------------------------- the door


def tail(
    optimizers: Optimizer | Sequence[Optimizer],
    *,
    clip_grad_norm: float | torch.Tensor | None = None,
    norm_type: float = 2.0,
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
    and a decay; or (averages, what they are of, decay); or an AveragedModel and the
    model that it is of. `copies`: tensors that get what
    the parameters are, in other dtypes. `zero_grad`: True sets gradients to None and
    never writes the clipped ones, "zeros" fills them, False leaves them clipped.
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
        known = _tails.get(optimizer)
        if known is not None and known() is not None:
            raise FuseoptError(
                f"this {type(optimizer).__name__} has a tail already; drop that one "
                "before another is made"
            )
    averages: list[tuple[Tensors, Tensors | None]] = []
    decays: list[Any] = []
    models: list[Averaged] = []
    for entry in ema:
        if not isinstance(entry, (tuple, list)) or len(entry) not in (2, 3):
            raise TypeError("ema takes pairs of a list of averages and a decay")
        if isinstance(entry[0], AveragedModel):
            if len(entry) != 2 or not isinstance(entry[1], torch.nn.Module):
                raise TypeError("beside an AveragedModel, ema takes the model it is of")
            models.append(Averaged(*entry))
            continue
        own, *source, decay = entry
        averages.append((list(own), list(source[0]) if source else None))
        decays.append(checked_decay(decay))
    made = Tail(
        every,
        checked_scaler(scaler),
        averages,
        decays,
        models,
        None if copies is None else list(copies),
        **options,
    )
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
    made._checked_beside()
    for optimizer in every:
        _tails[optimizer] = weakref.ref(made)
    return made

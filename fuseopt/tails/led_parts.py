"""Tail of DTensors: two launches on the local parts, and the collective between them.

The step is led, on local parts, as without a tail (`shards`). The first launch and the
collective of torch's clip compute the numbers that all processes need for the norm
(`part_norm`). The launch of the step computes the total norm and the factor, and clips.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from .. import compat
from ..config import Config
from ..inputs.keys import LanesDiffer
from ..inputs.last_call import LastCall
from ..inputs.pending_gradients import PartMismatch
from ..replicate.driver import LedOptimizer
from ..replicate.step_wrapper import StepWrapper
from ..runtime.recent import Recent
from ..shards.local import LocalOptimizer, part_of
from ..shards.step import helper_of
from .columns import LastArguments, columns_of, dtypes_beside, shared_of
from .compiling import Compiling
from .fused import REFUSALS
from .led import MAX_FORMS, TailPlan, form_key
from .part_norm import PartNorm
from .parts_call import PartsCall
from .parts_wrapper import PartsWrapper
from .totals_graph import NO_FACTORS, Factors

Tensors = list[torch.Tensor]
Tail = tuple[torch.Tensor, ...]
#: A norm whose collective was called, and for what.
Asked = tuple[PartNorm, Tensors, Mapping[str, Any], LocalOptimizer]
#: Options that a led tail of DTensors cannot do; see `TailInputs`.
OTHERWISE = ("models", "objects", "adaptive", "measured")


class ClipAlone(NamedTuple):
    """Result of a call that did only the clip: the reason `refusal`, the total norm."""

    refusal: str
    norm: torch.Tensor


class LocalColumns:
    """Local parts of averages and copies, read again if these have changed."""

    def __init__(self) -> None:
        self._wholes: Tensors = []
        self._locals: Tensors = []
        self._specs: list[Any] = []
        self._parts: list[Tensors] = []

    def of(self, columns: Sequence[Tensors], params: Tensors) -> list[Tensors]:
        """Return the local parts of each column. Raises LanesDiffer for tensors that
        are not sharded as their parameter is.
        """
        tensors = [t for column in columns for t in column]
        if (
            len(tensors) == len(self._wholes)
            and len(columns) == len(self._parts)
            and all(map(is_, tensors, self._wholes))
            and all(map(is_, map(compat.local_part, tensors), self._locals))
            and all(map(is_, map(compat.spec_of, tensors), self._specs))
        ):
            return self._parts
        specs = [*map(compat.spec_of, params)]
        parts = [
            [part_of(t, s, "an average") for t, s in zip(column, specs, strict=True)]
            for column in columns
        ]
        self._wholes, self._parts = tensors, parts
        self._locals = [*map(compat.local_part, tensors)]
        self._specs = [*map(compat.spec_of, tensors)]
        return parts


class LedPartsTail:
    """Tail of one optimizer of DTensors. `refusal` is the reason why it runs in pieces,
    or "".

    `function` is the step's function without the layers around it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        function: Callable[..., Any],
        config: Config,
        options: Mapping[str, Any],
    ) -> None:
        self.optimizer = optimizer
        self.config = config
        self.refusal = ""
        self.compiling = Compiling(function, options)
        self.local: LocalOptimizer | None = None
        self.norms: Recent[PartNorm] = Recent(MAX_FORMS)
        self.forms: Recent[tuple[LedOptimizer, torch.Tensor]] = Recent(
            MAX_FORMS, lambda form: form[0].release()
        )
        self.local_columns = LocalColumns()
        #: the representatives of the last call
        self.leader: LedOptimizer | None = None
        self.arguments = LastArguments()
        self.last_call = LastCall()
        #: what did the last call, if `again` may repeat it
        self.last: PartsCall | None = None

    def release(self) -> None:
        """Release everything that was compiled."""
        self.forms.clear()
        self.norms.clear()
        self.local_columns = LocalColumns()
        self.local = self.leader = self.last = None
        self.arguments = LastArguments()
        self.compiling.forget()

    def why_not(self, tail_inputs: Mapping[str, Any]) -> str:
        """Return the reason why a call must run in pieces, or ""."""
        if self.refusal or self.config.verify:
            return self.refusal or "the option verify is on"
        unsupported = [name for name in OTHERWISE if tail_inputs[name]]
        (found_inf,) = tail_inputs["founds"]
        if tail_inputs["scale"] is not None or found_inf is not None:
            unsupported.append("a scaler")
        if tail_inputs["judged"]:
            unsupported.append("skip_nonfinite")
        tensor_names = [
            name
            for name in ("max_norm", "divisor")
            if isinstance(tail_inputs[name], torch.Tensor)
        ]
        unsupported += [f"a {name} that is a tensor" for name in tensor_names]
        if not unsupported:
            return ""
        return f"parameters are DTensors, and there is {unsupported[0]}"

    def step(
        self,
        tail_inputs: Mapping[str, Any],
        drops: bool,
        params: Tensors,
        grads: Tensors,
    ) -> Tail | ClipAlone | str:
        """Do one tail. Return the result of `sequence.whole`; or the reason why nothing
        was written; or a `ClipAlone` if only the clip was done. `params` and `grads`
        are the optimizer's, each of them once.
        """
        self.last = None
        self._begin()
        try:
            local = self.local = self.local or LocalOptimizer(self.optimizer)
            try:
                wholes = columns_of(tail_inputs, params)
                columns = self._refresh(local, params, wholes)
            except (LanesDiffer, PartMismatch) as error:
                self.last_call.ended = True
                return str(error)  # the next call may succeed
            inputs = tail_inputs, drops, grads, wholes, columns
            return self._led(
                local,
                lambda asked: self._step(
                    local, self._call(local, *inputs), grads, asked
                ),
            )
        finally:
            if self.local is not None:
                self.local.given.drop()

    def _refresh(
        self, local: LocalOptimizer, params: Tensors, wholes: Sequence[Tensors]
    ) -> list[Tensors]:
        """Read the local parts of this call; return those of averages and copies."""
        if not compat.are_spread(params):
            raise LanesDiffer("some of its parameters are DTensors, and others are not")
        local.refresh(self.optimizer, helper_of(self.leader))
        return self.local_columns.of(wholes, params)

    def again(self) -> Tail | ClipAlone | None:
        """Repeat the last call with the present gradients. Return None if something
        else may have changed. Then nothing was written, and no collective called.
        """
        call, local, self.last = self.last, self.local, None
        if not self._begin() or call is None or local is None:
            self.last_call.ended = True
            return None
        try:
            parts = local.again(helper_of(self.leader))
            ids = {*map(id, parts or ())}
            # each a tensor, and no two of them one tensor, which is scaled twice
            alone = parts is not None and len(ids) == len(parts) and id(None) not in ids
            if parts is None or not alone or local.grad_specs is not call.specs:
                self.last_call.ended = True
                return None
            result = self._led(
                local, lambda asked: self._done(local, call, parts, asked)
            )
            if isinstance(result, str):
                return None
            if not isinstance(result, ClipAlone):
                if call.writes_gradients:
                    local.count_gradients()
                self.last = call
            return result
        finally:
            local.given.drop()

    def _begin(self) -> bool:
        """Begin a call. Return False if an exception ended the one before."""
        ended = self.last_call.begin()
        for norm in () if ended else self.norms.values():
            norm.forget()
        return ended

    def _led(
        self, local: LocalOptimizer, do: Callable[[list[Asked]], Tail | None]
    ) -> Tail | ClipAlone | str:
        """Do one tail by `do`, whose argument gets the norm whose collective was
        called.
        """
        asked: list[Asked] = []
        try:
            result = do(asked)
        except (PartMismatch, *REFUSALS) as error:
            self.refusal = compat.reason_of(error)
            result = None
        self.last_call.ended = True
        if result is not None:
            return result
        local.given.drop()
        clipped = None
        if asked and self.config.fallback != "error":
            # the collective was called, and must not be called again
            clipped = self._clip_alone(*asked[0])
        self.release()
        return clipped or self.refusal

    def _call(
        self,
        local: LocalOptimizer,
        tail_inputs: Mapping[str, Any],
        drops: bool,
        grads: Tensors,
        wholes: Sequence[Tensors],
        columns: Sequence[Tensors],
    ) -> PartsCall:
        """Return what does this call, made if need be."""
        parts = [g for g in local.given.grads or () if g is not None]
        norm = self._norm(tail_inputs, grads, parts)
        local_params = local.given.params
        leader, total = self._form(tail_inputs, norm, drops, local_params, columns)
        shared = shared_of(tail_inputs, NO_FACTORS, local_params[0].device)
        if norm is not None:
            shared = [*norm.values, total, tail_inputs["max_norm"], *shared]
        scaled = [tail_inputs[x] for x in ("divisor", "max_norm", "max_value")]
        return PartsCall(
            leader,
            self.arguments.of(columns, shared),
            norm,
            total,
            tail_inputs,
            [t for column in wholes for t in column],
            tail_inputs["zeroed"] or (not drops and any(x is not None for x in scaled)),
            local.grad_specs,
        )

    def _step(
        self,
        local: LocalOptimizer,
        call: PartsCall,
        grads: Tensors,
        asked: list[Asked],
    ) -> Tail | None:
        """Do one tail after `_refresh`."""
        given = local.given.grads or []
        result = self._done(local, call, [g for g in given if g is not None], asked)
        if result is not None and call.writes_gradients:
            compat.bump_versions(grads)
        if len(grads) == len(given) and not call.written:
            self.last = call
        return result

    def _done(
        self,
        local: LocalOptimizer,
        call: PartsCall,
        parts: Tensors,
        asked: list[Asked],
    ) -> Tail | None:
        """Do one tail of these parts, but for the versions of gradients.

        Returns None, with `refusal`, if nothing but the collective was called.
        """
        leader, norm, make = call.leader, call.norm, self.compiling.make
        if norm is not None:
            norm(parts, call.tail_inputs["divisor"])
            asked.append((norm, parts, call.tail_inputs, local))
        n_reports = len(leader.task.reports)
        self.leader = leader
        repeats = local.given.grads is None
        if not (call.again(local, parts, make) if repeats else call.step(local, make)):
            self.refusal = leader.refusal or "Dynamo leaves it to eager"
            return None
        compat.bump_versions(call.written)
        self.compiling.add_first_launch(leader.task.reports[n_reports:])
        if norm is None:
            return ()
        return (compat.spread(call.total.clone(), norm.spec),)

    def _clip_alone(
        self,
        norm: PartNorm,
        parts: Tensors,
        tail_inputs: Mapping[str, Any],
        local: LocalOptimizer,
    ) -> ClipAlone:
        """Clip with the values of the collective that was called."""
        if tail_inputs["divisor"] is not None:
            torch._foreach_div_(parts, tail_inputs["divisor"])
        total, factor = norm.finish(norm.values, tail_inputs["max_norm"])
        torch._foreach_mul_(parts, factor)
        compat.bump_versions(local.gradients())
        return ClipAlone(self.refusal, compat.spread(total.clone(), norm.spec))

    def _norm(
        self, tail_inputs: Mapping[str, Any], grads: Tensors, parts: Tensors
    ) -> PartNorm | None:
        """Return the norm for these gradients, made if need be; None without a clip."""
        if tail_inputs["max_norm"] is None:
            return None
        divisor = tail_inputs["divisor"]
        key = (
            len(grads),
            tuple(tail_inputs["places"]),
            tail_inputs["norm_type"],
            type(divisor),
        )
        norm = self.norms.get(key)
        if norm is None or not norm.fits(grads):
            arguments = (
                grads,
                parts,
                tail_inputs["places"],
                tail_inputs["norm_type"],
                divisor,
            )
            norm = PartNorm(*arguments, self.config, self.compiling.first_launch)
        return self.norms.use(key, norm)

    def _form(
        self,
        tail_inputs: Mapping[str, Any],
        norm: PartNorm | None,
        drops: bool,
        params: Sequence[torch.Tensor],
        columns: Sequence[Tensors],
    ) -> tuple[LedOptimizer, torch.Tensor]:
        """Return the representatives for these options, made if there are none, and the
        tensor for the total norm.
        """
        dtypes = dtypes_beside([*params], columns)
        key = form_key(tail_inputs, drops, dtypes), norm and id(norm)
        cached = self.forms.get(key)
        if cached is not None:
            return self.forms.use(key, cached)
        total, factors = torch.empty(()), NO_FACTORS
        if norm is not None:
            device = norm.values[0].device
            total = torch.empty((), dtype=norm.dtype, device=device)
            factors = Factors(None, None, total)
        inner = TailPlan(tail_inputs, factors, drops, dtypes)
        form: StepWrapper = inner if norm is None else PartsWrapper(inner, norm)
        assert self.local is not None
        leader = self.compiling.leader(form, self.local.outward)
        return self.forms.use(key, (leader, total))

"""Tail of one optimizer in two launches, for which Dynamo traces few lanes.

The first launch computes norm, flags and factors from all gradients (`totals`). The
second is the step, led by models of its lanes as without a tail. The same kernel scales
gradients before the step and writes averages and copies after it. So the first call of
a tail takes as long as that of the step, at any number of lanes. A new set of gradients
needs no retrace and no rebuild.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch.optim import Optimizer

from .. import compat
from ..capture import Captured
from ..capture.fx.interpreter import OWN
from ..config import Config
from ..inputs.keys import GRAD, LanesDiffer
from ..inputs.last_call import LastCall
from ..replicate.driver import LedOptimizer
from ..replicate.models import BESIDE
from ..replicate.tail_arguments import StaleTailInputs, TailArguments
from ..replicate.worth import many_lanes
from ..runtime.recent import Recent
from .adaptive import adapt
from .arguments import gradients_of, parameters_of
from .columns import columns_of, dtypes_beside, shared_of
from .compiling import Compiling
from .fused import REFUSALS
from .models import ModelUpdate
from .predication import DROPPED, predicate
from .sequence import average, clamp
from .stats import norms_of
from .table import OF_PARAMETERS, Table
from .totals import NormLaunch, Totals
from .totals_graph import Factors

Tensors = list[torch.Tensor]
#: Most forms that are kept, each for one set of options.
MAX_FORMS = 8
#: Number of times that a call is prepared, while its gradients differ from the plan's.
TRIES = 4
#: Options that a led tail cannot do; see `TailInputs`.
OTHERWISE = ("objects",)


class TailPlan:
    """Calls around a step, without their tensors and numbers; see `StepWrapper`.

    The shared arguments come in this order: divisor, factor that unscales, factor that
    clips, limits of elements, factor of adaptive clipping, its eps. For each average `1
    - decay` follows, or a decay that is a tensor. The number of updates of each
    averaged model follows, and the flag. Arguments without a use are missing.
    """

    def __init__(
        self, tail_inputs: Mapping[str, Any], factors: Factors, drops: bool, dtypes: Any
    ) -> None:
        self.divides = tail_inputs["divisor"] is not None
        self.factors = sum(x is not None for x in (factors.unscales, factors.clips))
        limit = tail_inputs["max_value"]
        #: the number of shared arguments for the limit of elements: 0, 1 or 2
        self.limits = 0 if limit is None else 2 - isinstance(limit, torch.Tensor)
        self.adapts = tail_inputs["adaptive"] is not None
        self.averages = len(tail_inputs["averages"])
        self.models: list[ModelUpdate] = [x.alone() for x in tail_inputs["models"]]
        self.copies = len(tail_inputs["copies"])
        self.decays = [isinstance(x, torch.Tensor) for x in tail_inputs["decays"]]
        self.zeroed = tail_inputs["zeroed"]
        self.measured = tail_inputs["measured"]
        self.measures = self.measured or self.adapts
        self.drops = drops
        self.dtypes = dtypes
        #: while a graph is captured: the parameters before the step
        self._params_before: Tensors = []

        def before(
            params: Tensors,
            grads: Sequence[torch.Tensor | None],
            columns: Sequence[Tensors],
            shared: Sequence[Any],
        ) -> None:
            self._params_before = [p.clone() for p in params] if self.measured else []
            self._before(params, grads, shared)

        def after(
            params: Tensors,
            grads: Sequence[torch.Tensor | None],
            columns: Sequence[Tensors],
            shared: Sequence[Any],
        ) -> None:
            present_grads = [g for g in grads if g is not None]
            self._after(params, present_grads, columns, shared)

        for function in (before, after):
            setattr(function, OWN, True)
        self.before, self.after = before, after

    def _before(
        self,
        params: Tensors,
        grads_or_none: Sequence[torch.Tensor | None],
        shared: Sequence[Any],
    ) -> None:
        remaining = [*shared]
        pairs = [
            (p, g) for p, g in zip(params, grads_or_none, strict=True) if g is not None
        ]
        if not pairs:
            return
        grads = unit_grads = [g for _, g in pairs]
        scales = [remaining.pop(0) for _ in range(self.divides + self.factors)]
        if self.adapts and not self.limits:
            # the norms of units are those of scaled gradients that are not stored
            unit_grads = list(torch._foreach_mul(grads, 1.0))
            for k, scale in enumerate(scales):
                scaled = torch._foreach_div if k < self.divides else torch._foreach_mul
                products = scaled(unit_grads, scale)
                # the product of a tensor without dimensions may have the scale's dtype
                unit_grads = [
                    x.to(g.dtype) for x, g in zip(products, grads, strict=True)
                ]
        for k, scale in enumerate(scales):
            if k < self.divides:
                torch._foreach_div_(grads, scale)
            else:
                torch._foreach_mul_(grads, scale)
        limits = [remaining.pop(0) for _ in range(self.limits)]
        if limits:
            clamp(grads, *limits)
        if self.adapts:
            factor, eps = remaining[:2]
            adapt([p for p, _ in pairs], grads, factor, eps, unit_grads)

    def _after(
        self,
        params: Tensors,
        grads: Tensors,
        columns: Sequence[Tensors],
        shared: Sequence[Any],
    ) -> None:
        first = self.divides + self.factors + self.limits + 2 * self.adapts
        for k in range(self.averages):
            # a decay that is a number comes as `1 - decay`
            decay = shared[first + k]
            average(columns[k], params, decay, None if self.decays[k] else decay)
        remaining = [*columns[self.averages :]]
        for k, model in enumerate(self.models, first + self.averages):
            model.apply(zip(remaining.pop(0), params, strict=True), shared[k])
        for _ in range(self.copies):
            torch._foreach_copy_(remaining.pop(0), params)
        if self.measured:
            params_before, self._params_before = self._params_before, []
            for norms in (
                norms_of(params),
                norms_of([*torch._foreach_sub(params, params_before)]),
            ):
                torch._foreach_copy_(remaining.pop(0), norms)
        if self.zeroed and grads:
            torch._foreach_zero_(grads)

    def finish(
        self, captured: Captured, kinds: Sequence[str | None], flag: int | None
    ) -> Captured:
        """See `StepWrapper`: add the skip of the step, and drop gradients not read
        later.
        """
        modes: dict[int, int] = {}
        for place, kind in enumerate(kinds):
            if kind == GRAD:
                if self.drops:
                    modes[place] = DROPPED
            elif flag is not None and kind != BESIDE:
                modes[place] = 0
        flags = {}
        if flag is not None:
            sources = [b.source for b in captured.graph.buffers]
            are_inputs = [b.kind in ("static", "arg") for b in captured.graph.buffers]
            pairs = zip(sources, are_inputs, strict=True)
            is_flag = [is_input and source == flag for source, is_input in pairs]
            flags[0] = is_flag.index(True)
        return predicate(captured, modes, flags) if modes else captured


def form_key(
    tail_inputs: Mapping[str, Any], drops: bool, dtypes: Sequence[Mapping[Any, Any]]
) -> tuple[Any, ...]:
    """Return what a TailPlan with these arguments depends on, besides factors."""
    return (
        drops,
        tail_inputs["zeroed"],
        tail_inputs["measured"],
        tuple([frozenset(x.items()) for x in dtypes]),
        tuple(x.key for x in tail_inputs["models"]),
        tuple(map(type, tail_inputs["decays"])),
        *(type(tail_inputs[x]) for x in ("divisor", "max_value")),
        *map(type, tail_inputs["adaptive"] or ()),
    )


class LedTail:
    """Tail of one optimizer whose step is led. `refusal` is the reason why it no longer
    is, or "".

    `function` is the step's function without the layers around it.
    """

    led_at_any_size = False
    #: false if a step does more than the driver's
    only_leads = True

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
        self.forms: Recent[LedOptimizer] = Recent(MAX_FORMS, LedOptimizer.release)
        self.totals = Totals(config, self.compiling.first_launch)
        #: the statistics of each parameter; None until a call measures them
        self.table: Table | None = None
        #: the columns of averaged models in the last call
        self.models: list[Tensors] = []
        #: what ran the last call, and its arguments
        self.last: tuple[LedOptimizer, TailArguments, NormLaunch] | None = None
        self.last_call = LastCall()

    def release(self) -> None:
        """Release everything that was compiled."""
        self.last = None
        self.forms.clear()
        self.totals = Totals(self.config, self.compiling.first_launch)
        self.compiling.forget()

    def wants(self, tail_inputs: Mapping[str, Any]) -> bool:
        """Can a call be led, and is that worth while?"""
        if (
            self.refusal
            or self.config.verify
            or any(tail_inputs[name] for name in OTHERWISE)
        ):
            return False
        no_other_clip = (
            tail_inputs["max_norm"] is None and tail_inputs["max_value"] is None
        )
        if tail_inputs["adaptive"] is not None and no_other_clip:
            if tail_inputs["scale"] is not None or tail_inputs["judged"]:
                return False  # in one graph the flag comes with the norms of units
        if not all(model.key is not None for model in tail_inputs["models"]):
            return False
        return self.led_at_any_size or many_lanes(self.optimizer)

    def step(
        self,
        tail_inputs: Mapping[str, Any],
        drops: bool,
        params: Tensors,
        grads: Tensors,
    ) -> tuple[torch.Tensor, ...] | None:
        """Do one tail. Return the result of `sequence.whole`, or None, with `refusal`,
        if nothing was written.

        With `drops`, nothing reads gradients after the call. `params` and `grads` are
        the optimizer's, each of them once.
        """
        self._begin()
        try:
            result = self._step(tail_inputs, drops, params, grads)
        except REFUSALS as error:
            self.refusal = compat.reason_of(error)
            result = None
        self.last_call.ended = True
        if result is None:
            self.release()
        return result

    @property
    def helper(self) -> ctypes.PyDLL | None:
        """The library of the guards, once calls can be repeated."""
        return None if self.last is None else self.last[0].recent.helper

    def again(self) -> tuple[torch.Tensor, ...] | None:
        """Repeat the last call with the present gradients. Return None if something
        else may have changed. Then nothing was written, and `step` must be called.
        """
        self._begin()
        result, refused = None, False
        if self.last is not None:
            try:
                result = self._done(*self.last)
                refused = result is None
            except StaleTailInputs:
                self.last = None
            except REFUSALS:
                refused = True
        self.last_call.ended = True
        if refused:
            self.release()
            self.refusal = ""  # `step` finds the reason
        return result

    def _begin(self) -> None:
        """Forget the last call if an exception ended it."""
        if not self.last_call.begin():
            self.totals.forget()
            self.last = None

    def _step(
        self,
        tail_inputs: Mapping[str, Any],
        drops: bool,
        params: Tensors,
        grads: Tensors,
    ) -> tuple[torch.Tensor, ...] | None:
        columns = columns_of(tail_inputs, params)
        cells = self._cells(tail_inputs, params)
        n_averages = len(tail_inputs["averages"])
        columns[n_averages:n_averages] = self._of_models(tail_inputs["models"], params)
        if self.table is not None and cells:
            columns += self.table.of_parameters()
        optimizers = [self.optimizer]

        def read_grads() -> Tensors:
            return gradients_of(parameters_of(optimizers))

        for _ in range(TRIES):
            norm_launch = self.totals.of(tail_inputs, grads, read_grads, cells)
            factors = norm_launch.factors
            shared = shared_of(tail_inputs, factors, params[0].device)
            tensors = [id(x) for x in shared if isinstance(x, torch.Tensor)]
            if len({*tensors}) < len(tensors):
                raise LanesDiffer("one tensor is in two arguments of a tail")
            leader = self._form(tail_inputs, factors, drops, params, columns)
            tail_arguments = TailArguments(columns, shared, factors.skip, norm_launch)
            try:
                result = self._done(leader, tail_arguments, norm_launch)
            except StaleTailInputs:
                self.totals.drop(norm_launch)
                grads = read_grads()
                continue
            if result is not None:
                for model in tail_inputs["models"]:
                    model.finish(params)
                tail_arguments.again = leader.lanes
                self.last = leader, tail_arguments, norm_launch
            return result
        raise LanesDiffer("gradients change during the step")

    def _of_models(
        self, models: Sequence[ModelUpdate], params: Tensors
    ) -> list[Tensors]:
        """Return a column of averages for each averaged model: the lists of the last
        call if their tensors are the same.
        """
        columns = [x.beside(params) for x in models]
        last = self.models
        if len(last) != len(columns) or not all(
            len(previous) == len(column) and all(map(is_, previous, column))
            for previous, column in zip(last, columns, strict=True)
        ):
            self.models = columns
        return self.models

    def _cells(self, tail_inputs: Mapping[str, Any], params: Tensors) -> list[Tensors]:
        """Return the columns for statistics of gradients; [] without statistics."""
        if not tail_inputs["measured"]:
            return []
        if self.table is None or not self.table.fits(params):
            self.table = Table(len(params), params[0].device)
        return self.table.of_gradients([p.grad is not None for p in params])

    def _done(
        self,
        leader: LedOptimizer,
        tail_arguments: TailArguments,
        norm_launch: NormLaunch,
    ) -> tuple[torch.Tensor, ...] | None:
        """Launch a tail. Return None, with `refusal`, if nothing was written. Raises
        StaleTailInputs.
        """
        n_reports = len(leader.task.reports)
        try:
            did_step = leader.step(
                self.optimizer, self.compiling.make, tail_arguments=tail_arguments
            )
        finally:
            norm_launch.done()
        if not did_step:
            self.refusal = leader.refusal or "Dynamo leaves it to eager"
            return None
        if len(leader.task.reports) > n_reports:
            self.compiling.add_first_launch(leader.task.reports[n_reports:])
        return self.results(norm_launch)

    def results(self, norm_launch: NormLaunch) -> tuple[torch.Tensor, ...]:
        """Return the results of a tail that was launched."""
        if not norm_launch.cells:
            return tuple(norm_launch.results)
        assert self.table is not None
        return *norm_launch.results, self.table.numbers.clone()

    def _form(
        self,
        tail_inputs: Mapping[str, Any],
        factors: Factors,
        drops: bool,
        params: Tensors,
        columns: Sequence[Tensors],
    ) -> LedOptimizer:
        """Return the representatives for these options, made if there are none."""
        n_cells = len(OF_PARAMETERS) * tail_inputs["measured"]
        dtypes = dtypes_beside(params, columns[: len(columns) - n_cells])
        key = form_key(tail_inputs, drops, dtypes), *(x is None for x in factors)
        leader = self.forms.get(key)
        if leader is None:
            form = TailPlan(tail_inputs, factors, drops, [*dtypes, *[None] * n_cells])
            leader = self._leader_of(form)
        return self.forms.use(key, leader)

    def _leader_of(self, form: TailPlan) -> LedOptimizer:
        return self.compiling.leader(form)

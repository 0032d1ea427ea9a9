"""Tail of one optimizer in two launches, for which Dynamo traces few lanes.

The first launch computes norm, flags and factors from all gradients (`totals`). The
second is the step, led by models of its lanes as without a tail. The same kernel scales
gradients before the step and writes averages and copies after it. So the first call of
a tail takes as long as that of the step, at any number of lanes. A new set of gradients
needs no retrace and no rebuild.
"""

from __future__ import annotations

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
from ..replicate.aside import StaleTailInputs, TailArguments
from ..replicate.driver import LedOptimizer
from ..replicate.models import BESIDE
from ..replicate.worth import FEW_OF_TAIL, many_lanes
from .adaptive import adapt
from .arguments import gradients_of, parameters_of
from .compiling import Compiling
from .fused import REFUSALS
from .models import Updated
from .predication import DROPPED, predicate
from .sequence import average, clamp
from .stats import norms_of
from .table import OF_PARAMETERS, Table
from .totals import Factors, NormLaunch, Totals

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
        self, content: Mapping[str, Any], factors: Factors, drops: bool, dtypes: Any
    ) -> None:
        self.divides = content["divisor"] is not None
        self.factors = sum(x is not None for x in (factors.unscales, factors.clips))
        limit = content["max_value"]
        #: the number of shared arguments for the limit of elements: 0, 1 or 2
        self.limits = 0 if limit is None else 2 - isinstance(limit, torch.Tensor)
        self.adapts = content["adaptive"] is not None
        self.averages = len(content["averages"])
        self.models: list[Updated] = [x.alone() for x in content["models"]]
        self.copies = len(content["copies"])
        self.decays = [isinstance(x, torch.Tensor) for x in content["decays"]]
        self.zeroed = content["zeroed"]
        self.measured = content["measured"]
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


class Led:
    """Tail of one optimizer whose step is led. `why` is the reason why it no longer is,
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
        self.why = ""
        self.compiling = Compiling(function, options)
        self.forms: dict[Any, LedOptimizer] = {}
        self.totals = Totals(config, self.compiling.first_launch)
        #: the statistics of each parameter; None until a call measures them
        self.table: Table | None = None
        #: the columns of averaged models in the last call
        self.models: list[Tensors] = []
        #: what ran the last call, and its arguments
        self.last: tuple[LedOptimizer, TailArguments, NormLaunch] | None = None
        # true if the last call ended normally
        self._sound = True

    def release(self) -> None:
        """Release everything that was compiled."""
        self.last = None
        for leader in self.forms.values():
            leader.release()
        self.forms.clear()
        self.totals = Totals(self.config, self.compiling.first_launch)
        self.compiling.forget()

    def wants(self, content: Mapping[str, Any]) -> bool:
        """Can a call be led, and is that worth while?"""
        if self.why or self.config.verify or any(content[name] for name in OTHERWISE):
            return False
        no_other_clip = content["max_norm"] is None and content["max_value"] is None
        if content["adaptive"] is not None and no_other_clip:
            if content["scale"] is not None or content["judged"]:
                return False  # in one graph the flag comes with the norms of units
        if not all(model.key is not None for model in content["models"]):
            return False
        return many_lanes(self.optimizer, FEW_OF_TAIL)

    def step(
        self,
        content: Mapping[str, Any],
        drops: bool,
        params: Tensors,
        grads: Tensors,
    ) -> tuple[torch.Tensor, ...] | None:
        """Do one tail. Return the result of `sequence.whole`, or None, with `why`, if
        nothing was written.

        With `drops`, nothing reads gradients after the call. `params` and `grads` are
        the optimizer's, each of them once.
        """
        self._begin()
        try:
            result = self._step(content, drops, params, grads)
        except REFUSALS as error:
            self.why = compat.reason_of(error)
            result = None
        self._sound = True
        if result is None:
            self.release()
        return result

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
        self._sound = True
        if refused:
            self.release()
            self.why = ""  # `step` finds the reason
        return result

    def _begin(self) -> None:
        """Forget the last call if an exception ended it."""
        if not self._sound:
            self.totals.forget()
            self.last = None
        self._sound = False

    def _step(
        self,
        content: Mapping[str, Any],
        drops: bool,
        params: Tensors,
        grads: Tensors,
    ) -> tuple[torch.Tensor, ...] | None:
        columns, cells = columns_of(content, params), self._cells(content, params)
        n_averages = len(content["averages"])
        columns[n_averages:n_averages] = self._of_models(content["models"], params)
        if self.table is not None and cells:
            columns += self.table.of_parameters()
        optimizers = [self.optimizer]

        def read_grads() -> Tensors:
            return gradients_of(parameters_of(optimizers))

        for _ in range(TRIES):
            ahead = self.totals.of(content, grads, read_grads, cells)
            factors = ahead.factors
            shared = shared_of(content, factors, params[0].device)
            tensors = [id(x) for x in shared if isinstance(x, torch.Tensor)]
            if len({*tensors}) < len(tensors):
                raise LanesDiffer("one tensor is in two arguments of a tail")
            leader = self._form(content, factors, drops, params, columns)
            aside = TailArguments(columns, shared, factors.skip, ahead)
            try:
                result = self._done(leader, aside, ahead)
            except StaleTailInputs:
                self.totals.drop(ahead)
                grads = read_grads()
                continue
            if result is not None:
                for model in content["models"]:
                    model.finish(params)
                aside.again = leader.lanes
                self.last = leader, aside, ahead
            return result
        raise LanesDiffer("gradients change during the step")

    def _of_models(self, models: Sequence[Updated], params: Tensors) -> list[Tensors]:
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

    def _cells(self, content: Mapping[str, Any], params: Tensors) -> list[Tensors]:
        """Return the columns for statistics of gradients; [] without statistics."""
        if not content["measured"]:
            return []
        if self.table is None or not self.table.fits(params):
            self.table = Table(len(params), params[0].device)
        return self.table.of_gradients([p.grad is not None for p in params])

    def _done(
        self, leader: LedOptimizer, aside: TailArguments, ahead: NormLaunch
    ) -> tuple[torch.Tensor, ...] | None:
        """Launch a tail. Return None, with `why`, if nothing was written. Raises
        StaleTailInputs.
        """
        n_reports = len(leader.task.told)
        try:
            did_step = leader.step(self.optimizer, self.compiling.make, aside=aside)
        finally:
            ahead.done()
        if not did_step:
            self.why = leader.why or "Dynamo leaves it to eager"
            return None
        if len(leader.task.told) > n_reports:
            self.compiling.tell(leader.task.told[n_reports:])
        if not ahead.cells:
            return tuple(ahead.results)
        assert self.table is not None
        return *ahead.results, self.table.numbers.clone()

    def _form(
        self,
        content: Mapping[str, Any],
        factors: Factors,
        drops: bool,
        params: Tensors,
        columns: Sequence[Tensors],
    ) -> LedOptimizer:
        """Return the representatives for these options, made if there are none."""
        n_cells = len(OF_PARAMETERS) * content["measured"]
        dtypes = dtypes_beside(params, columns[: len(columns) - n_cells])
        key = (
            drops,
            content["zeroed"],
            content["measured"],
            tuple([frozenset(x.items()) for x in dtypes]),
            tuple(x.key for x in content["models"]),
            tuple(map(type, content["decays"])),
            *(type(content[x]) for x in ("divisor", "max_value")),
            *map(type, content["adaptive"] or ()),
            *(x is None for x in factors),
        )
        leader = self.forms.pop(key, None)
        if leader is not None:
            self.forms[key] = leader
        else:
            while len(self.forms) >= MAX_FORMS:
                self.forms.pop(next(iter(self.forms))).release()
            form = TailPlan(content, factors, drops, [*dtypes, *[None] * n_cells])
            leader = self.forms[key] = self.compiling.representatives(form)
        return leader


def columns_of(content: Mapping[str, Any], params: Tensors) -> list[Tensors]:
    """Return the columns of averages and copies, each with a tensor for each parameter.
    Raises LanesDiffer if they are not of all parameters in their order.
    """
    columns = []
    for averages, source in (*content["averages"], *content["copies"]):
        if len(source) != len(params) or not all(map(is_, source, params)):
            raise LanesDiffer("an average does not cover all parameters in their order")
        columns.append(averages)
    return columns


def dtypes_beside(
    params: Tensors, columns: Sequence[Tensors]
) -> list[Mapping[torch.dtype, torch.dtype]]:
    """Return for each column its dtype for each dtype of parameters. Raises LanesDiffer
    if there is more than one.
    """
    dtypes_of_columns: list[Mapping[torch.dtype, torch.dtype]] = []
    for column in columns:
        pairs = {(p.dtype, t.dtype) for p, t in zip(params, column, strict=True)}
        dtypes = dict(pairs)
        if len(dtypes) < len(pairs):
            raise LanesDiffer("averages of parameters of one dtype have several dtypes")
        dtypes_of_columns.append(dtypes)
    return dtypes_of_columns


def shared_of(
    content: Mapping[str, Any], factors: Factors, device: torch.device
) -> list[Any]:
    """Return the arguments that all lanes share, in the order of `TailPlan`."""
    shared = [content["divisor"], factors.unscales, factors.clips]
    limit = content["max_value"]
    if limit is not None:
        shared += [limit] if isinstance(limit, torch.Tensor) else [limit, -limit]
    shared += content["adaptive"] or ()
    shared += [
        decay if isinstance(decay, torch.Tensor) else 1 - decay
        for decay in content["decays"]
    ]
    shared += [x.number.to(device) for x in content["models"]]
    return [x for x in (*shared, factors.skip) if x is not None]

"""A tail in two launches, of which Dynamo traces the step of a few lanes.

The first launch finds what all gradients say (`totals`). The second is the step, led by
models of its lanes as it is without a tail, with what stands around it in the same
kernel: gradients are scaled before it, averages and copies written behind it. So a
tail's first call takes what that of the step does, at any number of lanes, and another
set of gradients is neither traced nor built again.
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
from ..compiler.report import Report
from ..config import Config
from ..isolate.compilations import Compilations
from ..isolate.decorators import leading
from ..replicate.aside import Aside
from ..replicate.driver import Representatives, many_lanes
from ..replicate.models import BESIDE
from ..shadow.lanes import GRAD, Unlike
from .fused import REFUSALS
from .predication import DROPPED, predicate
from .sequence import average, clamp
from .totals import Found, Totals

Tensors = list[torch.Tensor]
#: Sets of what is asked for that are kept.
KEPT = 8
#: What a tail asks for that is not done so.
OTHERWISE = ("models", "objects", "adaptive", "measured")


class Form:
    """What is done around a step, but for tensors and numbers; see `Around`.

    Of what is shared there stand, in this order: the divisor, the factor that unscales,
    the one that clips, limits of elements, what each average lacks to 1 or its decay,
    the flag.
    """

    def __init__(
        self, content: Mapping[str, Any], found: Found, drops: bool, dtypes: Any
    ) -> None:
        self.divides = content["divisor"] is not None
        self.factors = sum(x is not None for x in (found.unscales, found.clips))
        limit = content["max_value"]
        #: None, or how many numbers the limit of elements is
        self.limits = 0 if limit is None else 2 - isinstance(limit, torch.Tensor)
        self.averages = len(content["averages"])
        self.copies = len(content["copies"])
        self.decays = [isinstance(x, torch.Tensor) for x in content["decays"]]
        self.zeroed = content["zeroed"]
        self.drops = drops
        self.dtypes = dtypes

        def before(grads: Tensors, shared: Sequence[Any]) -> None:
            self._before(grads, shared)

        def after(
            params: Tensors,
            grads: Tensors,
            columns: Sequence[Tensors],
            shared: Sequence[Any],
        ) -> None:
            self._after(params, grads, columns, shared)

        for function in (before, after):
            setattr(function, OWN, True)
        self.before, self.after = before, after

    def _before(self, grads: Tensors, shared: Sequence[Any]) -> None:
        rest = [*shared]
        if not grads:
            return
        if self.divides:
            torch._foreach_div_(grads, rest.pop(0))
        for _ in range(self.factors):
            torch._foreach_mul_(grads, rest.pop(0))
        if self.limits == 1:
            clamp(grads, rest[0])
        elif self.limits:
            clamp(grads, *rest[:2])

    def _after(
        self,
        params: Tensors,
        grads: Tensors,
        columns: Sequence[Tensors],
        shared: Sequence[Any],
    ) -> None:
        first = self.divides + self.factors + self.limits
        for k in range(self.averages):
            # where there is no tensor, the number is what the decay lacks to 1
            decay = shared[first + k]
            average(columns[k], params, decay, None if self.decays[k] else decay)
        for own in columns[self.averages :]:
            torch._foreach_copy_(own, params)
        if self.zeroed and grads:
            torch._foreach_zero_(grads)

    def finish(
        self, captured: Captured, kinds: Sequence[str | None], flag: int | None
    ) -> Captured:
        """See `Around`: what a skipped step keeps, and gradients that are dropped."""
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
            kept = [b.kind in ("static", "arg") for b in captured.graph.buffers]
            every = zip(sources, kept, strict=True)
            flags[0] = [k and s == flag for s, k in every].index(True)
        return predicate(captured, modes, flags) if modes else captured


class Led:
    """The tail of one optimizer, whose step is led. `why`: why it no longer is.

    `function`: that of its step, without what is around it. `told` gets Reports.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        function: Callable[..., Any],
        config: Config,
        options: Mapping[str, Any],
    ) -> None:
        self.optimizer = optimizer
        self.function = function
        self.config = config
        self.options = options
        self.why = ""
        self.compilations = Compilations()
        self.forms: dict[Any, Representatives] = {}
        #: the last Report of totals, until it is told with that of a step
        self.untold: list[Report] = []
        self.totals = self._new_totals()
        # did the last call end as calls do?
        self._sound = True

    def release(self) -> None:
        """Keep nothing that was compiled."""
        for few in self.forms.values():
            few.release()
        self.forms.clear()
        self.totals = self._new_totals()
        self.compilations.forget()

    def _new_totals(self) -> Totals:
        untold = self.untold

        def told(report: Report) -> None:
            untold[:] = [report]

        return Totals(self.config, told)

    def wants(self, content: Mapping[str, Any]) -> bool:
        """Can a call be done so, and is it worth while?"""
        if self.why or self.config.verify or any(content[name] for name in OTHERWISE):
            return False
        return many_lanes(self.optimizer)

    def step(
        self,
        content: Mapping[str, Any],
        drops: bool,
        params: Tensors,
        grads: Tensors,
    ) -> tuple[torch.Tensor, ...] | None:
        """Do one tail; what `sequence.whole` returns, or None, with `why`, if nothing
        was done. `params`, `grads`: the optimizer's, none of them twice.
        """
        if not self._sound:
            self.totals.forget()
        self._sound = False
        try:
            result = self._step(content, drops, params, grads)
        except REFUSALS as error:
            self.why = str(error).partition("\n")[0] or type(error).__name__
            result = None
        self._sound = True
        if result is None:
            self.release()
        return result

    def _step(
        self,
        content: Mapping[str, Any],
        drops: bool,
        params: Tensors,
        grads: Tensors,
    ) -> tuple[torch.Tensor, ...] | None:
        columns = columns_of(content, params)
        found = self.totals.of(content, grads)
        shared = shared_of(content, found)
        if len({*map(id, shared)}) < len(shared):
            raise Unlike("what is given to a tail is one tensor in two places")
        few = self._form(content, found, drops, params, columns)
        flag = found.skip
        known = len(few.task.told)
        aside = Aside(columns, shared, flag)
        if not few.step(self.optimizer, self._make, aside=aside):
            self.why = few.why or "Dynamo leaves it to eager"
            return None
        self._tell(few.task.told[known:])
        given = found.skip, found.told, found.norm
        return tuple(x.clone() for x in given if x is not None)

    def _form(
        self,
        content: Mapping[str, Any],
        found: Found,
        drops: bool,
        params: Tensors,
        columns: Sequence[Tensors],
    ) -> Representatives:
        """What does this, made if need be."""
        own = content["averages"] + content["copies"]
        key = (
            drops,
            content["zeroed"],
            len(own),
            tuple(map(type, content["decays"])),
            *(type(content[x]) for x in ("divisor", "max_value")),
            *(x is None for x in found),
        )
        few = self.forms.pop(key, None)
        if few is not None:
            self.forms[key] = few
        else:
            while len(self.forms) >= KEPT:
                self.forms.pop(next(iter(self.forms))).release()
            form = Form(content, found, drops, dtypes_beside(params, columns))
            told = self.compilations.told
            given = self.function, self.options, told
            few = self.forms[key] = Representatives(*given, around=form)
        return few

    def _make(self, backend: Callable[..., Any]) -> Callable[..., Any]:
        lead = leading(self.function)
        made = self.compilations.compile(backend, lead, fullgraph=True)
        return compat.Traced(made, lead)

    def _tell(self, told: Sequence[Report]) -> None:
        """One Report for both launches."""
        for report in told:
            report.traced = f"a tail of a training step, {report.traced}"
            if self.untold:
                report.follow(self.untold[0])


def columns_of(content: Mapping[str, Any], params: Tensors) -> list[Tensors]:
    """The averages and copies, each beside a parameter. Raises Unlike for others."""
    columns = []
    for own, source in (*content["averages"], *content["copies"]):
        if len(source) != len(params) or not all(map(is_, source, params)):
            raise Unlike("an average is not of all parameters in their order")
        columns.append(own)
    return columns


def dtypes_beside(
    params: Tensors, columns: Sequence[Tensors]
) -> list[Mapping[torch.dtype, torch.dtype]]:
    """Of each column, the dtype beside a parameter of some dtype."""
    found: list[Mapping[torch.dtype, torch.dtype]] = []
    for own in columns:
        pairs = {(p.dtype, t.dtype) for p, t in zip(params, own, strict=True)}
        dtypes = dict(pairs)
        if len(dtypes) < len(pairs):
            raise Unlike("averages of parameters of one dtype have several")
        found.append(dtypes)
    return found


def shared_of(content: Mapping[str, Any], found: Found) -> list[Any]:
    """What is the same for all lanes, in the order of `Form`."""
    shared = [content["divisor"], found.unscales, found.clips]
    limit = content["max_value"]
    if limit is not None:
        shared += [limit] if isinstance(limit, torch.Tensor) else [limit, -limit]
    shared += [
        decay if isinstance(decay, torch.Tensor) else 1 - decay
        for decay in content["decays"]
    ]
    return [x for x in (*shared, found.skip) if x is not None]

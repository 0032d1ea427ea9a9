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

from ..capture import Captured
from ..capture.fx.interpreter import OWN
from ..config import Config
from ..replicate.aside import Aside, Other
from ..replicate.driver import Representatives, many_lanes
from ..replicate.models import BESIDE
from ..shadow.lanes import GRAD, Unlike
from .adaptive import adapt
from .arguments import gradients_of, parameters_of
from .compiling import Compiling
from .fused import REFUSALS
from .models import Updated
from .predication import DROPPED, predicate
from .sequence import average, clamp
from .stats import norms_of
from .table import OF_PARAMETERS, Table
from .totals import Ahead, Found, Totals

Tensors = list[torch.Tensor]
#: Sets of what is asked for that are kept.
KEPT = 8
#: So often one call is begun anew, where gradients are other than was planned for.
TRIES = 4
#: What a tail asks for that is not done so.
OTHERWISE = ("objects",)


class Form:
    """What is done around a step, but for tensors and numbers; see `Around`.

    Of what is shared there stand, in this order: the divisor, the factor that unscales,
    the one that clips, limits of elements, factor and eps of units, what each average
    lacks to 1 or its decay, how often each model was averaged, the flag.
    """

    def __init__(
        self, content: Mapping[str, Any], found: Found, drops: bool, dtypes: Any
    ) -> None:
        self.divides = content["divisor"] is not None
        self.factors = sum(x is not None for x in (found.unscales, found.clips))
        limit = content["max_value"]
        #: None, or how many numbers the limit of elements is
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
        #: while a graph is captured: parameters as they were
        self._were: Tensors = []

        def before(
            params: Tensors,
            grads: Sequence[torch.Tensor | None],
            columns: Sequence[Tensors],
            shared: Sequence[Any],
        ) -> None:
            self._were = [p.clone() for p in params] if self.measured else []
            self._before(params, grads, shared)

        def after(
            params: Tensors,
            grads: Sequence[torch.Tensor | None],
            columns: Sequence[Tensors],
            shared: Sequence[Any],
        ) -> None:
            having = [g for g in grads if g is not None]
            self._after(params, having, columns, shared)

        for function in (before, after):
            setattr(function, OWN, True)
        self.before, self.after = before, after

    def _before(
        self,
        params: Tensors,
        every: Sequence[torch.Tensor | None],
        shared: Sequence[Any],
    ) -> None:
        rest = [*shared]
        pairs = [(p, g) for p, g in zip(params, every, strict=True) if g is not None]
        if not pairs:
            return
        grads = again = [g for _, g in pairs]
        scales = [rest.pop(0) for _ in range(self.divides + self.factors)]
        if self.adapts and not self.limits:
            # what norms of units are taken of is in no memory
            again = list(torch._foreach_mul(grads, 1.0))
            for k, scale in enumerate(scales):
                scaled = torch._foreach_div if k < self.divides else torch._foreach_mul
                wide = scaled(again, scale)
                # of a tensor without dimensions it may be as wide as the scale
                again = [x.to(g.dtype) for x, g in zip(wide, grads, strict=True)]
        for k, scale in enumerate(scales):
            if k < self.divides:
                torch._foreach_div_(grads, scale)
            else:
                torch._foreach_mul_(grads, scale)
        limits = [rest.pop(0) for _ in range(self.limits)]
        if limits:
            clamp(grads, *limits)
        if self.adapts:
            factor, eps = rest[:2]
            adapt([p for p, _ in pairs], grads, factor, eps, again)

    def _after(
        self,
        params: Tensors,
        grads: Tensors,
        columns: Sequence[Tensors],
        shared: Sequence[Any],
    ) -> None:
        first = self.divides + self.factors + self.limits + 2 * self.adapts
        for k in range(self.averages):
            # where there is no tensor, the number is what the decay lacks to 1
            decay = shared[first + k]
            average(columns[k], params, decay, None if self.decays[k] else decay)
        rest = [*columns[self.averages :]]
        for k, model in enumerate(self.models, first + self.averages):
            model.apply(zip(rest.pop(0), params, strict=True), shared[k])
        for _ in range(self.copies):
            torch._foreach_copy_(rest.pop(0), params)
        if self.measured:
            were, self._were = self._were, []
            for found in (
                norms_of(params),
                norms_of([*torch._foreach_sub(params, were)]),
            ):
                torch._foreach_copy_(rest.pop(0), found)
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

    `function`: that of its step, without what is around it.
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
        self.forms: dict[Any, Representatives] = {}
        self.totals = Totals(config, self.compiling.first_launch)
        #: where numbers of single parameters are written, once there are any
        self.table: Table | None = None
        #: columns of averaged models
        self.models: list[Tensors] = []
        #: what did the last call, and with what
        self.last: tuple[Representatives, Aside, Ahead] | None = None
        # did the last call end as calls do?
        self._sound = True

    def release(self) -> None:
        """Keep nothing that was compiled."""
        self.last = None
        for few in self.forms.values():
            few.release()
        self.forms.clear()
        self.totals = Totals(self.config, self.compiling.first_launch)
        self.compiling.forget()

    def wants(self, content: Mapping[str, Any]) -> bool:
        """Can a call be done so, and is it worth while?"""
        if self.why or self.config.verify or any(content[name] for name in OTHERWISE):
            return False
        alone = content["max_norm"] is None and content["max_value"] is None
        if content["adaptive"] is not None and alone:
            if content["scale"] is not None or content["judged"]:
                return False  # in one graph the flag comes with the norms of units
        if not all(x.key is not None for x in content["models"]):
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
        self._begin()
        try:
            result = self._step(content, drops, params, grads)
        except REFUSALS as error:
            self.why = str(error).partition("\n")[0] or type(error).__name__
            result = None
        self._sound = True
        if result is None:
            self.release()
        return result

    def again(self) -> tuple[torch.Tensor, ...] | None:
        """Do what the last call did, with the gradients that there are now. None: it is
        not known to be the same, and nothing was done; `step` is to look at all of it.
        """
        self._begin()
        result, anew = None, False
        if self.last is not None:
            try:
                result = self._done(*self.last)
                anew = result is None
            except Other:
                self.last = None
            except REFUSALS:
                anew = True
        self._sound = True
        if anew:
            self.release()
            self.why = ""  # if anything is, `step` finds out
        return result

    def _begin(self) -> None:
        """Take nothing for known if the last call was cut off somewhere."""
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
        at = len(content["averages"])
        columns[at:at] = self._of_models(content["models"], params)
        if self.table is not None and cells:
            columns += self.table.of_parameters()
        optimizers = [self.optimizer]

        def every() -> Tensors:
            return gradients_of(parameters_of(optimizers))

        for _ in range(TRIES):
            ahead = self.totals.of(content, grads, every, cells)
            found = ahead.found
            shared = shared_of(content, found, params[0].device)
            if len({*map(id, shared)}) < len(shared):
                raise Unlike("what is given to a tail is one tensor in two places")
            few = self._form(content, found, drops, params, columns)
            aside = Aside(columns, shared, found.skip, ahead)
            try:
                result = self._done(few, aside, ahead)
            except Other:
                self.totals.drop(ahead)
                grads = every()
                continue
            if result is not None:
                for x in content["models"]:
                    x.finish(params)
                aside.again = few.lanes
                self.last = few, aside, ahead
            return result
        raise Unlike("gradients change while it steps")

    def _of_models(self, models: Sequence[Updated], params: Tensors) -> list[Tensors]:
        """What of averaged models stands beside each parameter: the lists of the last
        call where they hold the same.
        """
        found = [x.beside(params) for x in models]
        known = self.models
        if len(known) != len(found) or not all(
            len(a) == len(b) and all(map(is_, a, b))
            for a, b in zip(known, found, strict=True)
        ):
            self.models = found
        return self.models

    def _cells(self, content: Mapping[str, Any], params: Tensors) -> list[Tensors]:
        """Where what is known of each gradient is written; [] where nobody asks."""
        if not content["measured"]:
            return []
        if self.table is None or not self.table.fits(params):
            self.table = Table(len(params), params[0].device)
        return self.table.of_gradients([p.grad is not None for p in params])

    def _done(
        self, few: Representatives, aside: Aside, ahead: Ahead
    ) -> tuple[torch.Tensor, ...] | None:
        """Do it, or return None; raises Other."""
        known = len(few.task.told)
        try:
            done = few.step(self.optimizer, self.compiling.make, aside=aside)
        finally:
            ahead.done()
        if not done:
            self.why = few.why or "Dynamo leaves it to eager"
            return None
        if len(few.task.told) > known:
            self.compiling.tell(few.task.told[known:])
        if not ahead.room:
            return tuple(ahead.given)
        assert self.table is not None
        return *ahead.given, self.table.numbers.clone()

    def _form(
        self,
        content: Mapping[str, Any],
        found: Found,
        drops: bool,
        params: Tensors,
        columns: Sequence[Tensors],
    ) -> Representatives:
        """What does this, made if need be."""
        n = len(columns) - len(OF_PARAMETERS) * content["measured"]
        key = (
            drops,
            content["zeroed"],
            content["measured"],
            n,
            tuple(x.key for x in content["models"]),
            tuple(map(type, content["decays"])),
            *(type(content[x]) for x in ("divisor", "max_value")),
            *map(type, content["adaptive"] or ()),
            *(x is None for x in found),
        )
        few = self.forms.pop(key, None)
        if few is not None:
            self.forms[key] = few
        else:
            while len(self.forms) >= KEPT:
                self.forms.pop(next(iter(self.forms))).release()
            dtypes = dtypes_beside(params, columns[:n]) + [None] * (len(columns) - n)
            form = Form(content, found, drops, dtypes)
            few = self.forms[key] = self.compiling.representatives(form)
        return few


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
) -> list[Mapping[torch.dtype, torch.dtype] | None]:
    """Of each column, the dtype beside a parameter of some dtype."""
    found: list[Mapping[torch.dtype, torch.dtype] | None] = []
    for own in columns:
        pairs = {(p.dtype, t.dtype) for p, t in zip(params, own, strict=True)}
        dtypes = dict(pairs)
        if len(dtypes) < len(pairs):
            raise Unlike("averages of parameters of one dtype have several")
        found.append(dtypes)
    return found


def shared_of(
    content: Mapping[str, Any], found: Found, device: torch.device
) -> list[Any]:
    """What is the same for all lanes, in the order of `Form`."""
    shared = [content["divisor"], found.unscales, found.clips]
    limit = content["max_value"]
    if limit is not None:
        shared += [limit] if isinstance(limit, torch.Tensor) else [limit, -limit]
    shared += content["adaptive"] or ()
    shared += [
        decay if isinstance(decay, torch.Tensor) else 1 - decay
        for decay in content["decays"]
    ]
    shared += [x.number.to(device) for x in content["models"]]
    return [x for x in (*shared, found.skip) if x is not None]

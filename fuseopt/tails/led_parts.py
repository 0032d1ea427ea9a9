"""A tail of DTensors: two launches on the parts that this process has, and between them
the collective that torch's clip has.

The step is led, on parts, as it is without a tail (`shards`); what is to be known of
all processes' gradients is found before (`part_norm`), and the total of it, the factor
and the clip stand in the launch of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from .. import compat
from ..capture import Captured
from ..capture.fx.interpreter import OWN
from ..config import Config
from ..replicate.around import Around
from ..replicate.aside import Aside
from ..replicate.driver import Representatives
from ..runtime.guards.given import Misfit
from ..shadow.lanes import Unlike
from ..shards.local import LocalOptimizer, part_of
from .compiling import Compiling
from .fused import REFUSALS
from .led import MAX_FORMS, Form, columns_of, dtypes_beside, shared_of
from .part_norm import PartNorm
from .totals import NO_FACTORS, Factors

Tensors = list[torch.Tensor]
#: What a tail asks for that is not done so.
OTHERWISE = ("models", "objects", "adaptive", "measured")


class Clipped(NamedTuple):
    """The clip of a tail is done, the rest is not, and why. `norm`: the total norm."""

    why: str
    norm: torch.Tensor


class PartsForm:
    """What is done around a step of parts; see `Around`.

    It is a `Form` whose clip's factor is made in the launch of the step. What is shared
    begins with what `PartNorm` leaves, a tensor that gets the norm, and the limit.
    """

    def __init__(self, inner: Form, norm: PartNorm) -> None:
        self.inner = inner
        self.measures = inner.measures
        self.dtypes = inner.dtypes
        self.n = len(norm.values)
        finish, n, at = norm.finish, self.n, int(inner.divides)

        def rest(shared: Sequence[Any], factor: Any) -> list[Any]:
            own = [*shared[n + 2 :]]
            return [*own[:at], factor, *own[at:]]

        def before(
            params: Tensors,
            grads: Sequence[torch.Tensor | None],
            columns: Sequence[Tensors],
            shared: Sequence[Any],
        ) -> None:
            norm, factor = finish(shared[:n], shared[n + 1])
            shared[n].copy_(norm)
            inner.before(params, grads, columns, rest(shared, factor))

        def after(
            params: Tensors,
            grads: Sequence[torch.Tensor | None],
            columns: Sequence[Tensors],
            shared: Sequence[Any],
        ) -> None:
            inner.after(params, grads, columns, rest(shared, None))

        for function in (before, after):
            setattr(function, OWN, True)
        self.before, self.after = before, after

    def finish(
        self, captured: Captured, kinds: Sequence[str | None], flag: int | None
    ) -> Captured:
        """See `Around`."""
        return self.inner.finish(captured, kinds, flag)


class Beside:
    """The parts of averages and copies, found anew where these are others."""

    def __init__(self) -> None:
        self._wholes: Tensors = []
        self._locals: Tensors = []
        self._specs: list[Any] = []
        self._parts: list[Tensors] = []

    def of(self, columns: Sequence[Tensors], params: Tensors) -> list[Tensors]:
        """The parts of each column. Raises Unlike for other tensors than such as are
        spread as their parameter is.
        """
        every = [t for own in columns for t in own]
        if (
            len(every) == len(self._wholes)
            and len(columns) == len(self._parts)
            and all(map(is_, every, self._wholes))
            and all(map(is_, map(compat.local_part, every), self._locals))
            and all(map(is_, map(compat.spec_of, every), self._specs))
        ):
            return self._parts
        specs = [*map(compat.spec_of, params)]
        parts = [
            [part_of(t, s, "an average") for t, s in zip(own, specs, strict=True)]
            for own in columns
        ]
        self._wholes, self._parts = every, parts
        self._locals = [*map(compat.local_part, every)]
        self._specs = [*map(compat.spec_of, every)]
        return parts


class LedParts:
    """The tail of one optimizer of DTensors. `why`: why it is done in pieces.

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
        self.local: LocalOptimizer | None = None
        self.norms: dict[Any, PartNorm] = {}
        self.forms: dict[Any, tuple[Representatives, torch.Tensor]] = {}
        self.beside = Beside()
        #: what steps the last form
        self.few: Representatives | None = None
        # did the last call end as calls do?
        self._sound = True

    def release(self) -> None:
        """Keep nothing that was compiled."""
        for few, _ in self.forms.values():
            few.release()
        self.forms.clear()
        self.norms.clear()
        self.beside = Beside()
        self.local = self.few = None
        self.compiling.forget()

    def why_not(self, content: Mapping[str, Any]) -> str:
        """Why a call is done in pieces; "" if it need not be."""
        if self.why or self.config.verify:
            return self.why or "verify was asked for"
        asked = [name for name in OTHERWISE if content[name]]
        (found,) = content["founds"]
        if content["scale"] is not None or found is not None:
            asked.append("a scaler")
        if content["judged"]:
            asked.append("skip_nonfinite")
        tensors = [
            name
            for name in ("max_norm", "divisor")
            if isinstance(content[name], torch.Tensor)
        ]
        asked += [f"a {name} that is a tensor" for name in tensors]
        return f"parameters are DTensors, and there is {asked[0]}" if asked else ""

    def step(
        self,
        content: Mapping[str, Any],
        drops: bool,
        params: Tensors,
        grads: Tensors,
    ) -> tuple[torch.Tensor, ...] | Clipped | str:
        """Do one tail; what `sequence.whole` returns, or why nothing was done, or no
        more than the clip. `params`, `grads`: the optimizer's, none of them twice.
        """
        if not self._sound:
            for norm in self.norms.values():
                norm.forget()
        self._sound = False
        try:
            local = self.local = self.local or LocalOptimizer(self.optimizer)
            try:
                wholes = columns_of(content, params)
                columns = self._refresh(local, params, wholes)
            except (Unlike, Misfit) as error:
                self._sound = True
                return str(error)  # which may be so in this call alone
            return self._led(local, content, drops, params, grads, wholes, columns)
        finally:
            if self.local is not None:
                self.local.given.drop()

    def _refresh(
        self, local: LocalOptimizer, params: Tensors, wholes: Sequence[Tensors]
    ) -> list[Tensors]:
        """Have the parts of this call, and return those of what is beside."""
        if not compat.are_spread(params):
            raise Unlike("some of its parameters are DTensors, and others are not")
        local.refresh(self.optimizer, self._helper())
        return self.beside.of(wholes, params)

    def _led(
        self,
        local: LocalOptimizer,
        content: Mapping[str, Any],
        drops: bool,
        params: Tensors,
        grads: Tensors,
        wholes: Sequence[Tensors],
        columns: Sequence[Tensors],
    ) -> tuple[torch.Tensor, ...] | Clipped | str:
        asked: list[tuple[PartNorm, Tensors]] = []
        try:
            result = self._step(local, content, drops, grads, wholes, columns, asked)
        except (Misfit, *REFUSALS) as error:
            self.why = str(error).partition("\n")[0] or type(error).__name__
            result = None
        self._sound = True
        if result is not None:
            return result
        local.given.drop()
        clipped = None
        if asked and self.config.fallback != "error":
            # all processes were asked, which they are not to be again
            clipped = self._clip_alone(*asked[0], content, grads)
        self.release()
        return clipped or self.why

    def _step(
        self,
        local: LocalOptimizer,
        content: Mapping[str, Any],
        drops: bool,
        grads: Tensors,
        wholes: Sequence[Tensors],
        columns: Sequence[Tensors],
        asked: list[tuple[PartNorm, Tensors]],
    ) -> tuple[torch.Tensor, ...] | None:
        """`asked` gets who has asked all processes, and parts of gradients."""
        parts = [g for g in local.given.grads or () if g is not None]
        norm = self._norm(content, grads, parts)
        heres = local.given.params
        few, total = self._form(content, norm, drops, heres, columns)
        shared = shared_of(content, NO_FACTORS, heres[0].device)
        if norm is not None:
            shared = [*norm.values, total, content["max_norm"], *shared]
            norm(parts, content["divisor"])
            asked.append((norm, parts))
        known = len(few.task.told)
        aside = Aside(columns, shared)
        self.few = few
        if not few.step(local.itself, self.compiling.make, local.given, aside):
            self.why = few.why or "Dynamo leaves it to eager"
            return None
        local.settle()
        moved = [t for own in wholes for t in own]
        scaled = [content[x] for x in ("divisor", "max_norm", "max_value")]
        if content["zeroed"] or (not drops and any(x is not None for x in scaled)):
            moved += grads
        compat.bump_versions(moved)
        self.compiling.tell(few.task.told[known:])
        return () if norm is None else (compat.spread(total.clone(), norm.spec),)

    def _clip_alone(
        self,
        norm: PartNorm,
        parts: Tensors,
        content: Mapping[str, Any],
        grads: Tensors,
    ) -> Clipped:
        """Clip with what processes have told one another."""
        if content["divisor"] is not None:
            torch._foreach_div_(parts, content["divisor"])
        total, factor = norm.finish(norm.values, content["max_norm"])
        torch._foreach_mul_(parts, factor)
        compat.bump_versions(grads)
        return Clipped(self.why, compat.spread(total.clone(), norm.spec))

    def _helper(self) -> Any:
        """The library of the guards, if it may read what lies in memory."""
        few = self.few
        return few.helper if few is not None and self.config.raw_fields else None

    def _norm(
        self, content: Mapping[str, Any], grads: Tensors, parts: Tensors
    ) -> PartNorm | None:
        """What asks all processes, made if need be."""
        if content["max_norm"] is None:
            return None
        divisor = content["divisor"]
        key = len(grads), tuple(content["places"]), content["norm_type"], type(divisor)
        found = self.norms.pop(key, None)
        if found is None or not found.fits(grads):
            given = grads, parts, content["places"], content["norm_type"], divisor
            found = PartNorm(*given, self.config, self.compiling.first_launch)
        while len(self.norms) >= MAX_FORMS:
            del self.norms[next(iter(self.norms))]
        self.norms[key] = found
        return found

    def _form(
        self,
        content: Mapping[str, Any],
        norm: PartNorm | None,
        drops: bool,
        params: Sequence[torch.Tensor],
        columns: Sequence[Tensors],
    ) -> tuple[Representatives, torch.Tensor]:
        """What does this, made if need be, and where the norm goes."""
        dtypes = dtypes_beside([*params], columns)
        key = (
            drops,
            content["zeroed"],
            tuple([frozenset(x.items()) for x in dtypes]),
            tuple(map(type, content["decays"])),
            *(type(content[x]) for x in ("divisor", "max_value")),
            None if norm is None else id(norm),
        )
        known = self.forms.pop(key, None)
        if known is not None:
            self.forms[key] = known
            return known
        while len(self.forms) >= MAX_FORMS:
            self.forms.pop(next(iter(self.forms)))[0].release()
        total, factors = torch.empty(()), NO_FACTORS
        if norm is not None:
            device = norm.values[0].device
            total = torch.empty((), dtype=norm.dtype, device=device)
            factors = Factors(None, None, total)
        inner = Form(content, factors, drops, dtypes)
        form: Around = inner if norm is None else PartsForm(inner, norm)
        assert self.local is not None
        few = self.compiling.representatives(form, self.local.outward)
        self.forms[key] = few, total
        return few, total

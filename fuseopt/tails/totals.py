"""The gradients of a tail -> what its steps wait for: norm, flags, factors; one launch.

Every number here is of all gradients, so no gradient stands for others: the graph is
made of all of them, without Dynamo. It is one node, a function that is run on tensors
without contents when the graph is captured. What it finds goes into tensors without
dimensions, which the next call overwrites.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule

from ..capture.fx.interpreter import OWN
from ..compiler import internal_errors, pipeline
from ..compiler.report import Report
from ..compiler.timing import Clock
from ..config import Config
from ..errors import CaptureError
from ..runtime.binding import Binding
from ..runtime.source import GraphTensors
from ..runtime.step import CompiledStep
from ..shadow.lanes import Unlike
from .order import dtypes_in_order
from .sequence import Given, factor_of, inverse_of, measure, skip_of

Tensors = list[torch.Tensor]
#: Sets of what is asked for that are kept; another number of gradients is one more.
KEPT = 32


class Found(NamedTuple):
    """What was found of the gradients of one optimizer, each None where nobody asked.

    `skip`: is its step skipped? `told`: what GradScaler is told. `norm`: the total
    norm. `unscales`, `clips`: factors of the gradients. The next call overwrites them.
    """

    skip: torch.Tensor | None
    told: torch.Tensor | None
    norm: torch.Tensor | None
    unscales: torch.Tensor | None
    clips: torch.Tensor | None


NOTHING = Found(None, None, None, None, None)


class Totals:
    """Finds what a tail of one optimizer is to know of all its gradients.

    `told` gets the Report of each graph.
    """

    def __init__(self, config: Config, told: Callable[[Report], None]) -> None:
        self.config = config
        self.told = told
        self._graphs: dict[Any, _Totals] = {}

    def of(self, content: Mapping[str, Any], grads: Tensors) -> Found:
        """Find it; `content`: that of a `Given`, but for the optimizers.

        Raises Unlike, CaptureError, CannotBuild, UnsupportedInput.
        """
        scale, max_norm, judged = (content[k] for k in ("scale", "max_norm", "judged"))
        (found,) = content["founds"]
        if scale is None and max_norm is None and not judged and found is None:
            return NOTHING
        if scale is not None and scale.device != grads[0].device:
            raise Unlike("the scaler's scale lies on another device")
        divisor, places = content["divisor"], content["places"]
        numbers = [divisor, max_norm]
        key = (
            len(grads),
            scale is None,
            found is None,
            judged,
            content["norm_type"],
            tuple(places),
            *map(type, numbers),
        )
        beside = scale, found, divisor, max_norm
        graph = self._graphs.pop(key, None)
        while len(self._graphs) >= KEPT:
            del self._graphs[next(iter(self._graphs))]
        if graph is not None:
            with contextlib.suppress(_Reordered):
                result = graph(grads, *beside)
                self._graphs[key] = graph
                return result
        graph = self._graphs[key] = _Totals(content, grads, self.config, self.told)
        return graph(grads, *beside)

    def forget(self) -> None:
        """Take nothing for known that a call leaves to the next: one was cut off."""
        for graph in self._graphs.values():
            graph.step.forget()


class _Totals:
    """What finds it for one set of what is asked for."""

    def __init__(
        self,
        content: Mapping[str, Any],
        grads: Tensors,
        config: Config,
        told: Callable[[Report], None],
    ) -> None:
        (found,) = content["founds"]
        self.n = len(grads)
        # nothing of the tensors is kept, nor which of them there were
        self.content = {k: content[k] for k in ("judged", "norm_type", "places")}
        self.content["order"] = dtypes_in_order(grads, content["places"])
        #: of what stands behind the gradients, what there is
        beside = content["scale"], found, content["divisor"], content["max_norm"]
        tensors = [isinstance(x, torch.Tensor) for x in beside]
        self.order = sorted(
            (k for k, x in enumerate(beside) if x is not None),
            key=lambda k: not tensors[k],
        )
        with torch.no_grad():
            metas = [_meta(x) for x in (*grads, *beside)]
            results = self._results(metas[: self.n], *metas[self.n :])
        kinds = [None if x is None else x.dtype for x in results]
        #: where the graph puts what it finds: the same ones at each call, for memory
        #: that moves is compared with all other memory
        device = grads[0].device
        self.outs = [
            None if kind is None else torch.empty((), dtype=kind, device=device)
            for kind in kinds
        ]
        self.made = [out for out in self.outs if out is not None]
        graph = Graph()
        n_outs = len(self.made)
        names = ["grad"] * self.n + ["out"] * n_outs
        names += [("scale", "found", "divisor", "max_norm")[k] for k in self.order]
        nodes = [graph.placeholder(f"{x}{k}") for k, x in enumerate(names)]
        graph.call_function(self._function(n_outs), tuple(nodes))
        graph.output(())
        gm = GraphModule(torch.nn.Module(), graph)
        args = self._args(grads, beside)

        def tell(report: Report) -> None:
            report.traced = "the totals of a tail, all lanes"
            told(report)

        plan = pipeline.replanner(gm, config, tell, Clock())
        try:
            program = plan(args)
        except Exception as error:
            if internal_errors.is_mishap(error):
                then = "All lanes of the tail are traced."
                raise Unlike(
                    internal_errors.tell(error, gm, args, config, then)
                ) from error
            raise
        source = GraphTensors(gm, program.plan.captured.tensor_args)
        #: the gradients of the call that is under way
        self.grads: Tensors = []
        self.step = CompiledStep(source, program, plan, _Policy(self))

    def _function(self, n_outs: int) -> Callable[..., None]:
        """The one node: it writes to the tensors behind the gradients."""
        n, order = self.n, self.order

        def totals(*args: Any) -> None:
            given: list[Any] = [None] * 4
            for k, x in zip(order, args[n + n_outs :], strict=True):
                given[k] = x
            results = [x for x in self._results(args[:n], *given) if x is not None]
            for out, x in zip(args[n : n + n_outs], results, strict=True):
                if out.dtype != x.dtype:
                    raise CaptureError("the dtype of a total has changed")
                out.copy_(x)

        setattr(totals, OWN, True)
        return totals

    def _results(
        self, grads: Sequence[torch.Tensor], *beside: Any
    ) -> tuple[torch.Tensor | None, ...]:
        """A `Found` of some gradients."""
        scale, found, divisor, max_norm = beside
        given = Given(
            **self.content,
            scale=scale,
            founds=[found],
            divisor=divisor,
            max_norm=max_norm,
        )
        inverse = None if scale is None else inverse_of(scale)
        measured = measure(given, [[*grads]], inverse)
        norm, skip, unscales = measured.norm, None, None
        if given.skips:
            (known,) = measured.founds
            skip = skip_of(given, known, norm, grads[0].device)
            if inverse is not None and found is None:
                # what is known when the flag is comes of the same launch
                unscales = torch.where(skip, inverse, inverse)
        clips = None
        if max_norm is not None and norm is not None:
            clips = factor_of(max_norm, norm)
        told = measured.told[0] if measured.told else None
        return skip, told, norm, unscales, clips

    def _args(self, grads: Tensors, beside: Sequence[Any]) -> list[Any]:
        """What the graph is given."""
        return [*grads, *self.made, *(beside[k] for k in self.order)]

    def __call__(self, grads: Tensors, *beside: Any) -> Found:
        self.grads = grads
        try:
            self.step(*self._args(grads, beside))
        finally:
            self.grads = []
        return Found(*self.outs)

    def check_order(self) -> None:
        """Raise _Reordered if norms are to be added up in another order."""
        if dtypes_in_order(self.grads, self.content["places"]) != self.content["order"]:
            raise _Reordered


def _meta(x: Any) -> Any:
    return x.to("meta") if isinstance(x, torch.Tensor) else x


class _Reordered(Exception):
    """Norms are to be added up in another order."""


class _Policy:
    """Whatever cannot be planned is traced whole; see ChangePolicy."""

    def __init__(self, owner: _Totals) -> None:
        self.owner = weakref.ref(owner)

    def changed(self, bound: Binding, metadata: list[Any], found: int) -> None:
        """Changes are followed, as long as dtypes have the same order."""
        owner = self.owner()
        assert owner is not None
        owner.check_order()

    def overlapping(self) -> None:
        """Gradients that share memory are seen by the step as well."""
        raise Unlike("gradients share memory")

    def refused(self, error: CaptureError) -> None:
        """Nothing was written."""
        raise Unlike(str(error)) from error

    def failed(self, error: Exception, args: Sequence[Any]) -> bool:
        """The same."""
        return False

    def eager(self) -> Callable[..., Any]:
        """Never asked for."""
        raise AssertionError("the totals of a tail are not computed in eager")

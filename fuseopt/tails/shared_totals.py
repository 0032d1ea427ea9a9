"""First launch of a tail of several led optimizers: one norm, and the flags of each.

It does the work of `totals` for gradients of several optimizers. It runs before the
steps, and by itself. Gradients of 16 bits whose masters are stepped are read where they
lie, and widened in the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from ..compiler import pipeline
from ..compiler.report import Report
from ..compiler.timing import Clock
from ..config import Config
from ..errors import CaptureError
from ..inputs.keys import LanesDiffer
from ..inputs.policy import RefusingPolicy
from ..runtime.commit import Pending
from ..runtime.recent import Recent
from ..runtime.source import GraphTensors
from ..runtime.step import CompiledStep
from .new_scalars import NewScalars
from .one_node import one_node, planned
from .order import dtypes_in_order
from .sequence import TailInputs, factor_of, inverse_of, measure, skip_of
from .totals import MAX_GRAPHS, Factors

Tensors = list[torch.Tensor]
#: The options of a call that are numbers or tensors, before the flags of optimizers.
NUMBERS = ("scale", "divisor", "max_norm")


class SharedTotals:
    """Graphs of the first launch. The class calls `notify` with the Report of each."""

    def __init__(self, config: Config, notify: Callable[[Report], None]) -> None:
        self.config = config
        self.notify = notify
        self._graphs: Recent[_SharedGraph] = Recent(MAX_GRAPHS)

    def __call__(
        self,
        tail_inputs: Mapping[str, Any],
        grads: Tensors,
        read: Sequence[Tensors],
        widened: Sequence[bool],
    ) -> tuple[list[Factors], Tensors]:
        """Launch; return the factors of each optimizer, and the results of
        `sequence.whole`.

        `grads` are the gradients that the steps use. `read` has, for each optimizer,
        the tensors with their contents. `widened`: true if these have 16 bits and the
        step's do not. Raises LanesDiffer, CaptureError, CannotBuild, UnsupportedInput.
        """
        founds, judged = tail_inputs["founds"], tail_inputs["judged"]
        numbers = [*(tail_inputs[name] for name in NUMBERS), *founds]
        scale, divisor, max_norm, *_ = numbers
        needs = (scale, max_norm, *founds)
        if not judged and all(x is None for x in needs):
            return [Factors(None, None, tail_inputs["factor"]) for _ in read], []
        if scale is not None and scale.device != grads[0].device:
            raise LanesDiffer("the scaler's scale is on a different device")
        places = tail_inputs["places"]
        order = dtypes_in_order(grads, places)
        key = (
            tuple(map(len, read)),
            (*widened, judged, *(x is None for x in numbers)),
            tail_inputs["norm_type"],
            tuple(places),
            tuple(order),
            *map(type, (divisor, max_norm)),
        )
        graph = self._graphs.get(key)
        if graph is None:
            fixed = {
                "judged": judged,
                "norm_type": tail_inputs["norm_type"],
                "places": [*places],
                "order": order,
            }
            common = self.config, self.notify
            graph = _SharedGraph(fixed, read, widened, numbers, *common)
        self._graphs.use(key, graph)
        return graph(read, numbers)

    def forget(self) -> None:
        """Forget the records of the last call, which an exception ended."""
        for graph in self._graphs.values():
            graph.step.forget()


class _SharedGraph:
    """Graph for one set of options and numbers of gradients."""

    def __init__(
        self,
        fixed: Mapping[str, Any],
        read: Sequence[Tensors],
        widened: Sequence[bool],
        numbers: Sequence[Any],
        config: Config,
        notify: Callable[[Report], None],
    ) -> None:
        self.fixed, self.widened = fixed, [*widened]
        self.sizes = [*map(len, read)]
        self.n = sum(self.sizes)
        #: the indices of the numbers that are not None, tensors first
        self.order = sorted(
            (k for k, x in enumerate(numbers) if x is not None),
            key=lambda k: not isinstance(numbers[k], torch.Tensor),
        )
        grads = [*chain(*read)]
        device = grads[0].device
        with torch.no_grad():
            metas = [_meta(x) for x in (*grads, *numbers)]
            kept, fresh = self._results(metas[: self.n], metas[self.n :])
        #: the steps read these from the same addresses in each call
        self.kept = [
            None if x is None else torch.empty((), dtype=x.dtype, device=device)
            for x in kept
        ]
        self.written = [x for x in self.kept if x is not None]
        self.fresh = NewScalars([x.dtype for x in fresh if x is not None], device)
        n_outs = len(self.written) + len(self.fresh.dtypes)
        names = ["grad"] * self.n + ["out"] * n_outs + ["number"] * len(self.order)
        names = [f"{x}{k}" for k, x in enumerate(names)]
        gm = one_node(self._function(n_outs), names)

        def on_report(report: Report) -> None:
            report.traced = "the totals of a tail, all lanes"
            notify(report)

        replan = pipeline.replanner(gm, config, on_report, Clock())
        args = self._args(read, self.fresh.take(), numbers)
        instead = "The tail runs in pieces."
        program = planned(replan, gm, args, config, instead)
        source = GraphTensors(gm, program.plan.captured.tensor_args)
        self.pending = Pending()
        policy = RefusingPolicy("gradients share memory")
        self.step = CompiledStep(source, program, replan, policy, None, self.pending)

    def _function(self, n_outs: int) -> Callable[..., None]:
        """Return the only node's function. It writes to arguments after the
        gradients.
        """
        n, order = self.n, self.order

        def totals(*args: Any) -> None:
            numbers: list[Any] = [None] * (len(NUMBERS) + len(self.sizes))
            for k, x in zip(order, args[n + n_outs :], strict=True):
                numbers[k] = x
            results = [x for y in self._results(args[:n], numbers) for x in y]
            outs = args[n : n + n_outs]
            for out, x in zip(outs, filter(_there, results), strict=True):
                if out.dtype != x.dtype:
                    raise CaptureError("the dtype of a total has changed")
                out.copy_(x)

        return totals

    def _results(
        self, grads: Sequence[torch.Tensor], numbers: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Compute what the steps read: for each optimizer whether it is skipped and the
        factor that unscales, then the factor that clips. Compute the results too.
        """
        scale, divisor, max_norm, *founds = numbers
        inputs = TailInputs(
            **self.fixed, scale=scale, founds=founds, divisor=divisor, max_norm=max_norm
        )
        remaining, grads_of_each = [*grads], []
        for size, wide in zip(self.sizes, self.widened, strict=True):
            part, remaining = remaining[:size], remaining[size:]
            grads_of_each.append([_wide(g) for g in part] if wide else part)
        inverse = None if scale is None else inverse_of(scale)
        measured = measure(inputs, grads_of_each, inverse)
        norm = measured.norm
        skips: list[Any] = [None for _ in self.sizes]
        unscales: list[Any] = [None for _ in self.sizes]
        for k, found_inf in enumerate(measured.found_infs if inputs.skips else ()):
            skips[k] = skip_of(inputs, found_inf, norm, grads[0].device)
            if inverse is not None and founds[k] is None:
                unscales[k] = torch.where(skips[k], inverse, inverse)
        clips = None
        if max_norm is not None and norm is not None:
            clips = factor_of(max_norm, norm)
        results = [*skips, *measured.flags_for_scaler, norm]
        return [*skips, *unscales, clips], results

    def _args(
        self, read: Sequence[Tensors], fresh: Tensors, numbers: Sequence[Any]
    ) -> list[Any]:
        return [*chain(*read), *self.written, *fresh, *(numbers[k] for k in self.order)]

    def __call__(
        self, read: Sequence[Tensors], numbers: Sequence[Any]
    ) -> tuple[list[Factors], Tensors]:
        """Launch; see `SharedTotals`."""
        results = self.fresh.take()
        begun = self.pending.start()
        try:
            self.step(*self._args(read, results, numbers))
            self.pending.finish(begun)
        finally:
            self.pending.drop()
        n = len(self.sizes)
        *of_each, clips = self.kept
        pairs = zip(of_each[:n], of_each[n:], strict=True)
        return [Factors(skip, unscales, clips) for skip, unscales in pairs], results


def _there(x: Any) -> bool:
    return x is not None


def _wide(g: torch.Tensor) -> torch.Tensor:
    return g.to(torch.float32) if g.itemsize < 4 else g


def _meta(x: Any) -> Any:
    return x.to("meta") if isinstance(x, torch.Tensor) else x

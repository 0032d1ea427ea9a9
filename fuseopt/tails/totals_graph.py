"""Graph that computes what steps need from all gradients: norm, flags and factors.

These numbers depend on all gradients, so no lane can stand for other lanes. The graph
contains all gradients, and is built without Dynamo. It has one node, a function that
the capture runs on meta tensors. The outputs are tensors without dimensions. Gradients
of 16 bits whose masters are stepped are read where they lie, and widened in the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from ..compiler.report import Report
from ..config import Config
from ..errors import CaptureError
from ..inputs.keys import LanesDiffer
from ..inputs.policy import follow
from ..runtime.commit import Pending
from ..runtime.recent import Recent
from .new_scalars import NewScalars
from .one_node import step_of
from .sequence import TailInputs, factor_of, inverse_of, measure, skip_of
from .stats import begin

Tensors = list[torch.Tensor]
#: Most graphs that are kept, each for one set of options and number of gradients.
MAX_GRAPHS = 32
#: The options of a call that are numbers or tensors, before the flags of optimizers.
NUMBERS = ("scale", "divisor", "max_norm")
#: The attributes of a `TailInputs` that a graph has been made for, besides the order.
FIXED = ("judged", "norm_type", "places")


class Factors(NamedTuple):
    """Values that one optimizer's step reads from all gradients; None: not computed.

    Tensors without dimensions, which the next call overwrites. `skip` is a bool, true
    if the step is skipped. `unscales` and `clips` are factors of the gradients.
    """

    skip: torch.Tensor | None
    unscales: torch.Tensor | None
    clips: torch.Tensor | None


NO_FACTORS = Factors(None, None, None)


def numbers_of(tail_inputs: Mapping[str, Any]) -> list[Any]:
    """Return the inputs of a call besides gradients: `NUMBERS`, then the flags."""
    return [*(tail_inputs[name] for name in NUMBERS), *tail_inputs["founds"]]


class TotalsGraph:
    """Graph for one set of options and numbers of gradients.

    `order`: the dtypes in the order in which norms are added up. `read`: the gradients
    of each optimizer. `widened`: true for those of 16 bits that a step widens. `cells`:
    tensors for the norm of each gradient, then for the number of its elements that are
    not finite. `notify`: called with the Report. `changed`: see RefusingPolicy.
    """

    #: what happens after an error inside fuseopt
    instead = "The tail runs in pieces."

    def __init__(
        self,
        tail_inputs: Mapping[str, Any],
        order: list[torch.dtype],
        read: Sequence[Tensors],
        widened: Sequence[bool],
        config: Config,
        notify: Callable[[Report], None],
        cells: Tensors,
        changed: Callable[..., None] = follow,
    ) -> None:
        # it keeps neither the tensors nor their identities
        self.tail_inputs = {k: tail_inputs[k] for k in FIXED}
        self.tail_inputs |= {"order": order, "places": [*tail_inputs["places"]]}
        self.widened, self.sizes = [*widened], [*map(len, read)]
        self.n, self.n_cells = sum(self.sizes), len(cells)
        numbers = numbers_of(tail_inputs)
        #: the indices of the numbers that are not None, tensors first
        self.order = sorted(
            (k for k, x in enumerate(numbers) if x is not None),
            key=lambda k: not is_tensor(numbers[k]),
        )
        grads = [*chain(*read)]
        device = grads[0].device
        with torch.no_grad():
            metas = [_meta(x) for x in (*grads, *numbers)]
            factors, _, fresh = self._results(metas[: self.n], metas[self.n :])
        #: The steps read these from the same addresses in each call, since a guard
        #: compares moved memory with all other memory. Results are fresh tensors.
        kept = [
            None if x is None else torch.empty((), dtype=x.dtype, device=device)
            for x in factors
        ]
        self.factor_tensors = [x for x in kept if x is not None]
        n, clips = len(self.sizes), kept.pop()
        #: the factors of each optimizer
        pairs = zip(kept[:n], kept[n:], strict=True)
        self.factors = [Factors(*pair, clips) for pair in pairs]
        self.fresh = NewScalars([x.dtype for x in fresh if x is not None], device)
        n_outs = len(self.factor_tensors) + self.n_cells + len(self.fresh.dtypes)
        names = ["grad"] * self.n + ["out"] * n_outs
        names += [(*NUMBERS, *["found"] * n)[k] for k in self.order]
        args = self.arguments(grads, cells, self.fresh.take(), numbers)

        def on_report(report: Report) -> None:
            report.traced = "the totals of a tail, all lanes"
            notify(report)

        first = self.n + len(self.factor_tensors)
        rest = self.instead, slice(first, first + self.n_cells), changed
        self.pending = Pending()
        graph = self._function(n_outs), names, args, config, on_report
        self.step = step_of(*graph, *rest, self.pending)

    def _function(self, n_outs: int) -> Callable[..., None]:
        """Return the only node's function. It writes to arguments after the
        gradients.
        """
        n, order = self.n, self.order

        def totals(*args: Any) -> None:
            numbers: list[Any] = [None] * (len(NUMBERS) + len(self.sizes))
            for k, x in zip(order, args[n + n_outs :], strict=True):
                numbers[k] = x
            results = chain(*self._results(args[:n], numbers))
            there = [x for x in results if x is not None]
            for out, x in zip(args[n : n + n_outs], there, strict=True):
                if out.dtype != x.dtype:
                    raise CaptureError("the dtype of a total has changed")
                out.copy_(x)

        return totals

    def _results(
        self, grads: Sequence[torch.Tensor], numbers: Sequence[Any]
    ) -> tuple[list[Any], Tensors, list[Any]]:
        """Compute what the steps read: for each optimizer whether it is skipped and the
        factor that unscales, then the factor that clips. Compute norms and counts of
        each gradient, and the results too. None stands for those that no option needs.
        """
        scale, divisor, max_norm, *founds = numbers
        options = {"scale": scale, "divisor": divisor, "max_norm": max_norm}
        inputs = TailInputs(**self.tail_inputs, **options, founds=founds)
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
                # this launch also computes a value that depends on the flag
                unscales[k] = torch.where(skips[k], inverse, inverse)
        clips = None
        if max_norm is not None and norm is not None:
            clips = factor_of(max_norm, norm)
        of_grads: Tensors = []
        if self.n_cells:
            stats = begin([], measured.norm_grads)
            of_grads = [x.float() for x in (*stats.norms, *stats.counts)]
        results = [*skips, *measured.flags_for_scaler, norm]
        return [*skips, *unscales, clips], of_grads, results

    def arguments(
        self, grads: Tensors, cells: Tensors, fresh: Tensors, numbers: Sequence[Any]
    ) -> list[Any]:
        """Return the arguments of the graph."""
        given = [numbers[k] for k in self.order]
        return [*grads, *self.factor_tensors, *cells, *fresh, *given]

    def forget(self) -> None:
        """Forget the record of the last call."""
        self.step.forget()


G = TypeVar("G", bound=TotalsGraph)


class Graphs(Generic[G]):
    """Graphs of the first launch of tails.

    The class calls `notify` with the Report of each graph.
    """

    def __init__(self, config: Config, notify: Callable[[Report], None]) -> None:
        self.config = config
        self.notify = notify
        self._graphs: Recent[G] = Recent(MAX_GRAPHS)

    def _graph(
        self,
        tail_inputs: Mapping[str, Any],
        numbers: Sequence[Any],
        read: Sequence[Tensors],
        cells: Tensors,
        more: tuple[Any, ...],
        make: Callable[[], G],
    ) -> G:
        """Return the graph for these options and numbers of gradients.

        `numbers`: see `numbers_of`. `more`: what else it depends on. `make`: makes it.
        """
        scale, divisor, max_norm, *_ = numbers
        if scale is not None and scale.device != next(chain(*read)).device:
            raise LanesDiffer("the scaler's scale is on a different device")
        key = (
            (*map(len, read), len(cells)),
            (tail_inputs["judged"], *(x is None for x in numbers)),
            tail_inputs["norm_type"],
            tuple(tail_inputs["places"]),
            *map(type, (divisor, max_norm)),
            *more,
        )
        graph = self._graphs.get(key)
        if graph is None:
            graph = make()
        return self._graphs.use(key, graph)

    def forget(self) -> None:
        """Forget the records of the last call, which an exception ended."""
        for graph in self._graphs.values():
            graph.forget()


def needed(tail_inputs: Mapping[str, Any]) -> bool:
    """Does a tail need numbers of all gradients, besides statistics?"""
    needs = tail_inputs["scale"], tail_inputs["max_norm"], *tail_inputs["founds"]
    return tail_inputs["judged"] or any(x is not None for x in needs)


def is_tensor(x: Any) -> bool:
    """Is this a tensor?"""
    return isinstance(x, torch.Tensor)


def _wide(g: torch.Tensor) -> torch.Tensor:
    return g.to(torch.float32) if g.itemsize < 4 else g


def _meta(x: Any) -> Any:
    return x.to("meta") if is_tensor(x) else x

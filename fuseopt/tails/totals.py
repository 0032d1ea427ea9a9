"""First launch of a led tail: total norm, overflow flags and factors of a step.

These numbers depend on all gradients, so no lane can stand for other lanes. The graph
contains all gradients, and is built without Dynamo. It has one node, a function that
the capture runs on meta tensors. The outputs are tensors without dimensions. The guard
of the step that follows compares all gradients. Where possible
(`runtime/linked_step.py`), this launch uses its result, so that a call compares them
only once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..compiler import pipeline
from ..compiler.report import Report
from ..compiler.timing import Clock
from ..config import Config
from ..errors import CaptureError
from ..inputs.keys import LanesDiffer
from ..inputs.policy import RefusingPolicy
from ..replicate.source import compared_by
from ..replicate.tail_arguments import StaleTailInputs
from ..runtime.binding import Binding
from ..runtime.commit import Launches, Pending
from ..runtime.executor import Program
from ..runtime.linked_step import LinkedStep, link
from ..runtime.recent import Recent
from ..runtime.source import GraphTensors
from ..runtime.step import CompiledStep
from .new_scalars import NewScalars
from .one_node import one_node, planned
from .order import dtypes_in_order
from .sequence import TailInputs, factor_of, inverse_of, measure, skip_of
from .stats import begin

Tensors = list[torch.Tensor]
#: Most graphs that are kept, each for one set of options and number of gradients.
MAX_GRAPHS = 32


class Factors(NamedTuple):
    """Values that one optimizer's step reads from all gradients; None: not computed.

    Tensors without dimensions, which the next call overwrites. `skip` is a bool, true
    if the step is skipped. `unscales` and `clips` are factors of the gradients.
    """

    skip: torch.Tensor | None
    unscales: torch.Tensor | None
    clips: torch.Tensor | None


NO_FACTORS = Factors(None, None, None)


class Totals:
    """Graphs of the first launch of one optimizer's tail.

    The class calls `notify` with the Report of each graph.
    """

    def __init__(self, config: Config, notify: Callable[[Report], None]) -> None:
        self.config = config
        self.notify = notify
        self._graphs: Recent[_TotalsGraph] = Recent(MAX_GRAPHS)

    def of(
        self,
        tail_inputs: Mapping[str, Any],
        grads: Tensors,
        read_grads: Callable[[], Tensors],
        cells_of_grads: Sequence[Tensors] = (),
    ) -> NormLaunch:
        """Return the first launch of a call.

        `tail_inputs` has the attributes of a `TailInputs` without the optimizers.
        `grads` are all gradients; `read_grads` returns those of a later call.
        `cells_of_grads` has two columns of tensors, for the norm of each gradient and
        the number of its elements that are not finite.

        Raises LanesDiffer, CaptureError, CannotBuild, UnsupportedInput.
        """
        cells = [t for column in cells_of_grads for t in column]
        scale, max_norm, judged = (
            tail_inputs[k] for k in ("scale", "max_norm", "judged")
        )
        (found_inf,) = tail_inputs["founds"]
        other_inputs = scale, found_inf, tail_inputs["divisor"], max_norm
        is_needed = (
            cells or judged or any(x is not None for x in (scale, max_norm, found_inf))
        )
        if not is_needed:
            factors = Factors(None, None, tail_inputs["factor"])
            return NormLaunch(None, other_inputs, read_grads, cells, factors)
        if scale is not None and scale.device != grads[0].device:
            raise LanesDiffer("the scaler's scale is on a different device")
        places = tail_inputs["places"]
        key = (
            len(grads),
            len(cells),
            scale is None,
            found_inf is None,
            judged,
            tail_inputs["norm_type"],
            tuple(places),
            *map(type, other_inputs[2:]),
        )
        graph = self._graphs.get(key)
        if graph is None:
            graph = _TotalsGraph(tail_inputs, grads, cells, self.config, self.notify)
        self._graphs.use(key, graph)
        factors = graph.factors
        if tail_inputs["factor"] is not None:  # of an earlier clip; none is made here
            factors = factors._replace(clips=tail_inputs["factor"])
        return NormLaunch(graph, other_inputs, read_grads, cells, factors)

    def drop(self, norm_launch: NormLaunch) -> None:
        """Release a graph that does not fit the present gradients."""
        for key, graph in [*self._graphs.items()]:
            if graph is norm_launch.graph:
                del self._graphs[key]

    def forget(self) -> None:
        """Forget the record of the last call, which an exception ended."""
        for graph in self._graphs.values():
            graph.forget()


class NormLaunch:
    """First launch, for calls with the same inputs besides gradients; see
    `TailArguments.launches_before`.

    `factors` are the tensors that it writes and the step reads.
    """

    def __init__(
        self,
        graph: _TotalsGraph | None,
        other_inputs: tuple[Any, ...],
        read_grads: Callable[[], Tensors],
        cells: Tensors,
        factors: Factors,
    ) -> None:
        self.factors = factors
        self.graph = graph
        self.other_inputs = other_inputs
        self.read_grads = read_grads
        self.cells = cells

    @property
    def results(self) -> Tensors:
        """Results of the last call, which belong to the caller. They are the skip of
        the step, the flag for GradScaler, and the total norm, as far as they exist.
        """
        return [] if self.graph is None else self.graph.results

    def __call__(self, step: CompiledStep) -> Launches:
        """Prepare the launches. The guard of `step` may have compared all gradients.
        Raises StaleTailInputs if the number of gradients has changed.
        """
        graph = self.graph
        if graph is None:
            return ()
        launches = graph.follow(step, self)
        if launches is not None:
            return launches
        grads = self.read_grads()
        if len(grads) != graph.n:
            raise StaleTailInputs
        graph.prepare(grads, self.cells, self.other_inputs)
        graph.link(step, self)
        return graph.pending.launches

    def done(self) -> None:
        """Release the tensors of the call, which has ended."""
        if self.graph is not None:
            self.graph.drop()


class _TotalsGraph:
    """Graph for one set of options and one number of gradients."""

    def __init__(
        self,
        tail_inputs: Mapping[str, Any],
        grads: Tensors,
        cells: Tensors,
        config: Config,
        notify: Callable[[Report], None],
    ) -> None:
        (found_inf,) = tail_inputs["founds"]
        self.n = len(grads)
        # it keeps neither the tensors nor their identities
        self.tail_inputs = {
            k: tail_inputs[k] for k in ("judged", "norm_type", "places")
        }
        self.tail_inputs["order"] = dtypes_in_order(grads, tail_inputs["places"])
        #: the indices of the inputs that are not None, tensors first
        other_inputs = (
            tail_inputs["scale"],
            found_inf,
            tail_inputs["divisor"],
            tail_inputs["max_norm"],
        )
        are_tensors = [*map(_is_tensor, other_inputs)]
        self.order = sorted(
            (k for k, x in enumerate(other_inputs) if x is not None),
            key=lambda k: not are_tensors[k],
        )
        #: the number of outputs that belong to single gradients
        self.n_cells = len(cells)
        with torch.no_grad():
            metas = [_meta(x) for x in (*grads, *other_inputs)]
            results = self._results(metas[: self.n], *metas[self.n :])
        device = grads[0].device
        dtypes = [None if x is None else x.dtype for x in results[:5]]
        #: The step reads these from the same addresses in each call, since a guard
        #: compares moved memory with all other memory. Results are fresh tensors.
        self.factors = Factors(
            *(
                None if dtype is None else torch.empty((), dtype=dtype, device=device)
                for dtype in (dtypes[0], *dtypes[3:])
            )
        )
        self.factor_tensors = [x for x in self.factors if x is not None]
        self.fresh = NewScalars(
            [dtype for dtype in dtypes[:3] if dtype is not None], device
        )
        self.results: Tensors = []
        n_outs = len(self.factor_tensors) + self.n_cells + len(self.fresh.dtypes)
        names = ["grad"] * self.n + ["out"] * n_outs
        names += [("scale", "found", "divisor", "max_norm")[k] for k in self.order]
        names = [f"{x}{k}" for k, x in enumerate(names)]
        gm = one_node(self._function(n_outs), names)
        args = self._args(grads, cells, self.fresh.take(), other_inputs)

        def on_report(report: Report) -> None:
            report.traced = "the totals of a tail, all lanes"
            notify(report)

        replan = pipeline.replanner(gm, config, on_report, Clock())
        first = self.n + len(self.factor_tensors)

        def plan(args: Sequence[Any]) -> Program:
            # all cells lie in one tensor, but the plan may take them as separate ones
            separate = [torch.empty_like(x) for x in args[first : first + self.n_cells]]
            return replan([*args[:first], *separate, *args[first + self.n_cells :]])

        instead = "All lanes of the tail are traced."
        program = planned(plan, gm, args, config, instead)
        source = GraphTensors(gm, program.plan.captured.tensor_args)
        #: the gradients of the call that is under way
        self.grads: Tensors = []
        self.pending = Pending()
        policy = RefusingPolicy(
            "gradients share memory", _checked_by(weakref.ref(self))
        )
        self.step = CompiledStep(source, program, plan, policy, None, self.pending)
        #: the link to a step's guard, the NormLaunch of the link, and memory to keep
        #: until the launches have run
        self.norm_launch: Callable[[], NormLaunch | None] = lambda: None
        self.linked: LinkedStep | None = None
        self._memory: Any = None

    def _function(self, n_outs: int) -> Callable[..., None]:
        """Return the only node's function. It writes to arguments after the
        gradients.
        """
        n, order = self.n, self.order

        def totals(*args: Any) -> None:
            inputs: list[Any] = [None] * 4
            for k, x in zip(order, args[n + n_outs :], strict=True):
                inputs[k] = x
            skip, flag_for_scaler, norm, *factors_and_numbers = self._results(
                args[:n], *inputs
            )
            outputs = skip, *factors_and_numbers, skip, flag_for_scaler, norm
            results = [x for x in outputs if x is not None]
            for out, x in zip(args[n : n + n_outs], results, strict=True):
                if out.dtype != x.dtype:
                    raise CaptureError("the dtype of a total has changed")
                out.copy_(x)

        return totals

    def _results(
        self, grads: Sequence[torch.Tensor], *other_inputs: Any
    ) -> tuple[torch.Tensor | None, ...]:
        """Compute the results (see `NormLaunch.results`) from gradients, then the
        factors, then norms and counts of each gradient. None stands for those that no
        option needs.
        """
        scale, found_inf, divisor, max_norm = other_inputs
        inputs = TailInputs(
            **self.tail_inputs,
            scale=scale,
            founds=[found_inf],
            divisor=divisor,
            max_norm=max_norm,
        )
        inverse = None if scale is None else inverse_of(scale)
        measured = measure(inputs, [[*grads]], inverse)
        norm, skip, unscales = measured.norm, None, None
        if inputs.skips:
            (found_inf_of_all,) = measured.found_infs
            skip = skip_of(inputs, found_inf_of_all, norm, grads[0].device)
            if inverse is not None and found_inf is None:
                # this launch also computes a value that depends on the flag
                unscales = torch.where(skip, inverse, inverse)
        clips = None
        if max_norm is not None and norm is not None:
            clips = factor_of(max_norm, norm)
        flag_for_scaler = (
            measured.flags_for_scaler[0] if measured.flags_for_scaler else None
        )
        numbers: Tensors = []
        if self.n_cells:
            gradient_stats = begin([], measured.norm_grads)
            numbers = [
                x.float() for x in (*gradient_stats.norms, *gradient_stats.counts)
            ]
        return skip, flag_for_scaler, norm, unscales, clips, *numbers

    def _args(
        self,
        grads: Tensors,
        cells: Tensors,
        fresh: Tensors,
        other_inputs: Sequence[Any],
    ) -> list[Any]:
        """Return the arguments of the graph."""
        inputs = [other_inputs[k] for k in self.order]
        return [*grads, *self.factor_tensors, *cells, *fresh, *inputs]

    def prepare(
        self, grads: Tensors, cells: Tensors, other_inputs: Sequence[Any]
    ) -> None:
        """Prepare the launches, which `pending` then holds."""
        self.linked = None
        self.grads, self.results = grads, self.fresh.take()
        self.pending.start()
        try:
            self.step(*self._args(grads, cells, self.results, other_inputs))
        finally:
            self.grads = []

    def link(self, step: CompiledStep, norm_launch: NormLaunch) -> None:
        """Use the guard of a step that has compared the gradients of this call, if
        possible, in later calls. `norm_launch` has the other inputs.
        """
        compared = compared_by(step)
        if compared is None or len(compared.places) != self.n:
            return
        other_tensors = [
            x
            for x in (norm_launch.other_inputs[k] for k in self.order)
            if _is_tensor(x)
        ]
        unshared = self.n + len(self.factor_tensors) + self.n_cells, len(self.results)
        self.linked = link(self.step, *compared, unshared, other_tensors)
        self.norm_launch = weakref.ref(norm_launch)

    def follow(self, step: CompiledStep, norm_launch: NormLaunch) -> Launches | None:
        """Return the launches for gradients that `step` has compared. Return None if
        there is no link to that guard, for calls with the inputs of `norm_launch`.
        """
        if self.linked is None or self.norm_launch() is not norm_launch:
            return None
        results = self.fresh.take()
        launches_and_memory = self.linked.launches(self.step, step, results)
        if launches_and_memory is None:
            return None
        self.results = results
        launches, self._memory = launches_and_memory
        return launches

    def drop(self) -> None:
        """Release what belongs to the call."""
        self._memory = None
        if self.pending.open:
            self.pending.drop()

    def forget(self) -> None:
        """Forget the record of the last call."""
        self.linked = None
        self.step.forget()

    def check_order(self) -> None:
        """Raise StaleTailInputs if the order changes in which norms are added up."""
        if (
            dtypes_in_order(self.grads, self.tail_inputs["places"])
            != self.tail_inputs["order"]
        ):
            raise StaleTailInputs


def _checked_by(
    owner: weakref.ref[_TotalsGraph],
) -> Callable[[Binding, list[Any], int], None]:
    """Return a check that follows all changes that leave the order of dtypes."""

    def changed(bound: Binding, metadata: list[Any], found: int) -> None:
        graph = owner()
        assert graph is not None
        graph.check_order()

    return changed


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _meta(x: Any) -> Any:
    return x.to("meta") if _is_tensor(x) else x

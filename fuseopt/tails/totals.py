"""The gradients of a tail -> what its steps wait for: norm, flags, factors; one launch.

Every number here is of all gradients, so no gradient stands for others: the graph is
made of all of them, without Dynamo. It is one node, a function that is run on tensors
without contents when the graph is captured. What it finds goes into tensors without
dimensions. The step that follows has compared all gradients; where that is known to say
all, nobody looks at them again.
"""

from __future__ import annotations

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
from ..replicate.aside import Other
from ..replicate.source import compared_by
from ..runtime.binding import Binding
from ..runtime.commit import Launches, Pending
from ..runtime.executor import Program
from ..runtime.linked import Linked, linked
from ..runtime.source import GraphTensors
from ..runtime.step import CompiledStep
from ..shadow.lanes import Unlike
from .fresh import Fresh
from .order import dtypes_in_order
from .sequence import Given, factor_of, inverse_of, measure, skip_of
from .stats import begin

Tensors = list[torch.Tensor]
#: Sets of what is asked for that are kept; another number of gradients is one more.
KEPT = 32


class Found(NamedTuple):
    """What was found of the gradients of one optimizer, each None where nobody asked.

    `skip`: is its step skipped? `unscales`, `clips`: factors of the gradients. The next
    call overwrites them.
    """

    skip: torch.Tensor | None
    unscales: torch.Tensor | None
    clips: torch.Tensor | None


NOTHING = Found(None, None, None)


class Totals:
    """Finds what a tail of one optimizer is to know of all its gradients.

    `told` gets the Report of each graph.
    """

    def __init__(self, config: Config, told: Callable[[Report], None]) -> None:
        self.config = config
        self.told = told
        self._graphs: dict[Any, _Totals] = {}

    def of(
        self,
        content: Mapping[str, Any],
        grads: Tensors,
        every: Callable[[], Tensors],
        cells: Sequence[Tensors] = (),
    ) -> Ahead:
        """What finds it; `content`: that of a `Given`, but for the optimizers. `grads`:
        all gradients, `every`: gives those of a later call. `cells`: where to put the
        norm of each, and how many of its elements are not finite.

        Raises Unlike, CaptureError, CannotBuild, UnsupportedInput.
        """
        room = [t for own in cells for t in own]
        scale, max_norm, judged = (content[k] for k in ("scale", "max_norm", "judged"))
        (found,) = content["founds"]
        beside = scale, found, content["divisor"], max_norm
        asked = room or judged or any(x is not None for x in (scale, max_norm, found))
        if not asked:
            ahead = Ahead(None, beside, every, room)
            ahead.found = Found(None, None, content["factor"])
            return ahead
        if scale is not None and scale.device != grads[0].device:
            raise Unlike("the scaler's scale lies on another device")
        places = content["places"]
        key = (
            len(grads),
            len(room),
            scale is None,
            found is None,
            judged,
            content["norm_type"],
            tuple(places),
            *map(type, beside[2:]),
        )
        graph = self._graphs.pop(key, None)
        while len(self._graphs) >= KEPT:
            del self._graphs[next(iter(self._graphs))]
        if graph is None:
            graph = _Totals(content, grads, room, self.config, self.told)
        self._graphs[key] = graph
        return Ahead(graph, beside, every, room)

    def drop(self, ahead: Ahead) -> None:
        """Plan anew what was found not to do for the gradients that there are."""
        for key, graph in [*self._graphs.items()]:
            if graph is ahead.graph:
                del self._graphs[key]

    def forget(self) -> None:
        """Take nothing for known that a call leaves to the next: one was cut off."""
        for graph in self._graphs.values():
            graph.forget()


class Ahead:
    """What finds it in calls that are given the same besides gradients; see Aside.

    `found`: where it puts what the step reads. `given`: of the last call, is the step
    skipped, what is GradScaler told, and the total norm; of these what there is.
    """

    def __init__(
        self,
        graph: _Totals | None,
        beside: tuple[Any, ...],
        every: Callable[[], Tensors],
        room: Tensors,
    ) -> None:
        self.found = NOTHING if graph is None else graph.found
        self.graph = graph
        self.beside = beside
        self.every = every
        self.room = room

    @property
    def given(self) -> Tensors:
        """See the class; they are the caller's."""
        return [] if self.graph is None else self.graph.given

    def __call__(self, step: CompiledStep) -> Launches:
        """Prepare it. `step`: may have compared all gradients."""
        graph = self.graph
        if graph is None:
            return ()
        if graph.follows_for(self):
            launches = graph.follow(step)
            if launches is not None:
                return launches
        grads = self.every()
        if len(grads) != graph.n:
            raise Other
        graph.prepare(grads, self.room, self.beside)
        graph.link(step, self)
        return graph.pending.launches

    def done(self) -> None:
        """The call is over: keep none of its tensors."""
        if self.graph is not None:
            self.graph.drop()


class _Totals:
    """What finds it for one set of what is asked for."""

    def __init__(
        self,
        content: Mapping[str, Any],
        grads: Tensors,
        room: Tensors,
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
        tensors = [*map(_is_tensor, beside)]
        self.order = sorted(
            (k for k, x in enumerate(beside) if x is not None),
            key=lambda k: not tensors[k],
        )
        #: how many numbers of single gradients there are
        self.numbers = len(room)
        with torch.no_grad():
            metas = [_meta(x) for x in (*grads, *beside)]
            results = self._results(metas[: self.n], *metas[self.n :])
        device = grads[0].device
        kinds = [None if x is None else x.dtype for x in results[:5]]
        #: what the step reads lies in the same places at each call, for memory that
        #: moves is compared with all other memory; what is given away is fresh
        self.found = Found(
            *(
                None if kind is None else torch.empty((), dtype=kind, device=device)
                for kind in (kinds[0], *kinds[3:])
            )
        )
        self.own = [x for x in self.found if x is not None]
        self.fresh = Fresh([kind for kind in kinds[:3] if kind is not None], device)
        self.given: Tensors = []
        graph = Graph()
        n_outs = len(self.own) + self.numbers + len(self.fresh.dtypes)
        names = ["grad"] * self.n + ["out"] * n_outs
        names += [("scale", "found", "divisor", "max_norm")[k] for k in self.order]
        nodes = [graph.placeholder(f"{x}{k}") for k, x in enumerate(names)]
        graph.call_function(self._function(n_outs), tuple(nodes))
        graph.output(())
        gm = GraphModule(torch.nn.Module(), graph)
        args = self._args(grads, room, self.fresh.take(), beside)

        def tell(report: Report) -> None:
            report.traced = "the totals of a tail, all lanes"
            told(report)

        replan = pipeline.replanner(gm, config, tell, Clock())
        first = self.n + len(self.own)

        def plan(args: Sequence[Any]) -> Program:
            # cells are parts of one tensor, which says nothing to the plan
            apart = [torch.empty_like(x) for x in args[first : first + self.numbers]]
            return replan([*args[:first], *apart, *args[first + self.numbers :]])

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
        self.pending = Pending()
        policy = _Policy(self)
        self.step = CompiledStep(source, program, plan, policy, None, self.pending)
        #: which guard it follows, for whom, and what is to live until it has run
        self._ahead: Callable[[], Ahead | None] = lambda: None
        self._linked: Linked | None = None
        self._held: Any = None

    def _function(self, n_outs: int) -> Callable[..., None]:
        """The one node: it writes to the tensors behind the gradients."""
        n, order = self.n, self.order

        def totals(*args: Any) -> None:
            given: list[Any] = [None] * 4
            for k, x in zip(order, args[n + n_outs :], strict=True):
                given[k] = x
            skip, told, norm, *rest = self._results(args[:n], *given)
            every = skip, *rest, skip, told, norm
            results = [x for x in every if x is not None]
            for out, x in zip(args[n : n + n_outs], results, strict=True):
                if out.dtype != x.dtype:
                    raise CaptureError("the dtype of a total has changed")
                out.copy_(x)

        setattr(totals, OWN, True)
        return totals

    def _results(
        self, grads: Sequence[torch.Tensor], *beside: Any
    ) -> tuple[torch.Tensor | None, ...]:
        """What is given away of some gradients, see Ahead, then their factors, then the
        numbers of each.
        """
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
        numbers: Tensors = []
        if self.numbers:
            begun = begin([], measured.seen)
            numbers = [x.float() for x in (*begun.norms, *begun.counts)]
        return skip, told, norm, unscales, clips, *numbers

    def _args(
        self, grads: Tensors, room: Tensors, fresh: Tensors, beside: Sequence[Any]
    ) -> list[Any]:
        """What the graph is given."""
        rest = [beside[k] for k in self.order]
        return [*grads, *self.own, *room, *fresh, *rest]

    def prepare(self, grads: Tensors, room: Tensors, beside: Sequence[Any]) -> None:
        """Put it off, as `pending` then has it."""
        self._linked = None
        self.grads, self.given = grads, self.fresh.take()
        self.pending.start()
        try:
            self.step(*self._args(grads, room, self.given, beside))
        finally:
            self.grads = []

    def link(self, step: CompiledStep, ahead: Ahead) -> None:
        """Follow the guard of a step that has compared the gradients of the same call,
        if it can be followed, in calls in which the same is given besides.
        """
        compared = compared_by(step)
        if compared is None or len(compared.places) != self.n:
            return
        rest = [x for x in (ahead.beside[k] for k in self.order) if _is_tensor(x)]
        own = self.n + len(self.own) + self.numbers, len(self.given)
        self._linked = linked(self.step, *compared, own, rest)
        self._ahead = weakref.ref(ahead)

    def follows_for(self, ahead: Ahead) -> bool:
        """Does it follow a guard, for calls that are given what this one has?"""
        return self._linked is not None and self._ahead() is ahead

    def follow(self, step: CompiledStep) -> Launches | None:
        """Launches for gradients that a step has compared, if it follows that one."""
        assert self._linked is not None
        given = self.fresh.take()
        ready = self._linked.launches(self.step, step, given)
        if ready is None:
            return None
        self.given = given
        launches, self._held = ready
        return launches

    def drop(self) -> None:
        """Keep nothing of a call."""
        self._held = None
        self.pending.drop()

    def forget(self) -> None:
        """Take nothing for known that a call leaves to the next."""
        self._linked = None
        self.step.forget()

    def check_order(self) -> None:
        """Raise Other if norms are to be added up in another order."""
        if dtypes_in_order(self.grads, self.content["places"]) != self.content["order"]:
            raise Other


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _meta(x: Any) -> Any:
    return x.to("meta") if _is_tensor(x) else x


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

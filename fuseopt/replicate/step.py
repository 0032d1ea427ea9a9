"""One of Dynamo's graphs of the leading lanes -> the step of all lanes.

Before it first runs, and whenever something changed that no guard of Dynamo's covers,
the step is rehearsed (see rehearsal). Then what was captured is extended, planned and
bound to the tensors of all lanes.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import GraphModule

from .. import compat
from ..capture import Captured
from ..compiler import internal_errors, pipeline
from ..compiler.report import Report
from ..compiler.session import session
from ..compiler.timing import Clock
from ..config import Config
from ..errors import CaptureError, FuseoptError
from ..runtime.binding import Binding
from ..runtime.commit import Pending
from ..runtime.guards.tensors import CHANGED
from ..runtime.memory import Memory
from ..runtime.source import GraphTensors
from ..runtime.step import CompiledStep
from ..shadow.double import own_attributes
from ..shadow.lanes import GRAD, Lanes, Unlike
from ..shadow.state_guard import Place, StateGuard
from ..uniformity import Proof
from .extend import COMMON, Extended, extend
from .rehearsal import beyond, rehearse_all
from .source import Finds, LaneTensors

#: After so many rehearsals of one graph an optimizer is traced whole.
PATIENCE = 6


class Stale(FuseoptError):
    """Lanes are other than they were surveyed to be; nothing was written yet."""


@dataclass(frozen=True)
class Task:
    """What is the same in all calls of an optimizer's step.

    `noticed`: what the optimizer holds besides its lanes. `pending`: where launches are
    put off. `told`: gets the optimizer's Reports. `parts`: lanes are parts of
    tensors.
    """

    function: Callable[..., Any]
    config: Config
    noticed: StateGuard
    pending: Pending
    told: list[Report]
    parts: bool = False


class Owner(Finds, Protocol):
    """What a graph asks of those who have the lanes in hand."""

    @property
    def lanes(self) -> Lanes | None:
        """The optimizer's, as they are known; another object where they changed."""

    def shadow_of_all(self) -> Any:
        """What a rehearsal is to take for the optimizer."""

    def settle(self) -> None:
        """Have state ready for led lanes where tracing made some."""

    def prove(self) -> Proof:
        """Which code the step may run now; Unlike unless it treats lanes alike."""

    def survey_holds(self) -> None:
        """Raise Stale unless lanes that were alike still are."""


class LedStep:
    """One of Dynamo's graphs of the leading lanes, called in its place."""

    def __init__(self, owner: Owner, task: Task, gm: GraphModule) -> None:
        self.owner = owner
        self.task = task
        self.gm = gm
        #: those that the step was made for
        self.lanes: Lanes | None = None
        #: for which of what the optimizer held it was rehearsed: by count, by contents
        self.known = -1
        self.rehearsed: list[Any] = []
        self.inner: CompiledStep | None = None
        self.untold: list[Report] = []  # of plans that have not run
        #: what the last call made for led lanes, by what it made for the leading ones
        self.made: dict[int, list[torch.Tensor]] = {}
        self.numbers = compat.number_sources(gm)
        self.moving = frozenset(
            place for place in map(_place, self.numbers.values()) if place
        )

    @property
    def helper(self) -> ctypes.PyDLL | None:
        """The compiled helper, once a plan has it."""
        bound = None if self.inner is None else self.inner.program.bound
        return None if bound is None else bound.helper

    def take(self) -> dict[int, list[torch.Tensor]]:
        """What the last call made for the lanes that are led, by the leading ones'."""
        made, self.made = self.made, {}
        return made

    def forget(self) -> None:
        """Take nothing for known that a call leaves to the next: one was cut off."""
        self.made = {}
        if self.inner is not None:
            self.inner.forget()

    def __call__(self, *args: Any) -> Any:
        owner, noticed = self.owner, self.task.noticed
        call = owner.call
        if (
            self.lanes is owner.lanes
            and self.inner is not None
            and self.known == noticed.count
            and noticed.moved <= self.moving
        ):
            call.entered = True
            return self.inner(*args)
        if self.inner is None:
            # what lies in the memory of lanes has been compared with no plan's yet
            owner.survey_holds()
        owner.settle()
        if self.lanes is not owner.lanes:
            self.rehearsed.clear()
            self.inner = None
            self.lanes = owner.lanes
        held = noticed.held(self.moving)
        inner, failed = self.inner, None
        clock = Clock()
        if inner is None:
            call.quiet = False
            # before the rehearsal, which goes on while compilers run
            try:
                inner = self._extended(args, clock)
            except Exception as error:
                failed = error
                self._tell(error, args)
        if held not in self.rehearsed:
            if len(self.rehearsed) >= PATIENCE:
                raise Unlike("what it depends on changes too often")
            call.quiet = False
            clock.resume()
            proof = owner.prove()
            assert self.lanes is not None
            given = [x for i, x in enumerate(args) if i in self.numbers]
            function = self.task.function
            parts = self.task.parts
            rehearse_all(owner.shadow_of_all, function, self.lanes, proof, given, parts)
            clock.lap("rehearsal")
            self.rehearsed.append(held)
        if failed is not None:
            raise failed
        assert inner is not None
        self.inner = inner
        self.known = noticed.count
        session.reports += self.untold
        self.task.told.extend(self.untold)
        self.untold.clear()
        # what goes wrong before this is no reason to stop: the step is traced whole
        call.entered = True
        return inner(*args)

    def _tell(self, error: Exception, args: Sequence[Any]) -> None:
        """Tell of an error of fuseopt's own; raises Unlike then."""
        if internal_errors.is_mishap(error):
            given = error, self.gm, args, self.task.config
            said = internal_errors.tell(*given, "The step is traced whole.")
            raise Unlike(said) from error

    def _extended(self, args: Sequence[Any], clock: Clock) -> CompiledStep:
        lanes = self.lanes
        assert lanes is not None
        positions = [k for k, x in enumerate(args) if isinstance(x, torch.Tensor)]
        leading = GraphTensors(self.gm, positions)
        roles = self._roles(leading.tensors(args), lanes, args)
        owners = [lane for lane, _ in roles]
        # arguments: gradients, and the tensors in which Dynamo hands over numbers
        late = frozenset(
            s
            for s, (_, (role, _)) in enumerate(roles)
            if s >= len(roles) - len(positions) or role == GRAD
        )
        others = {kind.lead: kind.others for kind in lanes.kinds}
        led = {lead: len(every) for lead, every in others.items()}
        layouts = {
            lead: [
                (tuple(lanes.params[i].shape), lanes.params[i].stride())
                for i in (lead, *others[lead])
            ]
            for lead in lanes.reshaped
        }
        found: list[Extended] = []
        self.untold.clear()

        def extended(captured: Captured) -> Captured:
            if captured.complexes:
                raise Unlike("it computes with complex numbers")
            if captured.given:
                raise Unlike("it gives tensors other memory")
            if captured.aliases:
                raise Unlike("it keeps another view of a tensor of a lane")
            if captured.beyond and self.task.parts:
                raise Unlike(beyond(captured.beyond))
            found.append(extend(captured, owners, led, late, layouts))
            return found[-1].captured

        def tell(report: Report) -> None:
            report.traced = (
                f"{len(lanes.leads)} of {len(lanes.params)} lanes; the others do as "
                "these"
            )
            told = self.untold if self.inner is None else session.reports
            told.append(report)

        config, pending = self.task.config, self.task.pending
        plan = pipeline.replanner(self.gm, config, tell, clock, extended)
        program = plan(args)
        place = {x: k for k, x in enumerate(lanes.places())}
        order = [
            s if m == COMMON else len(roles) + place[others[owners[s]][m], roles[s][1]]
            for s, m in found[-1].order
        ]
        buffers, copies = found[-1].captured.graph.buffers, found[-1].copies
        copies = {x: c for x, c in copies.items() if buffers[x[0]].kind == "temp"}

        def made(memory: Memory | None) -> None:
            self.made = {}
            for (b, m), copy in copies.items():
                assert memory is not None
                own = self.made.setdefault(id(memory.tensor(b)), [])
                assert len(own) == m
                own.append(memory.tensor(copy))

        policy = _Whole(self._tell)
        source = LaneTensors(leading, order, self.owner)
        return CompiledStep(source, program, plan, policy, None, pending, made)

    def _roles(
        self, tensors: Sequence[torch.Tensor], lanes: Lanes, args: Sequence[Any]
    ) -> list[tuple[int, tuple[str, str]]]:
        """Of the graph's tensors, which lane each belongs to and what it is there.

        Raises Unlike for one that belongs to none and is not known to be the same for
        all, and where two of a lane lie in the same memory.
        """
        if len({*map(id, tensors)}) < len(tensors):
            raise Unlike("lanes have a tensor in common")
        leading = lanes.tensors(lanes.leads)
        apart(leading.values())
        roles = {id(t): place for place, t in leading.items()}
        # besides lanes' only what the dry run knows: what the optimizer holds, and the
        # tensors in which Dynamo hands over numbers
        shared = {id(t) for t in held_tensors(self.owner.shadow_of_all())}
        shared.update(id(args[i]) for i in self.numbers)
        for t in tensors:
            if id(t) not in roles and id(t) not in shared:
                raise Unlike("its graph has a tensor that belongs to no lane")
        return [roles.get(id(t), (COMMON, ("", ""))) for t in tensors]


class _Whole:
    """Whatever a led step was not made for, the whole step is; see ChangePolicy.

    `tell(error, args)` raises Unlike for an error of fuseopt's own.
    """

    def __init__(self, tell: Callable[[Exception, Sequence[Any]], None]) -> None:
        self.tell = tell

    def changed(self, bound: Binding, metadata: list[Any], found: int) -> None:
        """The lanes are surveyed anew."""
        # without a guard nothing is known of the last call, which was cut off
        if (found & CHANGED and bound.guard is not None) or metadata != bound.metadata:
            raise Stale

    def overlapping(self) -> None:
        """A lane that shares memory with another is not alike."""
        raise Unlike("lanes share memory")

    def refused(self, error: CaptureError) -> None:
        """Eager would run the leading lanes alone."""
        raise Unlike(str(error)) from error

    def failed(self, error: Exception, args: Sequence[Any]) -> bool:
        """The same."""
        self.tell(error, args)
        return False

    def eager(self) -> Callable[..., Any]:
        """Never asked for."""
        raise AssertionError("eager would run the leading lanes alone")


_SOURCE = re.compile(
    r"L\['self'\]\.(?:param_groups\[(\d+)\]\['(\w+)'\]|(\w+))(?:\[(\d+)\])?"
)


def _place(source: str) -> Place | None:
    """Where a number lies that Dynamo names so; None: elsewhere."""
    found = _SOURCE.fullmatch(source)
    if not found:
        return None
    group, key, name, item = found.groups()
    place: Place = name if group is None else (int(group), key)
    return place if item is None else (place, int(item))


def held_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """The tensors that an optimizer holds besides its lanes."""
    waiting: list[Any] = list(own_attributes(optimizer).values())
    for group in optimizer.param_groups:
        waiting += [v for k, v in group.items() if k != "params"]
    while waiting:
        x = waiting.pop()
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, dict):
            waiting += x.values()
        elif isinstance(x, (list, tuple)):
            waiting += x


def apart(tensors: Iterable[torch.Tensor]) -> None:
    """Raise Unlike if two of these lie in the same memory.

    What a lane does to one of its tensors would be seen in the other, in lanes that
    share no memory as well.
    """
    reached = 0
    for first, last in sorted(_range(t) for t in tensors if t.numel()):
        if first < reached:
            raise Unlike("a lane that leads has two tensors in the same memory")
        reached = last


def _range(t: torch.Tensor) -> tuple[int, int]:
    start = t.data_ptr()
    steps = zip(t.shape, t.stride(), strict=True)
    return start, start + t.itemsize * (1 + sum((n - 1) * s for n, s in steps))

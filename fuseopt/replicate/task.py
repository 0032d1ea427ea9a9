"""Settings that an optimizer's led steps share, and the object that leads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ..compiler.report import Report
from ..config import Config
from ..inputs.lanes import Lanes
from ..inputs.state_guard import StateGuard
from ..runtime.commit import Pending
from .models import Models
from .packed import Packing
from .proofs import Prover
from .source import CallHolder
from .step_wrapper import StepWrapper
from .writes import LaneNumbers


@dataclass(frozen=True)
class Task:
    """The settings that all calls of an optimizer's step share.

    `state_guard`: compares all that the optimizer holds besides its lanes. `pending`:
    collects postponed launches. `reports`: the list to which the optimizer's Reports
    are added. `parts`: lanes are parts of tensors. `wrapper`: calls before and after
    the step, in the same launch. `packing`: the packed format of lanes.
    """

    function: Callable[..., Any]
    config: Config
    state_guard: StateGuard
    pending: Pending
    reports: list[Report]
    parts: bool = False
    wrapper: StepWrapper | None = None
    packing: Packing | None = None


class Owner(CallHolder, Prover, Protocol):
    """The object that leads a LedStep, as the step uses it."""

    @property
    def lanes(self) -> Lanes | None:
        """The optimizer's lanes; a new object after they changed."""

    @property
    def models(self) -> Models:
        """The models of the kinds of lanes."""

    @property
    def active(self) -> tuple[int, ...]:
        """The models that Dynamo traces, by number."""

    #: the graph that ran last
    stepped: LaneNumbers | None
    #: may raise LanesDiffer: no part steps alone
    bucket_proof: Callable[[], None] | None
    kept: int  #: the number of sets of lanes with programs to keep

    def shadow_of_all(self) -> Any:
        """Return a shadow of the optimizer, with all lanes, for a rehearsal."""

    def settle(self) -> None:
        """Create the state of lanes if tracing created that of their models."""

    def live_in(self, home: Lanes) -> None:
        """Find the lanes of later calls by their home."""

    def survey_holds(self) -> None:
        """Raise LanesChanged unless alike lanes are still alike."""

"""Compile the step of a led tail, and report its two launches as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import compat
from ..compiler.report import Report
from ..isolate.compilations import Compilations
from ..isolate.decorators import leading
from ..replicate.driver import LedOptimizer
from ..replicate.packed import Packing
from ..replicate.step_wrapper import StepWrapper
from ..shadow.optimizer import Write


def compiled(
    compilations: Compilations, backend: Callable[..., Any], function: Any
) -> Callable[..., Any]:
    """Return `function`, compiled as one graph by Dynamo, if it traces calls at all."""
    traced_on_call = compilations.compile(backend, function, fullgraph=True)
    return compat.DirectDynamoCall(traced_on_call, function)


class Compiling:
    """Compiler of a step's `function` with the calls around it, and its Reports.

    The Report of the first launch is kept for that of the step.
    """

    def __init__(
        self, function: Callable[..., Any], options: Mapping[str, Any]
    ) -> None:
        self.function = function
        self.options = options
        self._compilations = Compilations()
        self._first: Report | None = None

    def leader(
        self,
        wrapper: StepWrapper,
        outward: Callable[[list[Write]], list[Write]] | None = None,
        packing: Packing | None = None,
    ) -> LedOptimizer:
        """Return the leader of the step with the calls of `wrapper` before and after
        it.
        """
        options, reports = self.options, self._compilations.reports
        return LedOptimizer(self.function, options, reports, outward, wrapper, packing)

    def make(self, backend: Callable[..., Any]) -> Callable[..., Any]:
        """Compile the step; see `LedOptimizer.step`."""
        return compiled(self._compilations, backend, leading(self.function))

    def first_launch(self, report: Report) -> None:
        """Keep the Report of the first launch."""
        self._first = report

    def add_first_launch(self, reports: Sequence[Report]) -> None:
        """Add the first launch to the Reports of the second."""
        for report in reports:
            report.traced = f"a tail of a training step, {report.traced}"
            if self._first is not None:
                report.follow(self._first)

    def forget(self) -> None:
        """Release everything from Dynamo."""
        self._compilations.forget()

"""Compile the step of a led tail, and report its two launches as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from .. import compat
from ..compiler.entry import BACKEND, attach
from ..compiler.report import Report
from ..handlers import reraise
from ..isolate.compilations import Compilations
from ..isolate.decorators import copied, leading
from ..replicate.driver import LedOptimizer
from ..replicate.packed import Packing
from ..replicate.step_wrapper import StepWrapper
from ..shadow.optimizer import Write
from ..shadow.whole import NotTraced

T = TypeVar("T")


def compiled(
    compilations: Compilations, backend: Callable[..., Any], function: Any
) -> Callable[..., Any]:
    """Return `function`, compiled as one graph by Dynamo, if it traces calls at all."""
    traced_on_call = compilations.compile(backend, function, fullgraph=True)
    return compat.DirectDynamoCall(traced_on_call, function)


class OneGraph(Generic[T]):
    """Function of gradients, compiled as one graph. `refusal` is the reason why it no
    longer is, or "".
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        attach()
        self.refusal = ""
        self.compilations = Compilations()
        self.compiled = compiled(self.compilations, BACKEND, copied(function, ()))

    def __call__(
        self, arguments: Any, check: Callable[[], None] = lambda: None
    ) -> tuple[T] | None:
        """Return the result; None, with `refusal`, if nothing was written. Call `check`
        before that.
        """
        try:
            result = self.compiled(arguments)
        except Exception as error:
            reraise(error)
            if not isinstance(error, (NotTraced, *compat.dynamo_errors())):
                raise
            check()
            self.refusal = compat.reason_of(error)
            self.compilations.forget()
            return None
        if self.compilations.fakes.hold:
            self.compilations.fakes.unhand()
        return (result,)


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

"""What a led tail is compiled with, and what it tells of its two launches, once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import compat
from ..compiler.report import Report
from ..isolate.compilations import Compilations
from ..isolate.decorators import leading
from ..replicate.around import Around
from ..replicate.driver import Representatives
from ..shadow.optimizer import Write


def compiled(
    compilations: Compilations, backend: Callable[..., Any], function: Any
) -> Callable[..., Any]:
    """A function that Dynamo makes one graph of, where it traces calls at all."""
    made = compilations.compile(backend, function, fullgraph=True)
    return compat.Traced(made, function)


class Compiling:
    """Compiles a step's `function` with what is around it, and tells of it.

    The Report of the first launch waits for that of the step's.
    """

    def __init__(
        self, function: Callable[..., Any], options: Mapping[str, Any]
    ) -> None:
        self.function = function
        self.options = options
        self._compilations = Compilations()
        self._first: Report | None = None

    def representatives(
        self,
        around: Around,
        outward: Callable[[list[Write]], list[Write]] | None = None,
    ) -> Representatives:
        """What leads the step; see there."""
        told = self._compilations.told
        return Representatives(self.function, self.options, told, outward, around)

    def make(self, backend: Callable[..., Any]) -> Callable[..., Any]:
        """Compile the step anew; see `Representatives.step`."""
        return compiled(self._compilations, backend, leading(self.function))

    def first_launch(self, report: Report) -> None:
        """Keep the Report of the first launch."""
        self._first = report

    def tell(self, told: Sequence[Report]) -> None:
        """Tell of both launches in the Reports of the second."""
        for report in told:
            report.traced = f"a tail of a training step, {report.traced}"
            if self._first is not None:
                report.follow(self._first)

    def forget(self) -> None:
        """Let Dynamo keep nothing of it."""
        self._compilations.forget()

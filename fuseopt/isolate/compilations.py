"""Functions that Dynamo compiled for one owner, and their removal from Dynamo."""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .. import compat
from ..compiler.entry import BACKEND, resume
from ..compiler.report import Report
from ..compiler.session import session
from ..storage.rule import Rule
from ..storage.step import OtherPacked


@dataclass(frozen=True)
class CompileOptions:
    """Options of fuseopt.config for a step, and other arguments of torch.compile.

    `storage`: the rule that packs the optimizer's state; `beside`: packed tensors
    besides the state.
    """

    options: Mapping[str, Any]
    fullgraph: bool = False
    dynamic: bool | None = None
    storage: Rule | None = None
    beside: OtherPacked | None = None


class Compilations:
    """Functions that Dynamo compiled for one owner, and their Reports.

    `reports`: the Reports; other code may add to it. At the end of this object, or in
    `forget`, Dynamo releases all functions.
    """

    def __init__(self) -> None:
        session.collect()
        #: (code objects, backend) of each function passed to Dynamo
        self.known: list[tuple[list[types.CodeType], Any]] = []
        self.fakes = compat.TraceFakes()
        session.traces.add(self.fakes)
        self.reports: list[Report] = []
        # the garbage collector ends owners without a call of `forget`
        records = self.known, self.fakes, self.reports
        weakref.finalize(self, _forget, *records).atexit = False

    def forget(self) -> None:
        """Make Dynamo release all functions, and retire the Reports."""
        _forget(self.known, self.fakes, self.reports)

    def compile(
        self, backend: Callable[..., Any], function: Any, **keywords: Any
    ) -> Callable[..., Any]:
        """Return `torch.compile(function, backend=backend, **keywords)`."""
        # Dynamo keeps a reference to each backend that it has received
        fakes, reports = self.fakes, self.reports

        def noting(gm: Any, example_inputs: Any, **keywords: Any) -> Any:
            resume()
            fakes.note()
            first = len(session.reports)
            try:
                return backend(gm, example_inputs, **keywords)
            finally:
                reports.extend(session.reports[first:])

        noting._torchdynamo_orig_backend = backend  # type: ignore[attr-defined]
        noting.reset = BACKEND.reset  # type: ignore[attr-defined]
        self.known.append(([function.__code__], noting))
        return torch.compile(function, backend=noting, **keywords)


def _forget(
    compiled: list[tuple[list[types.CodeType], Any]],
    fakes: compat.TraceFakes,
    reports: list[Report],
) -> None:
    codes = [code for codes_of_one, _ in compiled for code in codes_of_one]
    session.uncollected += bool(codes)
    while compiled:
        compat.forget(*compiled.pop())
    fakes.forget()
    compat.tidy(codes, fakes.files)
    fakes.files.clear()
    session.retire(reports)
    reports.clear()


def released(isolated: Any) -> Callable[[Any], None]:
    """Return the callback for the end of the optimizer."""
    reference = weakref.ref(isolated)

    def release(_: Any, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        step = reference()
        if step is not None and not ending():
            step.release()

    return release


def backend_of_all(refusal: str) -> Callable[..., Any]:
    """Return the backend of a step that is traced whole; Reports get the reason."""
    if not refusal:
        return BACKEND

    def whole(gm: Any, example_inputs: Any, **keywords: Any) -> Any:
        n_reports = len(session.reports)
        compiled = BACKEND(gm, example_inputs, **keywords)
        for report in session.reports[n_reports:]:
            report.traced = f"all lanes, since {refusal}"
        return compiled

    whole._torchdynamo_orig_backend = BACKEND  # type: ignore[attr-defined]
    return whole

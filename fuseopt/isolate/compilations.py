"""What Dynamo has compiled for one owner, and how all of it is forgotten."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .. import compat
from ..compiler.entry import BACKEND
from ..compiler.report import Report
from ..compiler.session import session


class Compilations:
    """Functions that Dynamo compiled for one owner, and the Reports of these.

    `told` gets Reports that others tell of it, too. When this is no more, or when
    `forget` is called, Dynamo keeps nothing of it.
    """

    def __init__(self) -> None:
        session.collect()
        #: all that Dynamo was given: code, and the backend
        self.known: list[tuple[list[types.CodeType], Any]] = []
        self.fakes = compat.Fakes()
        self.told: list[Report] = []
        # where a collector of garbage finds the owner, nobody calls `forget`
        kept = self.known, self.fakes, self.told
        weakref.finalize(self, _forget, *kept).atexit = False

    def forget(self) -> None:
        """Let Dynamo keep nothing of it, and the session little."""
        _forget(self.known, self.fakes, self.told)

    def compile(
        self, backend: Callable[..., Any], function: Any, **keywords: Any
    ) -> Callable[..., Any]:
        """`torch.compile(function, backend=backend, **keywords)`."""
        # Dynamo keeps each backend that it was ever given
        fakes, told = self.fakes, self.told

        def noting(gm: Any, example_inputs: Any, **keywords: Any) -> Any:
            fakes.note()
            first = len(session.reports)
            try:
                return backend(gm, example_inputs, **keywords)
            finally:
                told.extend(session.reports[first:])

        noting._torchdynamo_orig_backend = backend  # type: ignore[attr-defined]
        noting.reset = BACKEND.reset  # type: ignore[attr-defined]
        self.known.append(([function.__code__], noting))
        return torch.compile(function, backend=noting, **keywords)


def _forget(
    known: list[tuple[list[types.CodeType], Any]],
    fakes: compat.Fakes,
    told: list[Report],
) -> None:
    codes = [code for own, _ in known for code in own]
    session.uncollected += bool(codes)
    while known:
        compat.forget(*known.pop())
    fakes.forget()
    compat.tidy(codes, fakes.files)
    fakes.files.clear()
    session.retire(told)
    told.clear()

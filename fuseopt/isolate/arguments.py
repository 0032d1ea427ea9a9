"""What a step is given besides its optimizer -> does it say anything, and what first?

Trainers pass on a closure should there be one, None otherwise: a call with None is the
same as one without where None is the default. A closure that the step calls before all
else can be called by itself (`closures`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from .closures import opening


class Arguments:
    """Of one step's function: `names` that it takes besides its optimizer, by place or
    by name, if None is the default of each; else none.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        either = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [*inspect.signature(function).parameters.values()][1:]
        same = all(p.default is None and p.kind is either for p in parameters)
        self.names = [p.name for p in parameters] if same else []
        self._code: Any = None
        self._opening = ""

    def say_nothing(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Is a call with arguments the same as one without?"""
        return self._fit(args, kwargs) and all(
            value is None for value in (*args[1:], *kwargs.values())
        )

    def first(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The closure in a call, if it alone is given, and may be called by itself."""
        if not self.names or not self._fit(args, kwargs):
            return None
        given = {**dict(zip(self.names, args[1:], strict=False)), **kwargs}
        told = [name for name, value in given.items() if value is not None]
        code = self.function.__code__
        if code is not self._code:
            self._code, self._opening = code, opening(self.function)
        return given[told[0]] if told == [self._opening] else None

    def _fit(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Where there is no such argument, or it is given twice, Python says so."""
        free = self.names[len(args) - 1 :]
        return len(args) <= len(self.names) + 1 and kwargs.keys() <= {*free}

"""Interpret the arguments of a step besides its optimizer, such as a closure.

Trainers pass a closure or None. If None is the default, a call with None equals a call
without arguments. fuseopt can call a closure separately if the step calls it before all
else (`closures`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from .closures import opening


class Arguments:
    """The arguments of one step's function.

    `names`: those besides the optimizer, if each may be positional or a keyword and has
    the default None; else empty.
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
        """Does a call with these arguments equal a call without arguments?"""
        return self._fit(args, kwargs) and all(
            value is None for value in (*args[1:], *kwargs.values())
        )

    def first(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the closure in a call if it is the only argument and may be called
        first.
        """
        if not self.names or not self._fit(args, kwargs):
            return None
        values = {**dict(zip(self.names, args[1:], strict=False)), **kwargs}
        names = [name for name, value in values.items() if value is not None]
        code = self.function.__code__
        if code is not self._code:
            self._code, self._opening = code, opening(self.function)
        return values[names[0]] if names == [self._opening] else None

    def _fit(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Are the arguments valid? Python raises for invalid ones."""
        open_names = self.names[len(args) - 1 :]
        return len(args) <= len(self.names) + 1 and kwargs.keys() <= {*open_names}

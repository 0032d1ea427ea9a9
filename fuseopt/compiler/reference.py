"""A weak reference to a compiled graph, for Dynamo to call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class Reference:
    """Calls a compiled graph without keeping it alive.

    Dynamo keeps a backend's result with the code that calls it. If the owner of the
    graph keeps that code alive, neither would ever be released.
    """

    def __init__(self, graph: Callable[..., Any]) -> None:
        self.graph = weakref.ref(graph)

    def __call__(self, *args: Any) -> Any:
        graph = self.graph()
        assert graph is not None
        return graph(*args)

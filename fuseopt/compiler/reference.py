"""What Dynamo is given in place of a compiled graph, so that it keeps nothing alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class Reference:
    """A compiled graph, called in its place and not kept alive.

    Dynamo keeps what a backend returns with the code that calls it; where the owner of
    the graph keeps that code, neither would ever be released.
    """

    def __init__(self, graph: Callable[..., Any]) -> None:
        self.graph = weakref.ref(graph)

    def __call__(self, *args: Any) -> Any:
        graph = self.graph()
        assert graph is not None
        return graph(*args)

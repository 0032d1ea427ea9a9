"""Have a traced step's writes to attributes of its optimizer reach the optimizer.

Dynamo does not enter an optimizer among the objects whose changes it writes back, so
that `self.count += 1` in a step is seen by the rest of the trace and then lost, with
any backend (torch 2.11 to 2.13).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .dynamo import leads_to


def keep_attributes(backend: Callable[..., Any]) -> None:
    """Where Dynamo traces for `backend`, enter an optimizer when it is first written.

    Relies on the methods with which Dynamo notes that an attribute is written, and on
    its table of objects by their identity. Where they are others, what a step writes
    to its optimizer is lost, as with any backend.
    """
    try:
        from torch._dynamo.side_effects import SideEffects
        from torch._dynamo.variables.optimizer import OptimizerVariable
    except ImportError:
        return
    kind: Any = SideEffects
    store = getattr(kind, "store_attr", None)
    if store is None:
        return

    @functools.wraps(store)
    def stored(self: Any, item: Any, *args: Any, **kwargs: Any) -> Any:
        variables = getattr(self, "id_to_variable", None)
        if variables is not None and isinstance(item, OptimizerVariable):
            value = item.value
            graph = self.output_graph_weakref()
            ours = leads_to(getattr(graph, "compiler_fn", None), backend)
            if ours and id(value) not in variables:
                variables[id(value)] = item
                self.keepalive.append(value)
        return store(self, item, *args, **kwargs)

    kind.store_attr = stored


def read_attributes(backend: Callable[..., Any]) -> None:
    """Where Dynamo traces for `backend`, an attribute is read by its whole name.

    Dynamo takes each name that is a part of "_init_group" for that method: a counter
    `self.t` is then no number (torch 2.11 to 2.13). Relies on the method with which it
    reads an optimizer's attributes; where that is another, such a step runs in eager.
    """
    try:
        from torch._dynamo.variables.optimizer import OptimizerVariable
    except ImportError:
        return
    kind: Any = OptimizerVariable
    read = kind.var_getattr

    @functools.wraps(read)
    def whole(self: Any, tx: Any, name: str) -> Any:
        part = name in "_init_group" and name != "_init_group"
        if part and leads_to(getattr(tx.output, "compiler_fn", None), backend):
            return super(kind, self).var_getattr(tx, name)
        return read(self, tx, name)

    kind.var_getattr = whole

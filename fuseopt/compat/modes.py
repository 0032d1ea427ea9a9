"""Have numbers leave a graph unseen by the torch function mode that is on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .dynamo import leads_to
from .hooks import Hook, around


def numbers_pass_modes(backend: Callable[..., Any]) -> None:
    """Where Dynamo traces for `backend`: let no mode see how a number leaves a graph.

    Dynamo puts it into a tensor, which is no call of the user's. With a mode on, as
    `torch.set_default_device` sets one, the mode is traced into that call when the
    graph has its outputs already, and the graph returns None in the number's place
    (torch 2.13). Relies on the method that makes the tensor, and on the switch for
    modes in a trace; where they are others, nothing is changed.
    """
    try:
        from torch._dynamo.variables.tensor import SymNodeVariable
    except ImportError:
        return

    def as_tensor(original: Hook, self: Any, tx: Any, *args: Any) -> Any:
        state: Any = getattr(tx, "symbolic_torch_function_state", None)
        ours = leads_to(getattr(tx.output, "compiler_fn", None), backend)
        if not ours or not hasattr(state, "torch_function_mode_enabled"):
            return original(self, tx, *args)
        before = state.torch_function_mode_enabled
        state.torch_function_mode_enabled = False
        try:
            return original(self, tx, *args)
        finally:
            state.torch_function_mode_enabled = before

    if hasattr(SymNodeVariable, "as_tensor"):
        around(SymNodeVariable, "as_tensor", as_tensor)

"""Hide numbers that leave a graph from the active torch function mode."""

from __future__ import annotations

from typing import Any

from .layers import traces_for
from .names import find
from .patches import Hook, Patcher, patch


@patch(
    "numbers-pass-modes",
    "numbers leave a graph unseen by the torch function mode that is on",
    "with such a mode on, as torch.set_default_device sets one, steps run in eager",
    bits=True,
)
def NUMBERS_PASS_MODES(patcher: Patcher) -> None:
    """Hide from modes how a number leaves a graph.

    Dynamo puts it into a tensor, which is no call of the user. With a mode on, Dynamo
    traces the mode into that call after the graph has its outputs. The graph then
    returns None in the number's place (torch 2.13). Relies on the method that makes the
    tensor, and on the switch for modes in a trace.
    """
    kind = find("torch._dynamo.variables.tensor:SymNodeVariable")
    backend = patcher.backend

    def as_tensor(original: Hook, self: Any, tx: Any, *args: Any) -> Any:
        if not traces_for(tx, backend):
            return original(self, tx, *args)
        state: Any = tx.symbolic_torch_function_state
        before = state.torch_function_mode_enabled
        state.torch_function_mode_enabled = False
        try:
            return original(self, tx, *args)
        finally:
            state.torch_function_mode_enabled = before

    patcher.around(kind, "as_tensor", as_tensor, "self", "tx")

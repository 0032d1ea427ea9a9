"""Backend object that Dynamo calls with each graph, and its attachment to Dynamo.

The first graph imports all compiler code. The hooks for the start of a trace are
attached earlier: when torch looks up the backend in a process that has imported Dynamo.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch
    from torch.fx import GraphModule

    from ..compat import BoundSteps, CompileArguments, Window


class Backend:
    """Backend that Dynamo calls with each graph. BACKEND is the only object."""

    def __init__(self) -> None:
        #: follows Dynamo's traces; None until `attach`
        self.window: Window | None = None
        #: takes bound steps; None until `attach`
        self.bound_steps: BoundSteps | None = None
        #: compiles the bound step of an optimizer, see `take_bound_steps`
        self.take: (
            Callable[[Any, torch.optim.Optimizer, CompileArguments], Any] | None
        ) = None

    def __call__(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Compile Dynamo's graph of a step.

        `mode` and `options` as in fuseopt.config. Raises ConfigError, UnsupportedInput.
        """
        resume()
        from ..compat import refusals_pass
        from .dispatch import compile_graph

        with refusals_pass(self):
            return compile_graph(gm, example_inputs, mode, options)

    @property
    def __name__(self) -> str:
        # torch.compile reads the name of a backend
        self._dynamo_backend_init()
        return "fuseopt"

    def _dynamo_backend_init(self) -> None:
        """Attach to Dynamo: torch 2.15 calls this at each lookup of the backend."""
        attach_to_loaded()

    def __repr__(self) -> str:
        return "<backend fuseopt>"

    def reset(self) -> None:
        """Forget reports and release graphs, when torch._dynamo.reset() calls."""
        if self.window is not None:
            from ..compat import settle_interrupted

            settle_interrupted()
        if f"{__package__}.session" in sys.modules:
            from ..compat import after_reset
            from .session import session

            session.reset()
            after_reset([*session.traces])


BACKEND = Backend()
_attaching = threading.RLock()


def take_bound_steps(
    take: Callable[[Any, torch.optim.Optimizer, CompileArguments], Any],
) -> None:
    """Register `take(step, optimizer, arguments)` for `torch.compile(optimizer.step)`.

    If it returns None, Dynamo compiles the step.
    """
    BACKEND.take = take


def attach_to_loaded() -> None:
    """Attach if Dynamo is imported; called when torch looks up the backend."""
    if hasattr(sys.modules.get("torch._dynamo"), "optimize"):
        attach()
        assert BACKEND.bound_steps is not None
        BACKEND.bound_steps.on_lookup()


def attach() -> None:
    """Import Dynamo and register for the start of each trace. Raises nothing."""
    window = BACKEND.window
    if window is None:
        with _attaching:
            window = BACKEND.window or _attached()
    window.register()


def resume() -> None:
    """Restart a trace that began before the hooks were in force; called with each
    graph.
    """
    attach()
    assert BACKEND.window is not None
    BACKEND.window.resume()


def _attached() -> Window:
    from .. import compat
    from . import trace_warnings

    compat.patches.serve(BACKEND, compat.HOOKS)
    compat.patch_state.report_break = trace_warnings.of_graph_break
    compat.patch_state.report_limit = trace_warnings.of_limit
    compat.patch_state.report_failure = trace_warnings.of_failure
    compat.patch_state.report_refusal = trace_warnings.of_refusal
    compat.patch_state.allocate = _allocate
    compat.Limits(BACKEND).listen()
    refuse = functools.partial(trace_warnings.refuse_untraceable, BACKEND)
    window = compat.Window(BACKEND, refuse, trace_warnings.kept_from_dynamo)
    BACKEND.bound_steps = compat.BoundSteps(
        BACKEND, _take_bound_step, trace_warnings.of_bound_step, lambda: window
    )
    compat.patch_state.register = window.register
    BACKEND.window = window
    return window


def refuse_module() -> NoReturn:
    """Raise NotABackend, whose message names what to pass instead of the module."""
    from ..compat import refusals_pass
    from ..errors import NotABackend

    with refusals_pass(BACKEND):
        raise NotABackend(
            "fuseopt is a module: give torch.compile the backend's name, as in "
            'torch.compile(opt.step, backend="fuseopt"), or call fuseopt.compile(opt)'
        )


def _take_bound_step(
    function: Any, optimizer: torch.optim.Optimizer, arguments: CompileArguments
) -> Any:
    take = BACKEND.take
    return None if take is None else take(function, optimizer, arguments)


def _allocate(optimizer: Any) -> None:
    from .session import session

    session.allocate(optimizer)

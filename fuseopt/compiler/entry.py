"""The backend object that Dynamo calls with each graph, and how it is attached.

All that compiles is imported with the first graph. Only what must hear of a trace when
it begins is attached earlier: as soon as torch looks up the backend in a process that
has imported Dynamo.
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

    from ..compat import Asked, BoundSteps, Window


class Backend:
    """The backend, which Dynamo calls with each graph. There is one object, BACKEND."""

    def __init__(self) -> None:
        #: what follows Dynamo's traces; None until `attach`
        self.window: Window | None = None
        #: what answers for bound steps; None until `attach`
        self.bound_steps: BoundSteps | None = None
        #: compiles the bound step of an optimizer, see `take_bound_steps`
        self.take: Callable[[Any, torch.optim.Optimizer, Asked], Any] | None = None

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
        # torch.compile asks a backend for its name
        self._dynamo_backend_init()
        return "fuseopt"

    def _dynamo_backend_init(self) -> None:
        """torch 2.15 calls this whenever it looks up the backend."""
        attach_to_loaded()

    def __repr__(self) -> str:
        return "<backend fuseopt>"

    def reset(self) -> None:
        """Called by torch._dynamo.reset(): forget reports, release graphs."""
        if self.window is not None:
            from ..compat import settle_interrupted

            settle_interrupted()
        if f"{__package__}.session" in sys.modules:
            from .session import session

            session.reset()


BACKEND = Backend()
_attaching = threading.RLock()


def take_bound_steps(
    take: Callable[[Any, torch.optim.Optimizer, Asked], Any],
) -> None:
    """Let `take(step, optimizer, asked)` answer `torch.compile(optimizer.step)` for
    this backend; None from it leaves the step to Dynamo.
    """
    BACKEND.take = take


def attach_to_loaded() -> None:
    """Called when the backend is looked up: attach, if Dynamo is imported."""
    if hasattr(sys.modules.get("torch._dynamo"), "optimize"):
        attach()
        assert BACKEND.bound_steps is not None
        BACKEND.bound_steps.look()


def attach() -> None:
    """Import Dynamo, and ask it to say when it traces. Raises nothing."""
    window = BACKEND.window
    if window is None:
        with _attaching:
            window = BACKEND.window or _attached()
    window.ask()


def resume() -> None:
    """Called with each graph: begin a trace anew that no hooks were in force for."""
    attach()
    assert BACKEND.window is not None
    BACKEND.window.resume()


def _attached() -> Window:
    from .. import compat
    from . import told

    compat.patches.serve(BACKEND, compat.HOOKS)
    compat.watched.tell_of_break = told.of_graph_break
    compat.watched.tell_of_limit = told.of_limit
    compat.watched.tell_of_failure = told.of_failure
    compat.watched.tell_of_refusal = told.of_refusal
    compat.Limits(BACKEND).listen()
    refuse = functools.partial(told.refuse_untraceable, BACKEND)
    window = compat.Window(BACKEND, refuse, told.kept_from_dynamo)
    BACKEND.bound_steps = compat.BoundSteps(
        BACKEND, _take_bound_step, told.left, lambda: window
    )
    compat.watched.ask = window.ask
    BACKEND.window = window
    return window


def refuse_module() -> NoReturn:
    """Raise NotABackend, which says what to pass instead of the module."""
    from ..compat import refusals_pass
    from ..errors import NotABackend

    with refusals_pass(BACKEND):
        raise NotABackend(
            "fuseopt is a module: give torch.compile the backend's name, as in "
            'torch.compile(opt.step, backend="fuseopt"), or call fuseopt.compile(opt)'
        )


def _take_bound_step(
    function: Any, optimizer: torch.optim.Optimizer, asked: Asked
) -> Any:
    take = BACKEND.take
    return None if take is None else take(function, optimizer, asked)

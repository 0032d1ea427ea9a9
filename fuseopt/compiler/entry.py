"""The backend object that Dynamo calls with each graph, and the patches of Dynamo.

All that compiles is imported with the first graph. Only the patches that Dynamo needs
before it traces a step are applied earlier: as soon as the backend is asked for in a
process that has imported Dynamo.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch
    from torch.fx import GraphModule

    from ..compat import Asked


class Backend:
    """The backend, which Dynamo calls with each graph. There is one object, BACKEND."""

    def __init__(self) -> None:
        #: has `attach` patched Dynamo?
        self.attached = False
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
        attach()
        from ..compat import refusals_pass
        from .dispatch import compile_graph

        with refusals_pass(self):
            return compile_graph(gm, example_inputs, mode, options)

    @property
    def __name__(self) -> str:
        # torch.compile asks a backend for its name when Dynamo is loaded, and before
        # it traces: that serves whoever took hold of the backend before Dynamo was
        attach_to_loaded()
        return "fuseopt"

    def __repr__(self) -> str:
        return "<backend fuseopt>"

    def reset(self) -> None:
        """Called by torch._dynamo.reset(): forget reports, release graphs."""
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
    """Attach, if Dynamo is imported completely."""
    if hasattr(sys.modules.get("torch._dynamo"), "optimize"):
        attach()


def attach() -> None:
    """Import Dynamo and patch it for traces for this backend, once."""
    with _attaching:
        if BACKEND.attached:
            return
        BACKEND.attached = True
        from .. import compat

        compat.on_bound_step(BACKEND, _take_bound_step)
        compat.on_trace(BACKEND, _refuse_untraceable, _keep_from_dynamo)
        compat.leave_no_patches(BACKEND)
        compat.trace_plainly(BACKEND)
        compat.numbers_pass_modes(BACKEND)
        compat.trace_branches(BACKEND)
        compat.trace_guarded()
        compat.leave_guards_untimed()
        compat.keep_attributes(BACKEND)
        compat.read_attributes(BACKEND)
        compat.guard_states(BACKEND)
        compat.trace_power(BACKEND)
        compat.power_unchecked()
        compat.trace_rewrites(BACKEND)
        compat.trace_symbols(BACKEND)
        compat.spare_inductor()
        compat.on_recompile_limit(BACKEND, _tell_of_limit)
        compat.on_graph_break(BACKEND, _tell_of_graph_break)
        compat.on_failure(BACKEND, _tell_of_failure)


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


def _refuse_untraceable(optimizer: torch.optim.Optimizer) -> None:
    from ..compat import refusals_pass
    from .diagnostics import refuse_untraceable

    with refusals_pass(BACKEND):
        refuse_untraceable(optimizer)


def _keep_from_dynamo(optimizer: torch.optim.Optimizer) -> str:
    from .diagnostics import kept_from_dynamo

    return kept_from_dynamo(optimizer)


def _tell_of_limit(function: str, optimizer: torch.optim.Optimizer | None) -> None:
    from .diagnostics import tell_of_limit

    tell_of_limit(function, optimizer)


def _tell_of_graph_break(
    place: str, reason: str, optimizer: torch.optim.Optimizer
) -> None:
    from .diagnostics import tell_of_graph_break

    tell_of_graph_break(place, reason, optimizer)


def _tell_of_failure(
    function: str, reason: str, optimizer: torch.optim.Optimizer | None
) -> None:
    from .diagnostics import tell_of_failure

    tell_of_failure(function, reason, optimizer)

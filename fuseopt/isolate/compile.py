"""An optimizer, options -> the same optimizer, its step compiled apart from all others.

Dynamo keeps what it compiled with a function's code object, which all optimizers of a
class share, and gives up on it after eight. `compile` gives each optimizer a code
object of its own. All that stands around the step's own function (hooks, the profiler's
record, the grad mode, a scheduler's bookkeeping) runs as on the plain optimizer.
"""

from __future__ import annotations

import logging
import types
from typing import Any, TypeVar

from torch.optim import Optimizer

from .. import compat
from ..compiler.entry import attach
from ..compiler.session import COMPILED
from ..config import of_mode, resolve
from ..errors import NotAnOptimizer, UnsupportedInput
from .decorators import peel, rewrap
from .isolated import Isolated, Wanted
from .methods import HeldStep, Step

log = logging.getLogger("fuseopt")

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def compile(optimizer: AnyOptimizer, **options: Any) -> AnyOptimizer:
    """Compile `optimizer.step` in isolation; returns the optimizer, the same object.

    `options` are those of fuseopt.config. Called again, it replaces them. A copy or a
    pickle of the optimizer is a plain one again. What `fused=True` asks of torch's
    kernels is done by fuseopt's.

    Raises NotAnOptimizer, ConfigError, and UnsupportedInput for a step that torch keeps
    away from Dynamo.
    """
    given: Any = optimizer
    if not isinstance(given, Optimizer):
        kind = given if isinstance(given, type) else type(given)
        raise NotAnOptimizer(
            f"fuseopt.compile takes a torch.optim.Optimizer, not {kind.__name__!r}; "
            'for a step of any other kind: torch.compile(step, backend="fuseopt")'
        )
    resolve(None, options)
    current: Any = optimizer.step
    known = getattr(current, COMPILED, None)
    if isinstance(known, Isolated) and known.owner() is optimizer:
        known.configure(options)
        return optimizer
    attach()
    reason = compat.disabled(optimizer)
    if reason:
        raise UnsupportedInput(reason)
    made = _isolated(optimizer, current, Wanted(options))
    if made is None:
        raise UnsupportedInput(
            f"the step of {type(optimizer).__name__} is a {type(current).__name__}, "
            "not a Python function, so Dynamo cannot trace it"
        )
    function, bound = made
    optimizer.step = Step(optimizer, function) if bound else function  # type: ignore
    return optimizer


def compile_bound(step: Any, optimizer: Optimizer, asked: compat.Asked) -> Any:
    """What `torch.compile(optimizer.step, backend="fuseopt")` returns: a step, bound to
    the optimizer, that is compiled as `compile` does; the optimizer stays as it is.

    None for a step that Dynamo alone can answer for: torch keeps it away from Dynamo,
    or it is no Python function. Raises ConfigError for a wrong option or mode.
    """
    resolve(asked.mode, asked.options)
    options = {**of_mode(asked.mode), **asked.options}
    known = getattr(step, COMPILED, None)
    if isinstance(known, Isolated) and known.owner() is optimizer:
        known.configure(options)
        return step
    if compat.disabled(optimizer):
        return None
    wanted = Wanted(options, asked.fullgraph, asked.dynamic)
    made = _isolated(optimizer, step, wanted)
    if made is None:
        return None
    function, bound = made
    compiled: Any = HeldStep(optimizer, function) if bound else function
    # torch.compile for another backend begins with the step as it was
    compiled._torchdynamo_orig_callable = step
    compiled._torchdynamo_wrapper_id = id(compiled)
    return compiled


def _isolated(
    optimizer: Optimizer, step: Any, wanted: Wanted
) -> tuple[Any, bool] | None:
    """A step's function with its decorators around one that is compiled apart, and is
    it to be bound? None where there is no Python function to be compiled.
    """
    bound = getattr(step, "__self__", None) is optimizer
    layers, inner = peel(step.__func__ if bound else step)
    if not isinstance(inner, types.FunctionType):
        return None
    if any(group.get("fused") for group in optimizer.param_groups):
        log.info(
            "%s asks for torch's fused kernels; its step runs in fuseopt's instead",
            type(optimizer).__name__,
        )
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        # torch's fused kernels unscale gradients themselves; GradScaler is to do it
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    isolated = Isolated(optimizer, inner, wanted)
    entry, alone = isolated.entry()
    for layer in reversed(layers):
        entry, alone = rewrap(layer, inner, entry, alone)
        inner = layer
    return entry, bound

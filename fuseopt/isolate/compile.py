"""Compile the step of one optimizer in isolation from all others.

Dynamo stores compiled code with a function's code object, which all optimizers of a
class share. It stops at its recompile limit of eight. So `compile` gives each optimizer
its own code object. All layers around the step's function (hooks, the profiler's
record, the grad mode, a scheduler's bookkeeping) run as on the plain optimizer.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from .. import compat
from ..compiler.entry import attach
from ..compiler.session import COMPILED, session
from ..config import of_mode, resolve
from ..errors import NotAnOptimizer, UnsupportedInput
from ..storage.checkpoints import load_unpacked
from ..storage.rule import Rule, rule_of
from ..storage.step import OtherPacked
from .compilations import CompileOptions
from .decorators import peel, rewrap
from .isolated import OptimizerCompiler
from .methods import HeldStep, Step

log = logging.getLogger("fuseopt")

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def compile(
    optimizer: AnyOptimizer, *, storage: Any = None, **options: Any
) -> AnyOptimizer:
    """Compile `optimizer.step` in isolation; return the optimizer, the same object.

    `options`: those of fuseopt.config; another call replaces them. A copy or a pickle
    of the optimizer is a plain one. With `fused=True`, fuseopt's kernels run in place
    of torch's fused ones.

    Raises NotAnOptimizer, ConfigError, and UnsupportedInput for a step that torch keeps
    away from Dynamo.
    """
    resolve(None, options, of=compile)
    rule = None if storage is None else rule_of(storage)
    return compile_stored(optimizer, options, rule)


def compile_stored(
    optimizer: AnyOptimizer,
    options: Mapping[str, Any],
    rule: Rule | None,
    beside: OtherPacked | None = None,
) -> AnyOptimizer:
    """Compile as `compile` does, with a rule that packs state.

    `beside`: packed tensors besides the state.
    """
    candidate: Any = optimizer
    if not isinstance(candidate, Optimizer):
        kind = candidate if isinstance(candidate, type) else type(candidate)
        raise NotAnOptimizer(
            f"fuseopt.compile takes a torch.optim.Optimizer, not {kind.__name__!r}; "
            'for a step of any other kind: torch.compile(step, backend="fuseopt")'
        )
    has_hooks = compat.has_state_hooks(optimizer)
    if rule is not None and not has_hooks:
        raise UnsupportedInput(
            f"the state of {type(optimizer).__name__} cannot be packed: its __init__ "
            "does not call torch.optim.Optimizer.__init__, so its state dicts have no "
            "hooks. Compile it without storage"
        )
    if rule is not None:
        _check_dense(optimizer)
    current: Any = optimizer.step
    isolated = compiler_of(current)
    if isolated is not None and isolated.owner() is optimizer:
        isolated.configure(options)
        isolated.store(rule)
        return optimizer
    attach()
    reason = compat.disabled(optimizer)
    if reason:
        raise UnsupportedInput(reason)
    function_and_binding = _isolated(
        optimizer, current, CompileOptions(options, storage=rule, beside=beside)
    )
    if function_and_binding is None:
        raise UnsupportedInput(
            f"the step of {type(optimizer).__name__} is a {type(current).__name__}, "
            "not a Python function, so Dynamo cannot trace it"
        )
    session.compiled[id(optimizer)] = optimizer
    if has_hooks:
        optimizer.register_load_state_dict_pre_hook(_loaded)
    function, bound = function_and_binding
    optimizer.step = Step(optimizer, function) if bound else function  # type: ignore
    return optimizer


def _check_dense(optimizer: Optimizer) -> None:
    """Raise UnsupportedInput for a parameter that is packed as 2 of 4."""
    every = (p for group in optimizer.param_groups for p in group["params"])
    for k, p in enumerate(every):
        if isinstance(p, torch.sparse.SparseSemiStructuredTensor):
            raise UnsupportedInput(
                f"storage: parameter {k} of {type(optimizer).__name__} is a "
                f"{type(p).__name__}, which torch cannot write in place. Step a dense "
                "weight with a mask in its state: see Masks in docs/storage.md"
            )


def _loaded(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """Unpack a state dict for an optimizer that keeps its state in float32."""
    return (
        None if packs(optimizer) is not None else load_unpacked(optimizer, state_dict)
    )


def compiler_of(step: Any) -> OptimizerCompiler | None:
    """Return what compiles a step in isolation, or None."""
    isolated = getattr(step, COMPILED, None)
    return isolated if isinstance(isolated, OptimizerCompiler) else None


def packs(optimizer: Optimizer) -> OptimizerCompiler | None:
    """Return what steps an optimizer whose state is packed; None for other ones."""
    isolated = compiler_of(optimizer.step)
    return isolated if isolated and isolated.packed_step is not None else None


def compile_bound(
    step: Any, optimizer: Optimizer, arguments: compat.CompileArguments
) -> Any:
    """Return the result of `torch.compile(optimizer.step, backend="fuseopt")`.

    It is a step, bound to the optimizer and compiled as by `compile`; the optimizer
    does not change. Returns None for a step left to Dynamo: torch disables Dynamo for
    it, or it is not a Python function. Raises ConfigError for a wrong option or mode.
    """
    resolve(arguments.mode, arguments.options)
    options = {**of_mode(arguments.mode), **arguments.options}
    isolated = compiler_of(step)
    if isolated is not None and isolated.owner() is optimizer:
        isolated.configure(options)
        return step
    if compat.disabled(optimizer):
        return None
    wanted = CompileOptions(options, arguments.fullgraph, arguments.dynamic)
    function_and_binding = _isolated(optimizer, step, wanted)
    if function_and_binding is None:
        return None
    function, bound = function_and_binding
    session.bound.add(optimizer)
    compiled: Any = HeldStep(optimizer, function) if bound else function
    # torch.compile for another backend begins with the original step
    compiled._torchdynamo_orig_callable = step
    compiled._torchdynamo_wrapper_id = id(compiled)
    return compiled


def _isolated(
    optimizer: Optimizer, step: Any, wanted: CompileOptions
) -> tuple[Any, bool] | None:
    """Return a step's decorated function, compiled in isolation, and whether to bind
    it.

    Returns None without a Python function to compile.
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
        # torch's fused kernels unscale gradients themselves; fuseopt leaves that to
        # GradScaler
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    isolated = OptimizerCompiler(optimizer, inner, wanted)
    entry, alone = isolated.entry()
    for layer in reversed(layers):
        entry, alone = rewrap(layer, inner, entry, alone)
        inner = layer
    return entry, bound

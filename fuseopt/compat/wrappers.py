"""Private API of the two layers that torch puts around an optimizer's step."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from .capability import cached, probed, switches
from .facts import Fact, attributes, empty, entry, result
from .libraries import torch_library
from .names import Missing, find
from .traced import any_tracer, tracers

#: In C++: at::hasCallbacks(), which is true if callbacks observe functions.
_CALLBACKS = "_ZN2at12hasCallbacksEv"

#: The code of the layer that calls hooks and notifies profilers.
PROFILED = Optimizer.profile_hook_step(lambda: None).__code__
_use_grad = find("torch.optim.optimizer:_use_grad_for_differentiable", None)
#: The code of the layer that sets the grad mode by `differentiable`.
GRAD_MODE = None if _use_grad is None else _use_grad(lambda: None).__code__
_fallback = find("torch.optim.optimizer:_disable_dynamo_if_unsupported", None)
#: The code of the layer that keeps a function away from Dynamo on some devices.
FALLBACK = None if _fallback is None else _fallback()(lambda: None).__code__
#: The code of a function decorated with `torch.no_grad()` and its kind.
DECORATED = torch.no_grad()(lambda: None).__code__
#: Functions of torch.optim that sort lists of tensors by device, dtype and whether they
#: have several dimensions.
SORTS_BY_DIMS = tuple(
    module._group_tensors_by_device_dtype_and_is_multidim
    for module in vars(torch.optim).values()
    if hasattr(module, "_group_tensors_by_device_dtype_and_is_multidim")
)


def devices_with_lists() -> list[str]:
    """Return the types of devices on which torch prefers foreach calls.

    Relies on the function by which it chooses. If that is missing, returns those with
    foreach kernels since torch 2.6.
    """
    supported = find(
        "torch.utils._foreach_utils:_get_foreach_kernels_supported_devices", None
    )
    return ["cuda", "xpu"] if supported is None else list(supported())


@functools.cache
def _has_callbacks() -> Callable[[], bool]:
    """Return a function: do callbacks observe functions? Tested on a profiler.

    Without the C++ function, it returns True.
    """
    try:
        function = getattr(torch_library("libtorch_cpu", ctypes.PyDLL), _CALLBACKS)
    except (OSError, AttributeError):
        return lambda: True
    function.restype, function.argtypes = ctypes.c_bool, []
    return function  # type: ignore[no-any-return]


_MONITOR, _RUNNING = "torch.profiler._cupti_monitor", "_monitor_singleton"


def _monitored() -> bool:
    """Does torch's monitor of GPUs run? It observes `record_function` by itself."""
    monitor = sys.modules.get(_MONITOR)
    return getattr(monitor, _RUNNING, monitor) is not None


@probed(
    "modes",
    "fuseopt detects that a mode of torch is on",
    "layers around a step are gone through at each call: some 20 microseconds more",
)
def MODES() -> None:
    stacks = (
        find("torch._C:_len_torch_dispatch_stack"),
        find("torch._C:_len_torch_function_stack"),
    )
    if any(length() < 0 for length in stacks):
        raise Missing("torch._C counts something else than modes")
    find("torch._C:_is_tracing")


class _Sample(Optimizer):
    """Optimizer for tests, since torch changes the class of its optimizers."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


@probed(
    "step-hooks",
    "fuseopt detects hooks around a step",
    "layers around a step are gone through at each call: some 20 microseconds more",
)
def HOOKS() -> None:
    find("torch.optim.optimizer:_global_optimizer_pre_hooks")
    find("torch.optim.optimizer:_global_optimizer_post_hooks")
    sample = _Sample([torch.zeros(1, device="cpu")], {})
    handles = (
        sample.register_step_pre_hook(lambda *_: None),
        sample.register_step_post_hook(lambda *_: None),
    )
    places = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
    if not all(len(getattr(sample, name, ())) == 1 for name in places):
        raise Missing("torch.optim.Optimizer keeps its hooks elsewhere")
    for handle in handles:
        handle.remove()


@cached
def _any_mode() -> Callable[[], Any]:
    """Return a function that is true while a mode of torch or a tracer is active.

    Relies on the functions that count the modes. It is always true without them.
    """
    if not MODES.available():
        return lambda: True
    dispatch = find("torch._C:_len_torch_dispatch_stack")
    function = find("torch._C:_len_torch_function_stack")
    traces = any_tracer()
    return lambda: dispatch() or function() or traces()


def without_modes() -> bool:
    """Is no mode of torch and no tracer active?"""
    return not _any_mode()()


def unhooked(step_of: Optimizer) -> bool:
    """Is there nothing around a step but marks for profilers: no hooks, modes or
    tracers? False for a wrapper of an optimizer that lacks torch's hooks.
    """
    if not (HOOKS.there or HOOKS.available()):
        return False
    home = _hooks_of_all()
    try:
        hooks = step_of._optimizer_step_pre_hooks or step_of._optimizer_step_post_hooks
    except AttributeError:  # its class does not call Optimizer.__init__
        return False
    if hooks or home[_BEFORE_ALL] or home[_AFTER_ALL]:
        return False
    return not _any_mode()()


#: The names of hooks around the steps of all optimizers.
_BEFORE_ALL, _AFTER_ALL = "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"


@functools.cache
def _hooks_of_all() -> dict[str, Any]:
    home: dict[str, Any] = vars(find("torch.optim.optimizer"))
    return home


def ran(step_of: Optimizer) -> None:
    """Show the step to profilers that trace Python, as torch's layer does.

    Does nothing if torch has no such place.
    """
    place = getattr(step_of, "_optimizer_step_code", None)
    if place is not None:
        place()


def undisturbed(step_of: Optimizer) -> bool:
    """May a step omit torch's layer for hooks and profilers, unobserved?

    It may if there are no hooks, modes, profilers or tracers. Relies on where torch
    keeps these; False if they are elsewhere.
    """
    return unhooked(step_of) and not (_monitored() or _has_callbacks()())


#: The names of an optimizer's hooks around its steps.
_OWN_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"


def undisturbed_facts(step_of: Optimizer) -> list[Fact] | None:
    """Return facts of which `undisturbed` follows; None if it is false, or if facts
    cannot show it.
    """
    home, own, traces = _hooks_of_all(), vars(step_of), tracers()
    if traces is None or not undisturbed(step_of) or not set(_OWN_HOOKS) <= set(own):
        return None
    every = [*(own[x] for x in _OWN_HOOKS), home[_BEFORE_ALL], home[_AFTER_ALL]]
    dispatch = find("torch._C:_len_torch_dispatch_stack")
    function = find("torch._C:_len_torch_function_stack")
    facts = [
        entry(vars(switches), "epoch"),
        *attributes(step_of, *_OWN_HOOKS),
        *(entry(home, name) for name in (_BEFORE_ALL, _AFTER_ALL)),
        *map(empty, every),
        entry(vars(sys)["modules"], _MONITOR),
        result(0, dispatch),
        result(0, function),
        *(result(value, function) for function, value in traces),
        result(False, _has_callbacks()),
    ]
    if sys.modules.get(_MONITOR) is not None:
        facts.append(entry(vars(sys.modules[_MONITOR]), _RUNNING))
    return facts

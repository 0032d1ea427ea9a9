"""Private API of accelerators' memory pools, generators and process groups."""

from __future__ import annotations

import functools
import logging
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .names import find

log = logging.getLogger("fuseopt")


def end_allocation(device: torch.device, pool: Any) -> None:
    """Stop allocations from the pool of a capture that broke before its end.

    Relies on `torch._C._cuda_endAllocateToPool` (for "cuda"). Nothing happens if it is
    missing, or if the capture did end. Otherwise the allocator would query a stream
    that no longer captures at each allocation.
    """
    end = find(f"torch._C:_{device.type}_endAllocateToPool", None)
    if end is not None:
        try:
            end(device.index, pool)
        except RuntimeError:
            return


def end_generator_capture(
    device: torch.device, graph_class: Any, options: Mapping[str, Any]
) -> None:
    """Make the current device's default generator draw again after a capture broke.

    torch notifies its CUDA generator when a capture begins and when it ends well. In
    between, the generator refuses to draw outside of the capture. Nothing notifies it
    of a broken capture (`CUDAGraph::capture_begin`, `capture_end` and
    `CUDAGeneratorState::increase`). The newest sources distinguish captures by id, and
    need no such help.

    A small capture with a private pool, which ends well, resets the generator. If that
    fails too, the generator stays unusable, and fuseopt warns.
    """
    module = torch.get_device_module(device.type)
    try:
        word = torch.empty(1, dtype=torch.int64, device=device)
        stream = module.Stream()
        stream.wait_stream(module.current_stream(device))
        graph = graph_class()
        with module.stream(stream):
            graph.capture_begin(**options)
            try:
                word.zero_()
            finally:
                graph.capture_end()
        word.record_stream(stream)
        graph.reset()
    except Exception as error:
        log.warning(
            "a graph capture failed: random numbers may be refused on %s (%s)",
            device,
            str(error).split("\n", 1)[0],
        )


def stream_on(device: torch.device) -> Callable[[], torch.Stream]:
    """A function that returns the current stream of a device.

    Relies on `torch._C._accelerator_getStream`, a function of C; without it, the
    function is that of the device's module, which runs some twenty lines of Python.
    """
    stream_of = find("torch._C:_accelerator_getStream", None)
    accelerator = torch.accelerator.current_accelerator()
    same = accelerator is not None and accelerator.type == device.type
    if stream_of is None or not same or device.index is None:
        module = torch.get_device_module(device.type)
        return functools.partial(module.current_stream, device)
    return functools.partial(stream_of, device.index)


def in_c(x: Any, name: str) -> Callable[[], object]:
    """Return a method of an object, without Python code around it if a base class is in
    C.

    torch.cuda.CUDAGraph derives from such a class. No signal handler runs in a C
    function.
    """
    for kind in type(x).__mro__:
        method = vars(kind).get(name)
        if method is not None and not isinstance(method, types.FunctionType):
            return functools.partial(method, x)
    return functools.partial(getattr(x, name))


def before_process_groups_end(callback: Callable[[], None]) -> None:
    """Register `callback` to run before a process group of torch.distributed shuts
    down.

    A graph may hold resources of a group's library, and such a group waits for the
    graph at its end. Relies on torch looking up `ProcessGroup.shutdown` on its class;
    if it cannot be replaced, nothing is called.
    """
    module: Any = sys.modules.get("torch.distributed")
    if module is None or not module.is_available() or not module.is_initialized():
        return
    group = module.ProcessGroup
    shutdown = group.shutdown
    if getattr(shutdown, "fuseopt", None) is not None:
        return

    def first(self: Any, *args: Any, **kwargs: Any) -> Any:
        callback()
        return shutdown(self, *args, **kwargs)

    first.fuseopt = callback  # type: ignore[attr-defined]
    try:
        group.shutdown = first
    except (AttributeError, TypeError):
        return

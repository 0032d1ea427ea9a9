"""What of accelerators' memory and of process groups is not torch's public API."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch


def end_allocation(device: torch.device, pool: Any) -> None:
    """Let no more memory come from a pool, whose capture broke before it said so.

    Relies on `torch._C._cuda_endAllocateToPool` (for "cuda"); without it, or where the
    capture did say so, nothing happens: the allocator then asks a stream that is not
    capturing any more at each allocation.
    """
    end = getattr(torch._C, f"_{device.type}_endAllocateToPool", None)
    if end is not None:
        try:
            end(device.index, pool)
        except RuntimeError:
            return


def before_process_groups_end(callback: Callable[[], None]) -> None:
    """Have `callback` called before a process group of torch.distributed shuts down.

    A graph may hold what a group's library has lent, and such a group waits for the
    graph when it ends. Relies on `ProcessGroup.shutdown` being looked up on its class;
    where it cannot be exchanged, nothing is called.
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

"""Find a device's torch module; check whether it is remote or capturing a graph."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def module_of(device: torch.device) -> Any:
    """Return the torch module of a device's type: `torch.cuda` for "cuda"."""
    return torch.get_device_module(device.type)


def is_remote(device: torch.device) -> bool:
    """Has the device separate memory and streams?"""
    return device.type != "cpu"


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a device current, if it is not."""
    if not is_remote(device) or device.index is None:
        return contextlib.nullcontext()
    module = module_of(device)
    if module.current_device() == device.index:
        return contextlib.nullcontext()
    manager: contextlib.AbstractContextManager[Any] = module.device(device)
    return manager


class Place:
    """Device, with a check at each call whether its current stream is capturing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module = module_of(device)
        self.reports_capture = hasattr(self.module, "is_current_stream_capturing")

    def capturing(self) -> bool:
        """Is a graph being captured on the device's current stream?"""
        if (
            not self.reports_capture
            or self.module.current_device() != self.device.index
        ):
            return is_capturing(self.device)
        return bool(self.module.is_current_stream_capturing())


def is_capturing(device: torch.device) -> bool:
    """Is a graph being captured on the current stream of a device?"""
    if not is_remote(device):
        return False
    with on(device):
        query = getattr(module_of(device), "is_current_stream_capturing", None)
        return bool(query is not None and query())

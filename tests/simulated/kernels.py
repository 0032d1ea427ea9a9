"""Triton kernels on "sim": Triton's interpreter, when their stream comes to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuseopt.runtime.triton.build import TritonModule
from fuseopt.runtime.triton.interpreter import interpreting
from fuseopt.runtime.triton.registry import DeviceType


class SimProgram:
    """A kernel that is queued. It reads its tables where they lie, and does not keep
    them alive: what was freed too early is junk.
    """

    def __init__(self, module: TritonModule, device: torch.device) -> None:
        self.module = module
        self.device = device

    def bind(self, programs: int, tables: Sequence[torch.Tensor]) -> Callable[[], None]:
        sim: Any = torch.get_device_module("sim")
        views = [sim._C().host_view(t, False) for t in tables]
        module = self.module

        def kernel() -> None:
            with interpreting():
                module.entry[(programs,)](*views, **module.sizes, **module.options)

        def run() -> None:
            with sim.device(self.device):
                sim.enqueue(kernel)

        return run


SIM = DeviceType(
    SimProgram, "CUDAGraph", {"capture_error_mode": "thread_local"}, interpreted=True
)

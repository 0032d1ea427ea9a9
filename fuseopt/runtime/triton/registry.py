"""Types of devices, and how graphs and kernels of each are started.

No other module of the runtime names a type of device. A new one is an entry of
`DEVICES`. NVIDIA and ROCm are both "cuda" to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ...errors import ConfigError
from . import launcher
from .build import TritonModule


class Program(Protocol):
    """Kernel, built for one device."""

    def bind(self, programs: int, tables: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Return a function that starts it once, on the current stream, with this
        number of programs over these tables.
        """


@dataclass(frozen=True)
class DeviceType:
    """Functions and names that drive the devices of a type.

    `program(module, device)` builds a kernel. `graph` is the name of the graph class in
    the type's torch module (`torch.cuda` for "cuda"), "" if it has none. `capture` has
    the arguments of its `capture_begin` besides `pool`. `interpreted` is true if
    kernels run in Triton's interpreter; None follows TRITON_INTERPRET.
    """

    program: Callable[[TritonModule, torch.device], Program]
    graph: str = ""
    capture: Mapping[str, Any] = field(default_factory=dict)
    interpreted: bool | None = None


#: Entries of the types of devices.
DEVICES: dict[str, DeviceType] = {
    "cpu": DeviceType(launcher.Interpreted),
    # other threads may do what a capture in this one may not
    "cuda": DeviceType(
        launcher.Compiled, "CUDAGraph", {"capture_error_mode": "thread_local"}
    ),
    "xpu": DeviceType(launcher.Compiled, "XPUGraph"),
}


def type_of(device: torch.device) -> DeviceType:
    """Return the entry of a device. Raises ConfigError if there is none."""
    entry = DEVICES.get(device.type)
    if entry is None:
        raise ConfigError(
            f"fuseopt has no launcher for {device}; known: {', '.join(DEVICES)}"
        )
    return entry

"""Triton kernels on "sim": what Triton compiles for sm_90, run when their stream comes
to them.

`device()` is an entry for `DEVICES`; it keeps a `Log` of all launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fuseopt.runtime.triton.build import TABLES, TritonModule, ast_source
from fuseopt.runtime.triton.registry import DeviceType

from .machine import Fault, Machine, Region, Run, Traffic

#: Tables whose words may be -1, which is also what memory looks like that is fresh.
WORDS = {"chunks", "lanes", "geometry"}


class Launch(NamedTuple):
    """A run, its tables' addresses, the memory that there was."""

    run: Run
    tables: tuple[int, ...]
    regions: list[Region]

    def traffic(self, tables: bool = False) -> Traffic:
        """Of all tensors; or of all tables."""
        found = [
            t
            for t, r in zip(self.run.traffic, self.regions, strict=True)
            if any(r.base <= p < r.base + r.size for p in self.tables) == tables
        ]
        return Traffic(*map(sum, zip(*found, strict=True)))


@dataclass
class Log:
    """Launches, in their order. `seed`: 0 runs programs in order; another one counts up
    with each launch. `change`, `change_source`: what becomes of the text of PTX, and of
    the kernel's.
    """

    seed: int = 0
    change: Callable[[str], str] = str
    change_source: Callable[[str], str] = str
    machines: dict[str, Machine] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)

    @property
    def faults(self) -> list[Fault]:
        """All that were found."""
        return [fault for x in self.launches for fault in x.run.faults]


def machine_code_less(text: Any, metadata: dict[str, Any]) -> bytes:
    """In place of machine code, which nothing here runs."""
    return b"none"


def _stages(*given: Any) -> Any:
    """Triton's hook: called for a key, then with the stages of a compilation."""
    if not given:
        return "fuseopt: without machine code", "fuseopt: without machine code"
    given[1]["cubin"] = machine_code_less
    return None


#: By the file of a module.
_COMPILED: dict[Path, tuple[str, int]] = {}


def compiled(module: TritonModule) -> tuple[str, int]:
    """PTX of a module for sm_90, and bytes of shared memory."""
    if module.path not in _COMPILED:
        _COMPILED[module.path] = _compiled(module)
    return _COMPILED[module.path]


def _compiled(module: TritonModule) -> tuple[str, int]:
    import triton
    from triton.backends.compiler import GPUTarget

    with triton.knobs.runtime.scope():
        triton.knobs.runtime.add_stages_inspection_hook = _stages
        made = triton.compile(
            ast_source(module),
            target=GPUTarget("cuda", 90, 32),
            options=dict(module.options),
        )
    return made.asm["ptx"], made.metadata.shared


class PtxProgram:
    """A kernel for one device. It reads its tables where they lie, and does not keep
    them alive: what was freed too early is out of range.
    """

    def __init__(self, log: Log, module: TritonModule, device: torch.device) -> None:
        ptx, shared = compiled(module)
        ptx = log.change(ptx)
        self.device = device
        self.log = log
        if ptx not in log.machines:
            log.machines[ptx] = Machine(ptx, shared)
        self.machine = log.machines[ptx]

    def bind(self, programs: int, tables: Sequence[torch.Tensor]) -> Callable[[], None]:
        sim: Any = torch.get_device_module("sim")
        places = tuple(t.data_ptr() for t in tables)
        words = {p for p, name in zip(places, TABLES, strict=True) if name in WORDS}

        def kernel(there: Mapping[int, int]) -> None:
            log = self.log
            log.seed += bool(log.seed)
            memory = dict(sim.memory())
            for place, size in there.items():
                memory[place] = max(size, memory.get(place, 0))
            regions = [
                Region(at, size, any(at <= word < at + size for word in words))
                for at, size in memory.items()
            ]
            run = self.machine.run(programs, places, regions, log.seed)
            log.launches.append(Launch(run, places, regions))

        def run() -> None:
            with sim.device(self.device):
                # what is freed behind a launch is there until that has run
                captured = sim.is_current_stream_capturing()
                there = {} if captured else dict(sim.memory())
                sim.enqueue(functools.partial(kernel, there))

        return run


def device(log: Log) -> DeviceType:
    """How "sim" is driven where kernels are those of a GPU."""
    return DeviceType(
        functools.partial(PtxProgram, log),
        "CUDAGraph",
        {"capture_error_mode": "thread_local"},
        interpreted=False,
    )

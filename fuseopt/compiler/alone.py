"""Run the kernels of a dumped graph without the model: check and time them.

The inputs are random numbers, in tensors with the shapes, strides and aliases of the
step's. The results are compared with the reference, `ir/interpreter.py`, which runs a
schedule with torch's functions. A graph with ATen calls between its kernels is not run,
since the file lacks the arguments of these calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..capture.trace import Captured
from ..config import resolve
from ..ir.graph import Graph, Schedule, storage_bytes
from ..ir.interpreter import run_schedule
from ..ir.meaning import DTYPES
from ..ir.traffic import traffic
from ..runtime.binding import bind
from ..runtime.executor import DirectExecutor
from ..runtime.plan import Built, Plan
from ..runtime.tables.host_numbers import SIZES, place_of
from ..scheduler import schedule
from .again import Saved, compare, loaded
from .pipeline import factory_of

#: The number of timed launches.
TIMES = 30
#: The largest accepted difference of a graph with sums, relative to the largest number.
#: The interpreter adds in a different order.
FAR = 1e-5


class MadeUpNumbers:
    """Made-up numbers that replace a call's arguments: rates, betas and the like."""

    def __getitem__(self, place: int) -> float:
        return 0.9 / (1 + place)


class ReadyKernels:
    """Built kernels; implements runtime.plan.Kernels."""

    def __init__(self, built: Built) -> None:
        self.built = built

    def ready(self) -> nullcontext[Built]:
        """Return the kernels at once."""
        return nullcontext(self.built)


def main(folder: Path, arguments: Sequence[str] = ()) -> int:
    """Compare the texts of kernels and, with "--run", run them: for `repro.py`.

    Returns 0 if nothing differs. Trust the folder first, see `again.loaded`.
    """
    saved = loaded(folder)
    differ = compare(folder, saved)
    return (run(saved) if "--run" in arguments else 0) or differ


class Outcome(NamedTuple):
    """Comparison of the kernels of a graph with the reference.

    `exact`: the bits are equal. `worst`: the largest difference, relative to the
    largest number of its tensor. `sums`: a kernel adds up, in another order than the
    reference. `launch()` runs the kernels again; `tensors`: what they work on.
    """

    exact: bool
    worst: float
    sums: bool
    launch: Callable[[], object]
    tensors: list[torch.Tensor]

    @property
    def right(self) -> bool:
        """Are the results those of the reference?"""
        return self.exact or (self.sums and self.worst <= FAR)


def run(saved: Saved, write: Callable[[str], None] = print) -> int:
    """Run a graph's kernels on made-up numbers.

    Calls `write` with their distance from the reference and their time. Returns 0 if
    the results are those of the reference, 1 if not, 2 if the kernels cannot run here.
    """
    plan = schedule(saved.graph, lambda *_: None, saved.machine)
    refusal = why_not(saved.graph, plan)
    if refusal:
        write(f"not run: {refusal}")
        return 2
    found = compare_with_reference(saved, plan)
    exact, worst = found.exact, found.worst
    write("the bits of the reference" if exact else f"{worst:.1e} from the reference")
    seconds = min(timed(found.launch, found.tensors))
    moved = sum(traffic(saved.graph, kernel).bytes for kernel in plan.kernels)
    write(f"{1e6 * seconds:.1f} us, {moved:,} bytes: {moved / seconds / 1e9:.1f} GB/s")
    return int(not found.right)


def why_not(graph: Graph, plan: Schedule) -> str:
    """Return why the kernels of a schedule cannot run here; "" if they can."""
    if plan.externs:
        names = ", ".join(sorted({x.name for x in plan.externs}))
        return f"between its kernels the graph calls {names}"
    missing = {b.device.split(":")[0] for b in graph.buffers} - devices()
    return f"there is no {', '.join(sorted(missing))} here" if missing else ""


def compare_with_reference(saved: Saved, plan: Schedule) -> Outcome:
    """Build the kernels of a schedule, launch them on made-up numbers, and compare."""
    graph = saved.graph
    config = resolve(None, None)
    factories = {}
    for kernel in plan.kernels:
        target = saved.targets[kernel.name]
        place = place_of(graph.buffers, kernel)
        factories[kernel.name] = factory_of(
            target, target.render(kernel), place, config
        )
    tensors = made_up(graph)
    captured = Captured(graph, (), (), tuple(range(len(tensors))), (), ())
    numbers = captured.evaluate(MadeUpNumbers(), lambda place: tensors[place])  # type: ignore[arg-type]
    bound = bind(Plan(captured, plan, ReadyKernels(Built(factories))), tensors)
    bound.fill(numbers)
    bound.move([t.data_ptr() for t in tensors])
    threads = torch.get_num_threads()
    # eager may round the elements after the last full vector differently: allow both
    wanted = []
    for tail in (False, True):
        wanted.append(made_up(graph))
        run_schedule(graph, plan, wanted[-1], numbers, tail=tail)

    def launch() -> object:
        return DirectExecutor().run(bound, tensors, threads)

    launch()
    wait(tensors)
    return Outcome(
        all(map(same_bits, tensors, *wanted)),
        max(map(distance, tensors, wanted[0]), default=0.0),
        any(v.reduction for k in plan.kernels for v in k.every),
        launch,
        tensors,
    )


def devices() -> set[str]:
    """Return the types of the devices of this machine."""
    kinds = {"cpu"}
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        kinds.add(accelerator.type if accelerator else "cpu")
    return kinds


def made_up(graph: Graph) -> list[torch.Tensor]:
    """Return made-up tensors for a call, with the aliases of the graph's buffers.

    Floats lie between 0.1 and 1.1, so that roots and logarithms are defined. Tensors
    without dimensions, which usually count steps, hold 3.
    """
    memory: dict[int, torch.Tensor] = {}
    tensors: dict[int, torch.Tensor] = {}
    inputs = [b for b in graph.buffers if b.kind in ("static", "arg")]
    for b in inputs:
        dtype = DTYPES[b.dtype]
        if b.storage not in memory:
            size = storage_bytes(x for x in inputs if x.storage == b.storage)
            n = -(-size // dtype.itemsize)
            filled = _numbers(n, bool(b.shape), b.source).to(dtype).to(b.device)
            memory[b.storage] = filled.view(torch.uint8)
        whole = memory[b.storage]
        whole_items = whole.numel() // dtype.itemsize * dtype.itemsize
        elements = whole[:whole_items].view(dtype)
        tensors[b.source] = elements.as_strided(b.shape, b.stride, b.offset)
    return [tensors[k] for k in range(len(tensors))]


def _numbers(n: int, many: bool, seed: int) -> torch.Tensor:
    if not many:
        return torch.full((n,), 3.0)
    return 0.1 + torch.rand(n, generator=torch.Generator().manual_seed(seed))


def same_bits(one: torch.Tensor, *others: torch.Tensor) -> bool:
    """Does each element have the bits of that element in one of the other tensors?"""
    width = SIZES[one.itemsize]
    mine, *theirs = (t.cpu().contiguous().view(width) for t in (one, *others))
    return bool(torch.stack([mine == t for t in theirs]).any(0).all())


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest number.

    Returns inf where one element is finite and its counterpart is not.
    """
    a, b = one.double().cpu(), other.double().cpu()
    if not a.numel() or torch.equal(a, b):
        return 0.0
    difference = float((a - b).abs().nan_to_num(nan=float("inf")).max() / b.abs().max())
    return difference if difference == difference else float("inf")


def timed(call: Callable[[], Any], tensors: list[torch.Tensor]) -> list[float]:
    """Return the seconds of each of TIMES calls."""
    seconds = []
    for _ in range(TIMES):
        begin = time.perf_counter()
        call()
        wait(tensors)
        seconds.append(time.perf_counter() - begin)
    return seconds


def wait(tensors: list[torch.Tensor]) -> None:
    """Wait until the devices have finished."""
    if any(not t.is_cpu for t in tensors):
        torch.accelerator.synchronize()

"""A dumped graph -> its kernels, run without the model: are they right, how fast?

What they read is made up: random numbers in memory like that of the step, with the same
shapes, strides and sharing. They run as they do in a step, and beside them the
reference: `ir/interpreter.py`, which says with torch's functions what a schedule means.
A graph that calls ATen between its kernels is not run: what those calls are given is
not in the file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from ..capture.trace import Captured
from ..config import resolve
from ..ir.graph import Graph, storage_bytes
from ..ir.interpreter import run_schedule
from ..ir.meaning import DTYPES
from ..ir.traffic import traffic
from ..runtime.binding import bind
from ..runtime.executor import Direct
from ..runtime.plan import Built, Plan
from ..runtime.tables.host_numbers import place_of
from ..scheduler import schedule
from .again import Saved, compare, loaded
from .pipeline import factory_of

#: So many times the launches are timed.
TIMES = 30
#: The interpreter adds sums up in an order of its own: so far, relative to the largest
#: number, a graph with sums may be from it.
FAR = 1e-5


#: Integers that are as wide as an element of so many bytes.
WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class MadeUp:
    """Numbers for the arguments of a call: rates, betas and the like."""

    def __getitem__(self, place: int) -> float:
        return 0.9 / (1 + place)


class Ready:
    """Kernels that have been built; see runtime.plan.Kernels."""

    def __init__(self, built: Built) -> None:
        self.built = built

    def ready(self) -> nullcontext[Built]:
        """As they are."""
        return nullcontext(self.built)


def main(folder: Path, given: Sequence[str] = ()) -> int:
    """What `repro.py` of a dump does: compare texts and, with "--run", run the kernels.

    0 if all is as it should be. Only for folders that you trust, see `again.loaded`.
    """
    saved = loaded(folder)
    differ = compare(folder, saved)
    return (run(saved) if "--run" in given else 0) or differ


def run(saved: Saved, tell: Callable[[str], None] = print) -> int:
    """Run a graph's kernels on made-up numbers, and say how far they are from the
    reference and how long they take.

    0 if they give what the reference gives, 1 if not, 2 if they cannot run here.
    """
    graph = saved.graph
    plan = schedule(graph, lambda *_: None, saved.machine)
    if plan.externs:
        names = ", ".join(sorted({x.name for x in plan.externs}))
        tell(f"not run: between its kernels the graph calls {names}")
        return 2
    missing = {b.device.split(":")[0] for b in graph.buffers} - devices()
    if missing:
        tell(f"not run: there is no {', '.join(sorted(missing))} here")
        return 2
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
    numbers = captured.evaluate(MadeUp(), lambda place: tensors[place])  # type: ignore[arg-type]
    bound = bind(Plan(captured, plan, Ready(Built(factories))), tensors)
    bound.fill(numbers)
    bound.move([t.data_ptr() for t in tensors])
    threads = torch.get_num_threads()
    # what eager's vectors leave over it may round otherwise: an element is either
    wanted = []
    for tail in (False, True):
        wanted.append(made_up(graph))
        run_schedule(graph, plan, wanted[-1], numbers, tail=tail)
    Direct().run(bound, tensors, threads)
    wait(tensors)
    exact = all(map(same_bits, tensors, *wanted))
    worst = max(map(distance, tensors, wanted[0]), default=0.0)
    sums = any(v.reduction for k in plan.kernels for v in k.every)
    tell("the bits of the reference" if exact else f"{worst:.1e} from the reference")
    seconds = min(timed(lambda: Direct().run(bound, tensors, threads), tensors))
    moved = sum(traffic(kernel).bytes for kernel in plan.kernels)
    tell(f"{1e6 * seconds:.1f} us, {moved:,} bytes: {moved / seconds / 1e9:.1f} GB/s")
    return int(not (exact or (sums and worst <= FAR)))


def devices() -> set[str]:
    """Kinds of devices that are here."""
    found = {"cpu"}
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        found.add(accelerator.type if accelerator else "cpu")
    return found


def made_up(graph: Graph) -> list[torch.Tensor]:
    """The tensors of a call: what shares memory in the graph shares it here.

    Floats lie between 0.1 and 1.1, so that roots and logarithms have an argument;
    tensors without dimensions, which count steps as a rule, hold 3.
    """
    memory: dict[int, torch.Tensor] = {}
    found: dict[int, torch.Tensor] = {}
    given = [b for b in graph.buffers if b.kind in ("static", "arg")]
    for b in given:
        dtype = DTYPES[b.dtype]
        if b.storage not in memory:
            size = storage_bytes(x for x in given if x.storage == b.storage)
            n = -(-size // dtype.itemsize)
            filled = _numbers(n, bool(b.shape), b.source).to(dtype).to(b.device)
            memory[b.storage] = filled.view(torch.uint8)
        whole = memory[b.storage]
        whole_items = whole.numel() // dtype.itemsize * dtype.itemsize
        seen = whole[:whole_items].view(dtype)
        found[b.source] = seen.as_strided(b.shape, b.stride, b.offset)
    return [found[k] for k in range(len(found))]


def _numbers(n: int, many: bool, seed: int) -> torch.Tensor:
    if not many:
        return torch.full((n,), 3.0)
    return 0.1 + torch.rand(n, generator=torch.Generator().manual_seed(seed))


def same_bits(one: torch.Tensor, *others: torch.Tensor) -> bool:
    """Has each element the bits of one of the others'? Signs of zeros count."""
    width = WIDTHS[one.itemsize]
    own, *theirs = (t.cpu().contiguous().view(width) for t in (one, *others))
    return bool(torch.stack([own == t for t in theirs]).any(0).all())


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, relative to the largest number; inf where one of both is
    not finite and the other is.
    """
    a, b = one.double().cpu(), other.double().cpu()
    if not a.numel() or torch.equal(a, b):
        return 0.0
    found = float((a - b).abs().nan_to_num(nan=float("inf")).max() / b.abs().max())
    return found if found == found else float("inf")


def timed(call: Callable[[], Any], tensors: list[torch.Tensor]) -> list[float]:
    """Seconds of some calls."""
    found = []
    for _ in range(TIMES):
        begin = time.perf_counter()
        call()
        wait(tensors)
        found.append(time.perf_counter() - begin)
    return found


def wait(tensors: list[torch.Tensor]) -> None:
    """Until devices have done what was launched."""
    if any(not t.is_cpu for t in tensors):
        torch.accelerator.synchronize()

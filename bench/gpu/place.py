"""In: the name of a place. Out: its device, its options, its clock.

"cuda" is where figures are made. The others rehearse: "cpu" runs C++ kernels,
"interpreter" Triton's interpreter on CPU tensors, "sim" the simulated accelerator of
the tests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from bench.results import Figures

REHEARSALS = ("cpu", "interpreter", "sim")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a section runs. `tiny`: sizes for a rehearsal, which takes seconds."""

    name: str = "cuda"
    tiny: bool = False

    @property
    def device(self) -> str:
        """The device of all tensors."""
        return "cpu" if self.name == "interpreter" else self.name

    @property
    def on_cpu(self) -> bool:
        """Are the tensors in the host's memory?"""
        return self.device == "cpu"

    @property
    def exact(self) -> bool:
        """Has a compiled step eager's bits here? Eager's own kernels have a vector
        library's roots in the host's memory, Triton's there IEEE's.
        """
        return self.name in ("cuda", "cpu")

    def options(self, **more: Any) -> dict[str, Any]:
        """Options of the backend; those that this version lacks are left out."""
        from fuseopt.config import Config

        known = {field.name for field in dataclasses.fields(Config)}
        if self.name == "interpreter":
            more = {"target": "triton", **more}
        return {key: value for key, value in more.items() if key in known}

    @property
    def graphs(self) -> tuple[bool, ...]:
        """The values of the option `cudagraphs` to try; none where there is no such."""
        has = "cudagraphs" in self.options(cudagraphs=True)
        return (True, False) if has and not self.on_cpu else ()

    def prepare(self) -> None:
        """Once in a process, before anything is compiled."""
        if self.name == "interpreter":
            os.environ["TRITON_INTERPRET"] = "1"
        if self.name == "sim":
            from tests import simulated

            simulated.load().set_available(True)
            # kernels run there once the launch path has a table of devices
            with contextlib.suppress(ImportError):
                registry = importlib.import_module("fuseopt.runtime.triton.registry")
                kernels = importlib.import_module("tests.simulated.kernels")
                registry.DEVICES["sim"] = kernels.SIM

    @property
    def module(self) -> Any:
        """torch.cuda, or what stands for it here."""
        return torch.get_device_module(self.device)

    def synchronize(self) -> None:
        """Wait for all that was queued."""
        if not self.on_cpu:
            self.module.synchronize()

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        """A stream other than the current one, which waits for what that holds."""
        if self.on_cpu:
            return contextlib.nullcontext()
        return self._side_stream()

    @contextlib.contextmanager
    def _side_stream(self) -> Iterator[None]:
        module = self.module
        side = module.Stream()
        side.wait_stream(module.current_stream())
        with module.stream(side):
            yield
        module.current_stream().wait_stream(side)

    def free(self) -> None:
        """Give cached memory back."""
        import gc

        gc.collect()
        empty = None if self.on_cpu else getattr(self.module, "empty_cache", None)
        if empty is not None:
            empty()


def place_of(content: Mapping[str, Any]) -> Place:
    """The place that `dataclasses.asdict` wrote."""
    return Place(**content)


# ---------------------------------------------------------------- clocks


def turns(
    place: Place,
    contenders: Mapping[str, Callable[[], object]],
    seconds: float,
    most: int = 60,
    least: int = 5,
) -> dict[str, Figures]:
    """Call contenders in turns for about so many seconds; figures of each.

    p50, p10: seconds of the whole call, until the device is done. device_p50: seconds
    that the device took, by its own events, with what it waited for the host between
    them; None where there are no such events. host_p50: until the call returned.
    """
    names = list(contenders)
    for call in contenders.values():
        call()
    taken: dict[str, list[tuple[float, float | None, float]]] = {n: [] for n in names}
    end = time.monotonic() + seconds
    for turn in range(most):
        if turn >= least and time.monotonic() > end:
            break
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            taken[name].append(_timed(place, contenders[name]))
    return {name: _figures(rounds) for name, rounds in taken.items()}


def _timed(
    place: Place, call: Callable[[], object]
) -> tuple[float, float | None, float]:
    """Seconds of the whole call, of the device, and until it returned."""
    events = _events(place)
    place.synchronize()
    begin = time.perf_counter()
    if events:
        events[0].record()
    call()
    if events:
        events[1].record()
    returned = time.perf_counter()
    place.synchronize()
    done = time.perf_counter()
    device = events[0].elapsed_time(events[1]) / 1e3 if events else None
    return done - begin, device, returned - begin


def _events(place: Place) -> list[Any]:
    """Two events with a clock, where the device has them."""
    if place.name != "cuda":
        return []
    return [place.module.Event(enable_timing=True) for _ in range(2)]


def _figures(rounds: list[tuple[float, float | None, float]]) -> Figures:
    whole = sorted(r[0] for r in rounds)
    device = [r[1] for r in rounds if r[1] is not None]
    return {
        "p50": statistics.median(whole),
        "p10": whole[int(0.1 * (len(whole) - 1))],
        "device_p50": statistics.median(device) if device else None,
        "host_p50": statistics.median(r[2] for r in rounds),
        "rounds": len(rounds),
    }


def queued(place: Place, call: Callable[[], object], calls: int) -> float:
    """Seconds of the host for each of so many calls, none of which is waited for."""
    place.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    taken = time.perf_counter() - begin
    place.synchronize()
    return taken / calls

"""`torch.sim`: the simulated accelerator in the shape of torch.cuda."""

from __future__ import annotations

import contextlib
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import build

NAME = "sim"
DEVICES = 2


class Counters(types.SimpleNamespace):
    """What was done since the last `reset_counters`; `ops`: fallback ops by name."""

    def __sub__(self, other: Counters) -> Counters:
        """What was done since `other` was read."""
        return Counters(
            **{k: v - getattr(other, k) for k, v in vars(self).items() if k != "ops"},
            ops={
                k: n - other.ops.get(k, 0)
                for k, n in self.ops.items()
                if n != other.ops.get(k, 0)
            },
        )


class Event(torch.Event):
    """As torch.cuda.Event."""

    def __new__(cls, enable_timing: bool = False, **_: Any) -> Event:
        return super().__new__(cls, NAME, enable_timing=enable_timing)


class Stream(torch.Stream):
    """As torch.cuda.Stream: a new one, on the current device unless told otherwise."""

    def __new__(cls, device: Any = None, priority: int = 0) -> Stream:
        return super().__new__(cls, device=_device(device), priority=priority)


def _device(x: Any = None) -> torch.device:
    """A device with its index."""
    if isinstance(x, int):
        return torch.device(NAME, x)
    found = torch.device(NAME if x is None else x)
    return torch.device(NAME, current_device()) if found.index is None else found


def is_available() -> bool:
    """Is the simulator switched on?"""
    return bool(_C().available())


def is_initialized() -> bool:
    """It always is."""
    return True


def device_count() -> int:
    """How many devices there are."""
    return DEVICES if is_available() else 0


def current_device() -> int:
    """The index of this thread's device."""
    return int(_C().current_device())


def set_device(x: Any) -> None:
    """Make a device this thread's."""
    _C().set_device(_device(x).index)


class device(contextlib.ContextDecorator):
    """As torch.cuda.device."""

    def __init__(self, x: Any) -> None:
        self.index = _device(x).index

    def __enter__(self) -> None:
        self.before = current_device()
        set_device(self.index)

    def __exit__(self, *_: object) -> None:
        set_device(self.before)


def current_stream(x: Any = None) -> torch.Stream:
    """This thread's stream on a device."""
    return torch.accelerator.current_stream(_device(x))


def default_stream(x: Any = None) -> torch.Stream:
    """The stream that a thread begins with."""
    place = _device(x)
    kind = torch.empty(0, device=place).device
    return torch.Stream(stream_id=0, device_index=kind.index, device_type=_kind())


def _kind() -> int:
    return int(torch.Stream(NAME).device_type)


def set_stream(stream: torch.Stream) -> None:
    """Make a stream this thread's, on its device."""
    index = current_device()
    torch.accelerator.set_stream(stream)
    set_device(index)


@contextlib.contextmanager
def stream(wanted: torch.Stream | None) -> Iterator[None]:
    """Make a stream this thread's for a while, and its device too."""
    if wanted is None:
        yield
        return
    before = current_stream(wanted.device)
    index = current_device()
    torch.accelerator.set_stream(wanted)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        set_device(index)


def synchronize(x: Any = None) -> None:
    """Wait for all work of a device."""
    torch.accelerator.synchronize(_device(x))


def is_current_stream_capturing() -> bool:
    """Is this thread's stream on its device capturing a graph?"""
    return bool(_C().is_current_stream_capturing())


def graph_pool_handle() -> tuple[int, int]:
    """A name for memory that several graphs share."""
    found: tuple[int, int] = _C().new_pool()
    return found


class Graph:
    """As torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._graph = _C().Graph()

    def capture_begin(
        self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global"
    ) -> None:
        """From here on the current stream records. It must not be the default one."""
        self._graph.begin(pool, capture_error_mode)

    def capture_end(self) -> None:
        """The recording ends; raises if anything in it was not allowed."""
        if self._graph.end():
            warnings.warn(
                "The sim graph is empty. This usually means that the graph was "
                "attempted to be captured on wrong device or stream.",
                stacklevel=2,
            )

    def replay(self) -> None:
        """Queue what was recorded, on the current stream."""
        self._graph.replay()

    def reset(self) -> None:
        """Forget what was recorded."""
        self._graph.reset()

    def pool(self) -> tuple[int, int]:
        """The name of the memory that the graph allocated from."""
        found: tuple[int, int] = self._graph.pool()
        return found

    def pool_bytes(self) -> int:
        """How many bytes the pool has asked for. (torch.cuda.CUDAGraph lacks this.)"""
        return int(self._graph.pool_bytes())


CUDAGraph = Graph


@contextlib.contextmanager
def graph(
    made: Graph,
    pool: tuple[int, int] | None = None,
    stream: torch.Stream | None = None,
    capture_error_mode: str = "global",
) -> Iterator[None]:
    """As torch.cuda.graph: capture what runs within, on a stream of its own."""
    own = Stream() if stream is None else stream
    synchronize()
    with _stream(own):
        made.capture_begin(pool, capture_error_mode=capture_error_mode)
        try:
            yield
        except BaseException:
            # the error of the body tells more than that of the capture it broke
            with contextlib.suppress(RuntimeError):
                made._graph.end()
            raise
        made.capture_end()


_stream = stream


# ------------------------------------------------- what torch.cuda does not have


def enqueue(launch: Callable[[], Any]) -> None:
    """Queue a kernel, a Python function without arguments, on the current stream.

    It runs when somebody waits for it. Within it, tensors of "sim" may be used at once.
    In a capture it is recorded, and runs at each replay.
    """
    _C().enqueue(launch)


def host_view(t: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of `t`, as it is now: waits for nothing."""
    found: torch.Tensor = _C().host_view(t.detach())
    return found


def pending() -> int:
    """How many queued things wait to be carried out, on all streams."""
    return int(_C().pending())


def counters() -> Counters:
    """What was done so far."""
    return Counters(**_C().counters())


def reset_counters() -> None:
    """Count from nothing again."""
    _C().reset_counters()


@contextlib.contextmanager
def counting() -> Iterator[Counters]:
    """Counters that hold, after the block, what was done in it."""
    before = counters()
    found = Counters()
    try:
        yield found
    finally:
        vars(found).update(vars(counters() - before))


def fail_allocation(n: int = 1) -> None:
    """The n-th allocation from now on is out of memory; 0: none is."""
    _C().fail_allocation(n)


def fail_launch(n: int = 1) -> None:
    """The n-th launch from now on is refused; 0: none is."""
    _C().fail_launch(n)


def memory() -> list[tuple[int, int]]:
    """Where memory is that kernels may use: address, bytes."""
    found: list[tuple[int, int]] = _C().memory()
    return found


def memory_allocated(x: Any = None) -> int:
    """Bytes in use by tensors, on a device."""
    return int(_C().memory_allocated(_device(x).index))


def reset() -> None:
    """Drop all queued work, captures and faults to come."""
    _C().reset()


def set_available(on: bool) -> None:
    """Whether torch.accelerator sees the device."""
    _C().set_available(on)


# ------------------------------------------------------------- what torch asks for


def _is_in_bad_fork() -> bool:
    return False


def manual_seed_all(seed: int) -> None:
    """Random numbers come from the CPU's generator."""


manual_seed = manual_seed_all


def get_rng_state(x: Any = None) -> torch.Tensor:
    """The state of the CPU's generator, which ops of this device draw from."""
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, x: Any = None) -> None:
    """See get_rng_state."""
    torch.set_rng_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """For autocast."""
    return [torch.float16, torch.bfloat16]


_loaded: list[Any] = []


def _C() -> Any:
    if not _loaded:
        raise RuntimeError("call tests.simulated.load() first")
    return _loaded[0]


def load() -> types.ModuleType:
    """Build and register the device, once in a process; returns torch.sim."""
    import sys

    own = sys.modules[__name__]
    if not _loaded:
        _loaded.append(build.load())
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, own)
        torch.utils.generate_methods_for_privateuse1_backend(
            for_storage=False, for_packed_sequence=False
        )
    return own

"""In: an optimizer and parameters. Out: who steps them, each ready to be called.

Every contender steps the same parameters, gradients and state, in the same memory, so
that none has better addresses than another and large models fit. One that cannot run
raises Unavailable, and the reason goes into the results under its name: nobody is left
out silently.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.optim import Optimizer

from bench import peers
from bench.counting import count_compiled
from bench.environment import version
from bench.optimizers import Recipe
from bench.peers import Unavailable
from bench.results import Figures

#: calls before any is timed; an optimizer that counts its steps in Python compiles
#: again in the second
WARM_UP = 3
#: bytes that a copy moves for each that it copies: on a CPU it reads a line, reads the
#: line that it will write, and writes it
COPY_MOVES = {"cpu": 3, "cuda": 2, "sim": 2}
#: a copy of more than this is as fast for each byte
COPY_BYTES = 2**29


@dataclass
class Work:
    """An optimizer to step over parameters that all contenders share.

    cap: seconds that a compiled contender may take until it has done its first step.
    caches: folder of Inductor's caches, kept; None: it compiles from empty ones.
    """

    recipe: Recipe
    params: list[Tensor]
    device: str = "cpu"
    cap: float = 120.0
    options: dict[str, Any] = field(default_factory=dict)
    caches: Path | None = None
    _memory: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def elements(self) -> int:
        """Elements of all parameters."""
        return sum(p.numel() for p in self.params)

    @property
    def least_bytes(self) -> int:
        """Bytes that one step cannot do without."""
        size = self.params[0].element_size()
        return self.elements * self.recipe.accesses * size

    def optimizer(self, **flags: bool) -> Optimizer:
        """Return an optimizer that has made its state: that of all others' memory."""
        made = self.recipe.make(self.params, **flags)
        made.step()
        for i, p in enumerate(self.params):
            kept = self._memory.setdefault(i, {})
            for key, value in made.state[p].items():
                if isinstance(value, Tensor) and value.dim():
                    made.state[p][key] = kept.setdefault(key, value)
        return made


@dataclass
class Ready:
    """A contender that has done its first steps. `figures`: what these cost.

    owner: what `call` needs and does not keep alive itself.
    """

    call: Callable[[], object]
    figures: Figures = field(default_factory=dict)
    owner: object = None


@dataclass(frozen=True)
class Contender:
    """`make` gives a Ready, or raises Unavailable. `devices` on which it can run; "sim"
    is the simulated accelerator, where `bench.gpu` is rehearsed.
    """

    name: str
    what: str
    make: Callable[[Work], Ready]
    devices: tuple[str, ...] = ("cpu", "cuda", "sim")


# ---------------------------------------------------------------- torch's own


def for_loop(work: Work) -> Ready:
    """Eager, a tensor at a time."""
    flags = {} if work.recipe.ours else {"foreach": False}
    return Ready(work.optimizer(**flags).step)


def foreach(work: Work) -> Ready:
    """Eager, lists of tensors."""
    if work.recipe.ours:
        raise Unavailable(f"{work.recipe.name} is a for-loop; it has no foreach form")
    return Ready(work.optimizer(foreach=True).step)


def fused(work: Work) -> Ready:
    """torch's kernel written by hand."""
    if work.recipe.ours:
        raise Unavailable(f"torch has no fused {work.recipe.name}")
    return Ready(work.optimizer(fused=True).step)


# ---------------------------------------------------------------- compiled


def inductor(work: Work, **how: Any) -> Ready:
    """torch.compile as it comes, from a cold cache unless told otherwise."""
    from torch._inductor import metrics

    metrics.reset()
    with kept_caches(work.caches) if work.caches else cold_caches():
        optimizer = _listed(work)
        ready = _first_calls(torch.compile(optimizer.step, **how), work.cap)
    if work.caches:  # then neither is a figure of compiling, and no kernel is counted
        for name in ("first_step_seconds", "settled_seconds"):
            del ready.figures[name]
        ready.figures["cached"] = True
    else:
        ready.figures["launches"] = metrics.generated_kernel_count
    return ready


@contextlib.contextmanager
def cold_caches() -> Iterator[None]:
    """Give Inductor and Triton empty caches."""
    from torch._inductor.utils import fresh_cache

    # a folder of our own: torch keeps its one where the time is up
    with tempfile.TemporaryDirectory() as folder, fresh_cache(dir=folder):
        yield


@contextlib.contextmanager
def kept_caches(folder: Path) -> Iterator[None]:
    """Give Inductor caches that an earlier run may have filled."""
    from torch._inductor.utils import clear_caches

    clear_caches()
    named = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder.absolute()),
        "TRITON_CACHE_DIR": str(folder.absolute() / "triton"),
    }
    with mock.patch.dict(os.environ, named):
        yield
    clear_caches()


def inductor_graphs(work: Work) -> Ready:
    """The same inside CUDA graphs."""
    return inductor(work, mode="reduce-overhead")


def fuseopt_compiled(work: Work) -> Ready:
    """fuseopt.compile, from a cold cache."""
    import fuseopt
    from fuseopt.compiler.session import session
    from fuseopt.runtime.cpp.build import Builder

    session.builder = Builder()  # kernels it has in memory would be no cold start
    before = len(fuseopt.reports())
    with tempfile.TemporaryDirectory() as folder:
        options = {"cache_dir": folder, **work.options}
        optimizer = fuseopt.compile(_listed(work), **options)
        ready = _first_calls(optimizer.step, work.cap)
    figures = count_compiled(fuseopt.reports()[before:], ready.figures["graph_breaks"])
    figures["dynamo_seconds"] = (
        ready.figures["settled_seconds"] - figures["backend_seconds"]
    )
    ready.figures |= figures
    ready.owner = optimizer
    return ready


def _listed(work: Work) -> Optimizer:
    """The form that compilers take best: lists, where the optimizer has it."""
    return work.optimizer(**({} if work.recipe.ours else {"foreach": True}))


def _first_calls(step: Callable[[], object], cap: float) -> Ready:
    """Call a compiled step until it is warm; Unavailable where it takes too long.

    first_step_seconds: of the first call. settled_seconds: of all calls until no more
    is compiled, less what as many warm ones take.
    """
    breaks = _graph_breaks()
    taken = []
    with at_most(cap):
        for _ in range(1 + WARM_UP):
            begin = time.perf_counter()
            step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - begin)
    return Ready(
        step,
        {
            "first_step_seconds": taken[0],
            "settled_seconds": sum(taken) - len(taken) * taken[-1],
            "graph_breaks": _graph_breaks() - breaks,
        },
    )


def _graph_breaks() -> int:
    return sum(torch._dynamo.utils.counters["graph_break"].values())


class TimeUp(BaseException):
    """Not an Exception, so that no compiler takes it for a failure of its own."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise Unavailable where the block runs for longer. In the main thread only."""

    def ring(*_: object) -> None:
        raise TimeUp

    handler = signal.signal(signal.SIGALRM, ring)
    other, begin = signal.setitimer(signal.ITIMER_REAL, seconds), time.monotonic()
    try:
        yield
    except TimeUp:
        torch._dynamo.reset()
        raise Unavailable(f"not finished in {seconds:g} s") from None
    finally:
        signal.signal(signal.SIGALRM, handler)
        left = max(0.001, other[0] - (time.monotonic() - begin)) if other[0] else 0.0
        signal.setitimer(signal.ITIMER_REAL, left, other[1])


# ---------------------------------------------------------------- others


def peer(name: str) -> Callable[[Work], Ready]:
    """Return the `make` of an optional package's optimizer."""

    def make(work: Work) -> Ready:
        step = peers.PEERS[name](work.recipe.name, work.params, work.device)
        kept = kept_caches(work.caches) if work.caches else contextlib.nullcontext()
        with kept, at_most(work.cap):  # some are compiled by Inductor
            for _ in range(WARM_UP):
                step()
        return Ready(step, {"version": version(name)})

    return make


def copy(work: Work) -> Ready:
    """A copy that moves as many bytes as the step must."""
    return copied(work.least_bytes, work.device)


def copied(nbytes: int, device: str = "cpu") -> Ready:
    """A copy that moves so many bytes, or as many as tell of more. Its memory is taken
    at the first call.
    """
    moves = COPY_MOVES[device.split(":")[0]]
    count = max(min(nbytes // moves, COPY_BYTES) // 4, 1)
    memory: list[Tensor] = []

    def call() -> None:
        if not memory:
            memory.extend((torch.ones(count, device=device),
                           torch.zeros(count, device=device)))  # fmt: skip
        memory[1].copy_(memory[0])

    return Ready(call, {"bytes": 4 * count * moves})


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("for-loop", "eager, a tensor at a time", for_loop),
        Contender("foreach", "eager, lists of tensors", foreach),
        Contender("fused", "torch's kernel by hand, fused=True", fused),
        Contender("inductor", "torch.compile as it comes", inductor),
        Contender("inductor-graphs", "in CUDA graphs", inductor_graphs, ("cuda",)),
        Contender("fuseopt", "fuseopt.compile", fuseopt_compiled),
        *(Contender(name, "an optional package", peer(name)) for name in peers.PEERS),
        Contender("copy", "a copy of as many bytes", copy),
    )
}


def ready(name: str, work: Work) -> Ready:
    """Make one contender ready. Raises Unavailable with the reason."""
    contender = CONTENDERS[name]
    kind = work.device.split(":")[0]
    if kind not in contender.devices:
        raise Unavailable(f"not on {kind}")
    try:
        made = contender.make(work)
        made.call()
    except Unavailable:
        raise
    except Exception as error:
        # one that fails says so in the results, and does not end the others' run
        raise Unavailable(f"{type(error).__name__}: {_first_line(error)}") from error
    return made


def _first_line(error: Exception) -> str:
    return (str(error).strip().split("\n") or [""])[0][:200]

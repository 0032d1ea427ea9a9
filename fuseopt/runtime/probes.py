"""Compare the rows of a batched product with single calls, and keep the answers.

A product of matrices is sums in some order. BLAS chooses the order by shapes, layouts,
alignment, scales and threads, never by the contents of the matrices. So two calls that
agree on enough numbers that separate orders agree on all numbers; see
`docs/numerics.md` for the basis of this. A trial runs both on such numbers, for all
rows of a batch. `Probes` keeps the answer in the cache, under all that it depends on.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import math
import os
import random
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ..capture.aten.autocast import Autocast, WithinAutocast
from ..capture.aten.dtypes import NAMED_DTYPES
from ..ir.graph import DTYPE_BYTES
from ..ir.products import DENSE, MERGED, PADDED, TIMES, Layout, Trial
from ..locks import new_lock
from . import fills
from .chains import ORDER, Chains, batched_in_chain, of_two_rows, orders
from .cpp.toolchain import processor
from .devices import is_capturing, is_remote, module_of, on
from .folders import Folder, chosen
from .matrix_calls import batched, product_call
from .matrix_rows import Fill, Numbers, filled, padded_tensor, rows_of, same_bits
from .matrix_trials import rows_agree

#: Ending of files of answers; the folder's name has two letters, as that of kernels.
ENDING = ".product"
#: Numbers for scales of kind "any", one pair for each round.
SCALES = ((3.4445, -4.775), (-4.775, 2.0315), (0.7, 1.3), (-0.3, 17.25))
#: Rounds of numbers that cancel, which separate the orders of sums.
CANCELLING = 4
#: Least number of compared results; small products have more rounds for it. Two
#: roundings that rarely differ need many numbers.
COMPARED = 4096
#: Part of the name of an answer; it changes where a probe compares more.
KIND = "5"
#: Number of NaN behind the operands of a batched call.
BEHIND = 64
#: Prefixes of environment variables that the libraries of products read.
VARIABLES = (
    *("MKL_", "DNNL_", "ONEDNN_", "OMP_", "KMP_", "GOMP_", "ATEN_", "TORCH_MKL"),
    *("TORCH_BLAS", "TORCH_ALLOW_TF32", "CUBLAS", "NVIDIA_TF32", "HIPBLAS", "ROCBLAS"),
)
_ONE, _LEAST = 1.0, 5e-324
#: Elements for which eager's loops take one more thread, and the bits of a denormal.
_GRAIN, _BITS = 32768, 1 << 16
MKLDNN = torch.backends.mkldnn
#: Settings in `torch.backends.cuda.matmul` for products.
OF_DEVICES = (
    "fp32_precision",
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)
#: Properties of a device that libraries read, and the packages of those libraries.
PROPERTIES = ("name", "major", "minor", "multi_processor_count", "driver_version")
LIBRARIES = ("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cublas-cu13", "triton")


def _variables() -> list[tuple[str, str]]:
    """Return the variables of libraries, as the environment has them now."""
    return sorted((k, v) for k, v in os.environ.items() if k.startswith(VARIABLES))


#: The same before a step changed them: a library may have read them earlier.
AT_FIRST = _variables()


class Circumstances(NamedTuple):
    """Settings that may change within a process, and with them the bits of a product.

    `threads` is the number of threads of products. `flushes` is true if denormals are
    flushed to zero; `workers` has that for each thread of products, which may differ.
    `settings` are torch's for products, those of devices among them.
    """

    threads: int
    flushes: bool
    workers: tuple[bool, ...]
    settings: tuple[Any, ...]


def circumstances() -> Circumstances:
    """Return the present circumstances in this thread."""
    threads, flushes = torch.get_num_threads(), _LEAST * _ONE == 0.0
    return Circumstances(
        threads,
        flushes,
        _workers.flush(threads, flushes),
        (
            MKLDNN.enabled,
            MKLDNN.deterministic,
            getattr(getattr(MKLDNN, "matmul", None), "fp32_precision", ""),
            torch.are_deterministic_algorithms_enabled(),
            *(_of_devices() if torch.accelerator.is_available() else ()),
        ),
    )


class _Workers(threading.local):
    """Record of whether the threads that this thread starts flush denormals.

    They keep what this thread did when they began. So it is read once for each number
    of threads, and each way of this thread.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, bool], tuple[bool, ...]] = {}

    def flush(self, threads: int, flushes: bool) -> tuple[bool, ...]:
        """Return whether each thread flushes denormals; nothing for one thread."""
        if threads == 1:
            return ()
        key = threads, flushes
        if key not in self._known:
            size = (threads * _GRAIN,)
            bits = torch.full(size, _BITS, dtype=torch.int32, device="cpu")
            bits.view(torch.float32).mul_(_ONE)
            self._known[key] = tuple(x == 0 for x in bits[::_GRAIN].tolist())
        return self._known[key]


_workers = _Workers()


def _of_devices() -> tuple[Any, ...]:
    """Return the settings that choose the products of accelerators."""
    cuda = torch.backends.cuda
    return (
        *(getattr(cuda.matmul, name, None) for name in OF_DEVICES),
        str(cuda.preferred_blas_library()),
    )


class Probes:
    """Answers of this process, by trial, circumstances and folder of the cache.

    `tried` counts the trials that ran, since the cache lacked them.
    """

    def __init__(self) -> None:
        self._lock = new_lock()
        self._known: dict[tuple[Any, ...], str] = {}
        self.tried = 0

    def way(self, trial: Trial, cache_dir: str | None) -> str | None:
        """Return DENSE, PADDED, or "" where neither call has the bits of single calls.

        Return None where a device captures a graph, is missing or has no memory left; a
        later call may find an answer.
        """
        return self._answer(trial, cache_dir, None)

    def order(self, trial: Trial, cache_dir: str | None, chains: Chains) -> str | None:
        """Return the order of sums that gives a chain the bits of single calls.

        Return "" if none of the known orders does, and None without memory.
        """
        return self._answer(of_two_rows(trial), cache_dir, chains)

    def _answer(
        self, trial: Trial, cache_dir: str | None, chains: Chains | None
    ) -> str | None:
        now = circumstances()
        key = (trial, now, cache_dir, chains and chains.key)
        with self._lock:
            if key not in self._known:
                name = _name(trial, now, chains)
                found = _kept(cache_dir, name)
                if found is None:
                    found = self._found(trial, chains)
                    if found is None:
                        return None
                    _keep(cache_dir, name, found)
                self._known[key] = found
            return self._known[key]

    def _found(self, trial: Trial, chains: Chains | None) -> str | None:
        """Run a trial and return its answer; None where it cannot run."""
        device = torch.device(trial.device)
        if is_remote(device) and (not _is_there(device) or is_capturing(device)):
            return None
        try:
            # a call of the caller's under autocast may be the first to need an answer
            with on(device):
                tried = WithinAutocast(_tried, Autocast((device.type,), ()))
                found: str = tried(trial, chains)
        except (torch.OutOfMemoryError, MemoryError):
            return None
        self.tried += 1
        return found


def _is_there(device: torch.device) -> bool:
    """Can work be sent to a device?"""
    module = module_of(device)
    return bool(module.is_available()) and (device.index or 0) < module.device_count()


def _of_device(device: str) -> tuple[str, ...]:
    """Return the properties of a device that answers depend on, besides settings."""
    place = torch.device(device)
    if not is_remote(place):
        return ()
    describe = getattr(module_of(place), "get_device_properties", None)
    versions: list[str] = []
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    if describe is None:
        return tuple(versions)
    properties = describe(place)
    return (*(f"{k} {getattr(properties, k, None)}" for k in PROPERTIES), *versions)


def _name(trial: Trial, now: Circumstances, chains: Chains | None = None) -> str:
    """Return the name of an answer: a hash of all that it depends on."""
    parts = (
        *(KIND, trial, tuple(now), _variables(), AT_FIRST, processor(), os.cpu_count()),
        *(torch.__version__, torch.__config__.show()),
        *_of_device(trial.device),
        *(() if chains is None else (chains.key,)),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _kept(cache_dir: str | None, name: str) -> str | None:
    """Return the answer in the cache; None if it is missing or untrusted."""
    try:
        with Folder.open(chosen(cache_dir)) as root, root.enter(name[:2]) as place:
            said = place.read(f"{name}{ENDING}").decode()
    except (OSError, UnicodeDecodeError):
        return None
    answer, _, again = said.rpartition(" ")
    known = answer in ("", DENSE, PADDED) or re.fullmatch(ORDER, answer)
    return answer if known and again == name else None


def _keep(cache_dir: str | None, name: str, answer: str) -> None:
    """Write an answer to the cache, if that is possible."""
    temporary = f"{name}.{os.getpid()}{ENDING}"
    try:
        with (
            Folder.open(chosen(cache_dir), make=True) as root,
            root.enter(name[:2], make=True) as place,
        ):
            place.write(temporary, f"{answer} {name}".encode())
            place.move(temporary, place, f"{name}{ENDING}")
    except OSError:
        return


# ---------------------------------------------------------------- one trial


def _tried(trial: Trial, chains: Chains | None) -> str:
    """Run single calls and batched ones on the same numbers."""
    remote = is_remote(torch.device(trial.device))
    if trial.op not in TIMES:
        return DENSE if rows_agree(trial) else ""
    ways: list[str] = [DENSE] if trial.op in MERGED or remote else [DENSE, PADDED]
    calls: dict[str, Callable[..., None]] = dict.fromkeys(
        ways, functools.partial(batched, trial.op)
    )
    if chains is not None:
        chain = functools.partial(batched_in_chain, chains, op=trial.op)
        calls = {x: functools.partial(chain, order=x) for x in orders(trial)}
    with torch.no_grad():
        for answer, call in calls.items():
            made = functools.partial(_agree, trial, answer, call)
            if all(made(turn, *x) for turn, x in enumerate(_rounds(trial))):
                return answer
    return ""


def _rounds(trial: Trial) -> Iterator[tuple[Fill, tuple[float, ...]]]:
    """Yield numbers for operands, and scales."""
    numbers = Numbers(max(math.prod(shape) for shape, _, _ in trial.layouts))
    inner = trial.layouts[-2][0][-1]
    operands = len(trial.layouts)
    first = [fills.cancelling(numbers, inner, operands) for _ in range(CANCELLING)]
    # the signs of zeros reject what one round of others does not
    first[1:1] = [fills.vanishing(numbers, operands, turn) for turn in (0, 1)]
    first += [fills.normal(numbers), fills.denormal(numbers), fills.special(numbers)]
    first += [fills.overflowing(numbers)]
    first += [fills.every_other(numbers, odd) for odd in (0, 1)]
    size = trial.rows * math.prod(trial.results[0].shape)
    more = -(-COMPARED // max(1, size)) - len(first)
    drawn = random.Random(35)
    for number, fill in enumerate([*first, *[None] * more]):
        pair = iter(SCALES[number % len(SCALES)])
        if fill is None:
            fill = fills.normal(numbers)
            if number % 2:
                fill = fills.cancelling(numbers, inner, operands)
            pair = iter((drawn.uniform(-4, 4), drawn.uniform(-4, 4)))
        scales = [next(pair) if s == "any" else float(s) for s in trial.scales]
        yield fill, tuple(scales)


def _agree(
    trial: Trial,
    way: str,
    batched_call: Callable[..., None],
    turn: int,
    fill: Fill,
    scales: tuple[float, ...],
) -> bool:
    """Have all rows of one batched call the bits of their single calls?

    `batched_call`: operands, result, scales. Operands of the caller begin at another
    element in each `turn` and row.
    """
    dtype, n = NAMED_DTYPES[trial.dtype], trial.rows
    singles: list[list[torch.Tensor]] = [[] for _ in range(n)]
    stacked: list[torch.Tensor] = []
    for k, (layout, place) in enumerate(zip(trial.layouts, trial.stacked, strict=True)):
        whole = padded_tensor(place, dtype, trial.device, BEHIND)
        shared = place[1][0] == 0 and place[0][0] > 1
        once: torch.Tensor | None = None
        for row in range(n):
            single = once if shared else None
            if single is None:
                moved = _moved(trial, layout, k, turn * n + row)
                single = once = padded_tensor(moved, dtype, trial.device)
            if row == 0 or not shared:
                filled(single, fill, k, -1 if shared else row)
                rows_of(whole, n, single.dim())[row].copy_(single)
            singles[row].append(single)
        stacked.append(whole)
    out = _out(trial, way, dtype)
    batched_call(stacked, out, scales)
    rows = rows_of(out, n, len(trial.results[0].shape))
    call = product_call(trial.op)
    keywords = dict(zip(("beta", "alpha"), scales, strict=False))
    return all(
        same_bits(call(*operands, **keywords), rows[row])
        for row, operands in enumerate(singles)
    )


def _moved(trial: Trial, layout: Layout, k: int, turn: int) -> Layout:
    """Return the layout of an operand that begins elsewhere, if the caller has it."""
    if k not in trial.anywhere:
        return layout
    shape, stride, offset = layout
    return shape, stride, offset + turn * (2 * k + 1) % (64 // DTYPE_BYTES[trial.dtype])


def _out(trial: Trial, way: str, dtype: torch.dtype) -> torch.Tensor:
    """Return memory for the result, laid out as in a stack."""
    shape = trial.results[0].shape
    whole = (trial.rows * (shape[0] if len(shape) == 3 else 1), *shape[-2:])
    step = shape[-2] * shape[-1]
    if way == PADDED:
        size = dtype.itemsize
        step = (step * size // 64 + 2) * 64 // size
    return padded_tensor((whole, (step, shape[-1], 1), 0), dtype, trial.device)

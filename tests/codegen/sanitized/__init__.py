"""Kernels built with a sanitizer, and launches of theirs that were recorded, run again.

`record` keeps what launches of a compiled step were given: tables, and each tensor's
memory before and after. `build` makes a program of a kernel's text, a driver and an
OpenMP runtime of its own; `replay` runs recorded launches in it. In that program each
tensor is an allocation of its own, so that a byte beside it is noticed, and no code
takes part that the sanitizer does not see: neither Python nor a runtime whose locks it
would not know.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import struct
import subprocess
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from fuseopt.compat import LibraryStruct
from fuseopt.compiler import pipeline
from fuseopt.ir.graph import DTYPE_BYTES, Kernel
from fuseopt.runtime import run_tables
from fuseopt.runtime.cpp.table import CppTable, TensorLayout
from fuseopt.runtime.cpp.toolchain import COMMON_FLAGS, EXACT_FLAGS, find_compiler

HERE = Path(__file__).parent
#: Numbers of threads with which every launch is recorded.
THREADS = (1, 2, 3, 5)
SANITIZERS = {
    "memory": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "threads": ("-fsanitize=thread",),
}
#: What sanitizers begin a report with.
REPORTS = ("ERROR: AddressSanitizer", "runtime error:", "WARNING: ThreadSanitizer")
#: Vector functions of a library: none, in as many places as a kernel may ask for.
_NONE = (ctypes.c_int64 * 64)()


@dataclass
class Launch:
    """One launch of a kernel: its text, and what the driver reads."""

    text: str
    words: bytes = b""
    regions: list[tuple[int, int]] = field(default_factory=list)


def _extent(layout: TensorLayout, size: int) -> int:
    """Bytes from a tensor's first element to behind its last."""
    if 0 in layout.shape:
        return 0
    steps = zip(layout.shape, layout.stride, strict=True)
    return (1 + sum((n - 1) * stride for n, stride in steps)) * size


def _regions(
    kernel: Kernel,
    pool: array[int],
    position: Mapping[int, int],
    layouts: Mapping[int, TensorLayout],
) -> list[tuple[int, int]]:
    """The memory that a kernel may touch: starts and ends, what overlaps joined."""
    found = []
    for variant in kernel.every:
        for slot, column in zip(variant.slots, variant.columns, strict=True):
            for b in column:
                start = pool[position[b]]
                size = _extent(layouts[b], DTYPE_BYTES[slot.dtype])
                found.append((start, start + size))
    joined: list[tuple[int, int]] = []
    for start, end in sorted(set(found)):
        if joined and start < joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        elif end > start:
            joined.append((start, end))
    return joined


def _memory(regions: Sequence[tuple[int, int]]) -> list[bytes]:
    return [ctypes.string_at(start, end - start) for start, end in regions]


def _recorded(table: CppTable, launch: Launch, pool: array[int], threads: int) -> None:
    """Launch a table with each number of threads, and at last as it was asked to."""
    theirs = LibraryStruct.from_address(table.structs[0].library)
    own = LibraryStruct(0, 0, theirs.newton, ctypes.addressof(_NONE), theirs.vector)
    known = [s.library for s in table.structs]
    before = _memory(launch.regions)
    values = [list(t.values) for t in table.tables]

    def back() -> None:
        for (start, _), content in zip(launch.regions, before, strict=True):
            ctypes.memmove(start, content, len(content))

    after = []
    for s in table.structs:
        s.library = ctypes.addressof(own)
    for count in THREADS:
        table.prepare(count)
        table.entry(table.structs, count)
        after.append(_memory(launch.regions))
        back()
    for s, address in zip(table.structs, known, strict=True):
        s.library = address
    words = struct.pack("<3q", len(launch.regions), own.newton, own.vector)
    for k, content in enumerate(before):
        words += struct.pack("<q", len(content)) + content
        words += b"".join(x[k] for x in after)
    places = []
    for address in pool:
        inside = [
            (k, address - start)
            for k, (start, end) in enumerate(launch.regions)
            if start <= address < end
        ]
        places += inside[0] if inside else (-1, 0)
    words += struct.pack("<q", len(pool)) + struct.pack(f"<{len(places)}q", *places)
    words += struct.pack("<q", len(table.tables))
    for t, folds, s, held in zip(
        table.tables, table.folds, table.structs, values, strict=True
    ):
        words += struct.pack("<3q", s.lanes, folds, len(held))
        for column in (t.position, t.rows, t.row, t.start, t.geometry, t.strided):
            content = column.tobytes()
            words += struct.pack("<q", len(content)) + content
    launch.words = words
    table.prepare(threads)
    table.entry(table.structs, threads)


@contextlib.contextmanager
def record() -> Iterator[list[Launch]]:
    """Record every launch on the CPU of what is compiled meanwhile."""
    found: list[Launch] = []
    real = pipeline._cpp_factory

    def factory(source: Any, built: Any) -> Callable[..., Any]:
        inner = real(source, built)

        def make(
            kernel: Kernel,
            pool: array[int],
            position: Mapping[int, int],
            layouts: Mapping[int, TensorLayout],
        ) -> Any:
            table = inner(kernel, pool, position, layouts)

            def launch(threads: int) -> None:
                regions = _regions(kernel, pool, position, layouts)
                made = Launch(source.text, regions=regions)
                _recorded(table, made, pool, threads)
                found.append(made)

            table.launch = launch  # type: ignore[method-assign]
            table.launches = lambda threads: [  # type: ignore[method-assign]
                functools.partial(launch, threads)
            ]
            return table

        return make

    with (
        mock.patch.object(pipeline, "_cpp_factory", factory),
        # no blocks: their launches are not those of kernels
        mock.patch.object(run_tables, "BLOCK", 0),
    ):
        yield found


_numbers = itertools.count()


def build(text: str, kind: str, folder: Path) -> Path:
    """A program that runs recorded launches of a kernel's text, with a sanitizer."""
    folder = folder / f"{kind}{next(_numbers)}"
    folder.mkdir(parents=True)
    (folder / "kernel.cpp").write_text(text)
    left_out = ("-shared", "-O2", "-w")
    flags = [x for x in (*COMMON_FLAGS, *EXACT_FLAGS) if x not in left_out]
    compiler = find_compiler()
    made = folder / "program"
    objects = []
    for source in (folder / "kernel.cpp", HERE / "driver.cpp", HERE / "openmp.cpp"):
        objects.append(str(folder / f"{source.stem}.o"))
        more = ["-O1", "-g", "-w", *SANITIZERS[kind]]
        command = [*compiler.command, *flags, *more, "-c", str(source)]
        subprocess.run([*command, "-o", objects[-1]], check=True)
    link = [*compiler.command, *SANITIZERS[kind], "-o", str(made), *objects]
    subprocess.run([*link, "-lpthread", "-lm"], check=True)
    return made


def replay(program: Path, launches: Sequence[Launch]) -> tuple[int, str]:
    """Run launches of a kernel: how many, and what the sanitizer says.

    Raises where the program ends otherwise than with results or reports.
    """
    done = 0
    said = []
    for number, launch in enumerate(launches):
        data = program.parent / f"launch{number}"
        data.write_bytes(launch.words)
        result = subprocess.run(
            ["setarch", "-R", str(program), str(data), *map(str, THREADS)],
            capture_output=True,
            text=True,
            env={
                "ASAN_OPTIONS": "detect_leaks=0:strict_init_order=1",
                "UBSAN_OPTIONS": "print_stacktrace=1",
                "TSAN_OPTIONS": "halt_on_error=1:exitcode=66",
            },
            timeout=300,
        )
        data.unlink()
        if any(report in result.stderr for report in REPORTS):
            said.append(result.stderr)
        elif result.returncode:
            raise RuntimeError(f"status {result.returncode}: {result.stderr}")
        done += result.stdout.count("right")
    return done, "\n".join(said)

"""Run a kernel of PTX in this process: faults with their line, bytes, sectors.

machine = Machine(ptx)
run = machine.run(programs, addresses, regions, seed=7)
assert not run.faults
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..simulated.build import built, compiler
from .encode import Encoder, Instr
from .text import parsed
from .uses import uses

HERE = Path(__file__).parent
FILES = ("machine.cpp", "arithmetic.h", "memory.h", "order.h", "values.h")
#: No sum is joined with a product unless the kernel says so.
FLAGS = ("-std=c++20", "-O2", "-g0", "-fPIC", "-shared", "-ffp-contract=off")
KINDS = (
    "out of range",
    "misaligned",
    "memory that nothing has written is read",
    "race",
    "a barrier that some threads leave out",
    "a warp's instruction that some threads leave out",
    "a register that nothing has written is read",
    "endless",
)
U32, U64, POINTER = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p


class _Found(ctypes.Structure):
    _fields_ = (
        *((n, U32) for n in ("kind", "instr", "program", "thread", "other", "by")),
        ("address", U64),
    )


class _Region(ctypes.Structure):
    _fields_ = tuple(
        (n, U64)
        for n in ("base", "size", "words", "loaded", "stored", "loads", "stores")
    )


class _Task(ctypes.Structure):
    _fields_ = (
        *((n, POINTER) for n in ("code", "targets", "uses", "first_use")),
        *((n, POINTER) for n in ("initial", "written", "regions")),
        ("seed", U64),
        *((n, U32) for n in ("count", "registers", "tid", "ctaid", "grid", "threads")),
        *((n, U32) for n in ("shared", "together", "region_count")),
    )


class _Result(ctypes.Structure):
    _fields_ = (
        ("found", _Found * 16),
        *((n, U64) for n in ("faults", "instructions", "atomics", "barriers")),
    )


class Region(NamedTuple):
    """Memory that a kernel may use, in bytes. `words`: words of it may be all ones,
    which otherwise is how memory looks that nothing has written.
    """

    base: int
    size: int
    words: bool = False


@dataclass(frozen=True)
class Fault:
    """What is wrong. `line`: of the source. `other`: of a race, the other access."""

    kind: str
    line: str
    other: str
    program: int
    thread: int
    address: int

    def __str__(self) -> str:
        beside = f", beside {self.other}" if self.other else ""
        where = f"thread {self.thread} of program {self.program}, {self.address:#x}"
        return f"{self.kind}: {self.line}{beside} ({where})"


class Traffic(NamedTuple):
    """What a region was used for: bytes that threads loaded and stored, sectors of 32
    bytes that accesses of warps touched (with seed 0; else 0).
    """

    loaded: int
    stored: int
    loads: int
    stores: int


@dataclass(frozen=True)
class Run:
    """A launch. `traffic`: by region, as given. `instructions`: of all threads."""

    faults: tuple[Fault, ...]
    traffic: tuple[Traffic, ...]
    instructions: int
    atomics: int
    barriers: int


@functools.cache
def library() -> ctypes.CDLL:
    """The machine. Raises what the compiler says."""
    text = "\0".join((HERE / name).read_text() for name in FILES)
    found = ctypes.CDLL(str(built("ptx", "fuseopt_ptx", (text, *FLAGS), _build)))
    found.ptx_compute.argtypes = [ctypes.c_char_p]
    found.ptx_compute.restype = ctypes.c_int32
    found.ptx_run.argtypes = [POINTER, POINTER]
    found.ptx_run.restype = None
    return found


def _build(name: str, folder: Path, place: Path) -> None:
    made = folder / f"{name}.{os.getpid()}"
    command = [str(compiler()), *FLAGS, str(HERE / FILES[0]), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the machine for PTX: {done.stderr}")
    os.replace(made, place)


class Machine:
    """A kernel, and what runs it. `shared`: bytes of its shared memory.

    Raises encode.Unknown for instructions that the machine does not have.
    """

    def __init__(self, ptx: str, shared: int = 0) -> None:
        self.text = parsed(ptx)
        self.shared = shared
        self.encoder = Encoder(self.text, library().ptx_compute)
        self._code = (Instr * len(self.encoder.code))(*self.encoder.code)
        self._targets = array("i", self.encoder.targets)
        ends, first = uses(self._code)
        self._uses, self._first_use = array("i", ends), array("i", first)

    def run(
        self,
        programs: int,
        parameters: Sequence[int],
        regions: Sequence[Region],
        seed: int = 0,
        together: int = 8,
    ) -> Run:
        """Launch it once. `parameters`: addresses; those that are left out are null.

        With a seed other than 0, so many programs run `together`, and which thread goes
        on is drawn.
        """
        made = self.encoder
        initial = array("Q", bytes(8 * len(made.registers)))
        written = array("B", bytes(len(made.registers)))
        given = [*parameters, *[0] * (len(made.parameters) - len(parameters))]
        known = {**made.constants, **dict(zip(made.parameters, given, strict=True))}
        for register, value in known.items():
            initial[register], written[register] = value, 15
        written[made.tid] = written[made.ctaid] = 15
        order = sorted(range(len(regions)), key=lambda k: regions[k].base)
        places = (_Region * len(regions))(*(_Region(*regions[k]) for k in order))
        result = _Result()
        task = _Task(
            code=ctypes.addressof(self._code),
            targets=self._targets.buffer_info()[0],
            uses=self._uses.buffer_info()[0],
            first_use=self._first_use.buffer_info()[0],
            initial=initial.buffer_info()[0],
            written=written.buffer_info()[0],
            regions=ctypes.addressof(places),
            seed=seed,
            count=len(self._code),
            registers=len(initial),
            tid=made.tid,
            ctaid=made.ctaid,
            grid=programs,
            threads=self.text.threads,
            shared=self.shared,
            together=together,
            region_count=len(regions),
        )
        library().ptx_run(ctypes.byref(task), ctypes.byref(result))
        traffic: list[Any] = [None] * len(regions)
        for k, r in zip(order, places, strict=True):
            traffic[k] = Traffic(r.loaded, r.stored, r.loads, r.stores)
        found = result.found[: min(result.faults, 16)]
        return Run(
            tuple(map(self._fault, found)),
            tuple(traffic),
            result.instructions,
            result.atomics,
            result.barriers,
        )

    def _fault(self, found: _Found) -> Fault:
        other = "" if found.other == 2**32 - 1 else self.text.line(found.other)
        if KINDS[found.kind] == "race":
            other = f"{other} of program {found.by}"
        return Fault(
            KINDS[found.kind],
            self.text.line(found.instr),
            other,
            found.program,
            found.thread,
            found.address,
        )

"""Predict the time of a step on a GPU from counts: to be proved wrong by the first
measurement.

    python -m bench.gpu.cycles          the table of bench/NOTES.md

A launch takes the launch itself and a mean of three times, the eighth root of the sum
of their eighth powers: near the longest, and more where two are alike. So it is in the
simulation for programs that start together and stay so, while DRAM is idle:

- *bytes*: all elements' bytes at the rate that a copy reaches;
- *issue*: a multiprocessor begins four instructions of a warp in a cycle, 128 of
  threads; instructions of an element as tests/codegen/test_triton_counts.py counts;
- *latency*: a program of n chunks takes `start + n * chunk` cycles, where as many as
  the registers allow share a multiprocessor. Both come from a simulation of the machine
  code, with 700 cycles for DRAM and 8 for a branch.

Not in the model: DRAM that turns around, translation of addresses, clocks that fall,
queues: expect 3 to 8 % more. All figures are predictions. None was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fuseopt.codegen.triton.chunks import ROWS, SMALL
from fuseopt.runtime.triton.table import span_of

from ..models import model_shapes, profiles
from .steps import LARGE, PROFILES

CLOCK = 1.755e9
MULTIPROCESSORS = 132
#: Threads' instructions that a multiprocessor begins in a cycle.
ISSUE = 128
#: Seconds until the first program of a launch runs, and after the last one.
LAUNCH = 4e-6
#: Bytes a second that a copy reaches.
CARDS = {"H100": 3.0e12, "H200": 4.3e12}
BLOCK = 2048
MEAN = 8


@dataclass(frozen=True)
class Cost:
    """A kernel of AdamW with counters on the CPU, Triton 3.6.

    `bytes` and `instructions` of an element; `programs` of a multiprocessor; cycles of
    a program: `start`, and of each `chunk`.
    """

    bytes: int
    instructions: float
    programs: int
    start: int
    chunk: int


COSTS = {
    "fp32": Cost(28, 45.3, 3, 2450, 3270),
    "bf16": Cost(14, 59.5, 3, 2260, 3740),
    # 128 registers: a fourth program hides latency of the other three
    "bf16, 128 registers": Cost(14, 59.5, 4, 2260, 3740),
    # a range test for the chunk in place of one for each root and quotient
    "bf16, one test a chunk": Cost(14, 52.0, 3, 2260, 2740),
}


def programs_of(numels: Sequence[int]) -> list[tuple[int, int]]:
    """Of each program its elements and its chunks, in the order of the launch."""
    small = sorted(n for n in numels if n <= SMALL)
    found = [(sum(small[k : k + ROWS]), 1) for k in range(0, len(small), ROWS)]
    span = span_of(sum(-(-n // BLOCK) for n in numels))
    for n in numels:
        if n > SMALL:
            for first in range(0, n, span * BLOCK):
                took = min(n - first, span * BLOCK)
                found.append((took, -(-took // BLOCK)))
    return found


def seconds(numels: Sequence[int], cost: Cost, rate: float) -> float:
    """Of a step's launch on a card that copies `rate` bytes a second."""
    programs = programs_of(numels)
    elements = sum(numels)
    issued = sum(chunks for _, chunks in programs) * BLOCK * cost.instructions
    cycles = sum(cost.start + chunks * cost.chunk for _, chunks in programs)
    # the last ones run beside fewer others
    longest = max(cost.start + chunks * cost.chunk for _, chunks in programs)
    slots = MULTIPROCESSORS * cost.programs
    latency = max(cycles / slots + longest / 2, longest) / CLOCK
    issue = issued / (ISSUE * MULTIPROCESSORS) / CLOCK
    times = elements * cost.bytes / rate, issue, latency
    return LAUNCH + sum(t**MEAN for t in times) ** (1 / MEAN)


def of_copy(numels: Sequence[int], cost: Cost, rate: float) -> float:
    """The part of a copy's rate that a step reaches, the copy's launch included."""
    copy = LAUNCH + sum(numels) * cost.bytes / rate
    return copy / seconds(numels, cost, rate)


def table() -> str:
    """Of each model: microseconds of the launch, and the part of a copy's rate."""
    columns = [(card, kind) for card in CARDS for kind in COSTS]
    head = " | ".join(f"{card} {kind}" for card, kind in columns)
    lines = [
        f"| model | tensors | elements | {head} |",
        "|---" * (3 + len(columns)) + "|",
    ]
    for name in sorted({*PROFILES, *LARGE}, key=_elements):
        numels = [_numel(shape) for shape in model_shapes(name)]
        cells = []
        for card, kind in columns:
            time = seconds(numels, COSTS[kind], CARDS[card])
            part = of_copy(numels, COSTS[kind], CARDS[card])
            cells.append(f"{time * 1e6:,.0f}, {part:.0%}")
        row = " | ".join(cells)
        lines.append(f"| {name} | {len(numels)} | {sum(numels) / 1e6:,.1f} M | {row} |")
    return "\n".join(lines)


def _elements(name: str) -> float:
    return float(profiles()[name]["elements"])


def _numel(shape: Sequence[int]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n


if __name__ == "__main__":
    print(table())

"""Machine code of a kernel for sm_90 -> what a thread of it runs: instructions along
its main path, loads under way, registers, the stack.
"""

from __future__ import annotations

import heapq
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?);")
LABEL = re.compile(r"(\.L_\S+|\$\S+):")


def tool(name: str) -> str:
    """A program of the toolkit that comes with Triton."""
    import triton

    return str(Path(triton.__file__).parent / "backends/nvidia/bin" / name)


def run_tool(name: str, cubin: bytes, folder: str, *flags: str) -> str:
    """What a tool says of a cubin."""
    path = Path(folder) / "kernel.cubin"
    path.write_bytes(cubin)
    command = [tool(name), *flags, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(cubin: bytes, folder: str) -> dict[str, int]:
    """What a kernel needs of registers, stack, local memory."""
    text = run_tool("cuobjdump", cubin, folder, "--dump-resource-usage")
    found = re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)
    return {name: int(number) for name, number in found}


class Instruction(NamedTuple):
    """`guarded`: it runs where a predicate says so. `to`: where a branch or a call
    goes.
    """

    op: str
    operands: str
    guarded: bool
    to: int | None


class Machine:
    """The instructions of a kernel, in the order in which they lie in memory."""

    def __init__(self, cubin: bytes, folder: str) -> None:
        self.code = parsed(run_tool("nvdisasm", cubin, folder, "-c"))

    def places(self, op: str) -> list[int]:
        """Where an operation stands."""
        return [k for k, x in enumerate(self.code) if x.op.startswith(op)]

    def after(self, k: int) -> list[int]:
        """What may come after an instruction on the main path; of a call, after it."""
        op, operands, guarded, to = self.code[k]
        if op.startswith("BRA"):
            assert to is not None, operands
            open_ = guarded or re.match(r"!?U?P\d", operands)
            return [to, k + 1] if open_ else [to]
        if op.startswith("RET"):
            return []
        if op.startswith("CALL"):
            return [k + 1] if self.called(k) else []
        if op.startswith("EXIT"):
            return [k + 1] if guarded else []
        return [k + 1]

    def called(self, k: int) -> list[int]:
        """The fewest instructions of the function that an instruction calls, such as a
        power in float64; [] where it calls none, where no way is found to its end, or
        what only numbers near the ends of a range need.
        """
        op, operands, _, to = self.code[k]
        if not op.startswith("CALL") or "slowpath" in operands:
            return []
        assert to is not None, operands
        ways = [self.way(to, end, {}) for end in self.places("RET") if end > to]
        return min(filter(None, ways), key=len, default=[])

    def way(self, start: int, end: int, through: Mapping[str, int]) -> list[int]:
        """The fewest instructions from `start` to before `end` that pass so many of
        each operation of `through`, and no more; [] if there is no such way.
        """
        kinds, goal = list(through), tuple(through.values())
        at = (start, (0,) * len(kinds))
        least = {at: 0}
        before: dict[Any, Any] = {}
        heap = [(0, at)]
        while heap:
            length, at = heapq.heappop(heap)
            k, passed = at
            if length and k == end:
                if passed == goal:
                    found = []
                    while at in before and (at[0] != start or not found):
                        at = before[at]
                        found += [*self.called(at[0])[::-1], at[0]]
                    return found[::-1]
                continue
            if length > least[at] or k >= len(self.code):
                continue
            op = self.code[k].op
            now = tuple(
                n + op.startswith(kind) for n, kind in zip(passed, kinds, strict=True)
            )
            if any(n > most for n, most in zip(now, goal, strict=True)):
                continue
            further = length + 1 + len(self.called(k))
            for then in self.after(k):
                if further < least.get((then, now), 1 << 30):
                    least[then, now] = further
                    before[then, now] = at
                    heapq.heappush(heap, (further, (then, now)))
        return []


def parsed(sass: str) -> list[Instruction]:
    """What nvdisasm prints -> instructions."""
    lines: list[tuple[str, str, bool]] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(lines)
        elif found := LINE.search(line):
            guard = (found[1] or "").strip()
            lines.append((found[2], found[3], guard not in ("", "@PT")))
    code = []
    for op, operands, guarded in lines:
        label = re.search(r"`\(([.$][^)\s]+)\)", operands)
        to = labels[label[1]] if label and op.startswith(("BRA", "CALL")) else None
        code.append(Instruction(op, operands, guarded, to))
    return code


@dataclass(frozen=True)
class Counts:
    """Instructions of a thread: before the first chunk is computed, of a chunk that
    another follows, of the last one and what comes after it. `elements` of a chunk.
    """

    before: int
    turn: int
    last: int
    elements: int

    def each(self, chunks: int) -> float:
        """Of an element, all included, in a program of so many chunks."""
        return self.of(chunks) / (chunks * self.elements)

    def of(self, chunks: int) -> int:
        """Of a thread in such a program."""
        return self.before + (chunks - 1) * self.turn + self.last


def counted(
    machine: Machine, loads: int, stores: int, elements: int, ticket: bool
) -> Counts:
    """The main path of a kernel that loads and stores so many times 16 bytes for a
    chunk, of full chunks. `ticket`: its programs take one.
    """
    wide = machine.places("STG.E.128")
    loops = [
        (x.to, k)
        for k, x in enumerate(machine.code)
        if x.to is not None and x.to <= wide[0] and k > wide[-1]
    ]
    head, _ = min(loops, key=lambda loop: loop[1] - loop[0])
    before = machine.way(0, head, {"LDG.E.128": loads, "STG.E.128": 0})
    turn = machine.way(head, head, {"LDG.E.128": loads, "STG.E.128": stores})
    through = {"LDG.E.128": 0, "STG.E.128": stores, "ATOM": int(ticket)}
    ends = [machine.way(head, k, through) for k in machine.places("EXIT")]
    last = min(len(x) for x in ends if x)
    assert before
    assert turn
    return Counts(len(before), len(turn), last + 1, elements)


def loads_before_use(machine: Machine, loads: int) -> int:
    """Loads of 16 bytes of a full chunk that are begun before a register of one is
    read, along the way to its last store.
    """
    wide = machine.places("STG.E.128")
    way = machine.way(0, wide[0], {"LDG.E.128": loads, "STG.E.128": 0})
    loaded: set[int] = set()
    count = 0
    for k in way:
        op, operands, _, _ = machine.code[k]
        if op.startswith("LDG.E.128"):
            first = int(operands.partition(",")[0].strip().removeprefix("R"))
            loaded.update(range(first, first + 4))
            count += 1
            continue
        read = operands if op.startswith("STG") else operands.partition(",")[2]
        if loaded & {int(r) for r in re.findall(r"\bR(\d+)", read)}:
            return count
    return count

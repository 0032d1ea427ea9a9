"""Text of PTX -> the instructions of its one kernel, each with its line in the source.

What is read is what compilers write: one entry, registers declared at its beginning, no
calls. Other text raises ValueError with the statement.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
PLACE = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', re.MULTILINE)
TARGETS = re.compile(r"(\$\w+):\s*\.branchtargets(.*)", re.DOTALL)
OPERANDS = re.compile(r",(?![^{\[]*[}\]])")
#: Statements that tell the assembler something, and the machine nothing.
TOLD = (".reg", ".pragma", ".shared", ".section", ".loc")


@dataclass(frozen=True)
class Instruction:
    """`guard`: the predicate it needs, "" for none; `negated`: it needs that false.

    `place`: the number of a file and a line in it.
    """

    name: str
    operands: tuple[str, ...]
    guard: str
    negated: bool
    place: tuple[int, int]

    @property
    def parts(self) -> list[str]:
        """The name's parts, without what says which cluster's memory is meant."""
        return self.name.replace("::cta", "").split(".")

    def __str__(self) -> str:
        return f"{self.name} {', '.join(self.operands)}"


@dataclass
class Text:
    """A kernel. `labels`: the instruction behind each; `choices`: labels by table."""

    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    choices: dict[str, list[str]] = field(default_factory=dict)
    files: dict[int, Path] = field(default_factory=dict)
    parameters: list[str] = field(default_factory=list)
    threads: int = 0

    def line(self, instruction: int) -> str:
        """Where an instruction comes from: file:line, and the text of that line."""
        number, line = self.instructions[instruction].place
        path = self.files.get(number)
        if path is None:
            return f"instruction {instruction}: {self.instructions[instruction]}"
        lines = path.read_text().splitlines() if path.exists() else []
        text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
        return f"{path.name}:{line}: {text}"


def parsed(ptx: str) -> Text:
    """The kernel of a text."""
    head = ptx.index(".entry")
    start = ptx.index("{", ptx.index(")", head))
    made = Text(files={int(n): Path(name) for n, name in FILE.findall(ptx)})
    signature, _, hints = ptx[head:start].partition(")")
    made.parameters = re.findall(r"(\w+)\s*(?:,|$)", signature)
    if found := re.search(r"\.reqntid\s+(\d+)", hints):
        made.threads = int(found[1])
    place = (0, 0)
    for text in _statements(ptx[start + 1 :]):
        if text.startswith(".loc"):
            found = PLACE.match(text)
            assert found is not None
            if found[2] != "0":  # 0: the compiler knows of no line
                place = int(found[1]), int(found[2])
        elif text.endswith(":"):
            made.labels[text[:-1]] = len(made.instructions)
        elif found := TARGETS.match(text):
            made.choices[found[1]] = [x.strip() for x in found[2].split(",")]
        elif not text.startswith(TOLD):
            made.instructions.append(_instruction(text, place))
    return made


def _instruction(text: str, place: tuple[int, int]) -> Instruction:
    found = STATEMENT.fullmatch(text)
    if found is None:
        raise ValueError(f"not understood as PTX: {text!r}")
    negated, guard, name, rest = found.groups()
    operands = tuple(x.strip() for x in OPERANDS.split(rest)) if rest.strip() else ()
    return Instruction(name, operands, guard or "", bool(negated), place)


def _statements(body: str) -> Iterator[str]:
    """Statements, labels with their colon, places of the source: without comments."""
    parts: list[str] = []
    for line in body.splitlines():
        text = line.split("//")[0].strip()
        if text == "}" and not line.startswith((" ", "\t")):
            return
        if text.startswith(".loc"):
            yield text
            continue
        while text:
            if not any(parts):
                text = text.lstrip("{} \t")  # a block, with registers of other names
            if not parts and re.fullmatch(r"[$\w]+:", text):
                yield text
                break
            piece, ends, text = text.partition(";")
            parts.append(piece)
            text = text.strip()
            if ends:
                if statement := " ".join(" ".join(parts).split()):
                    yield statement
                parts.clear()
    raise ValueError("the kernel has no end: no line that is a brace")

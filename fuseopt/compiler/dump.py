"""Dump a graph's compilation into a folder of text files.

Each compiled graph has a numbered folder. `0_captured.txt` is the recorded graph;
`1_scheduled.txt` has kernels, blocks and the places of temps. `not_fused.txt` lists
every refusal with its reason. `kernel0.cpp` ... is generated source, and
`kernel0.layout.txt` ... the launch layout. `report.txt` is the Report.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..codegen import Source
from ..ir.graph import Graph, Schedule
from ..ir.printer import show_graph, show_refusals, show_schedule
from .report import Report

#: The debug levels that add a file to the report.
REFUSALS, PASSES, SOURCES = 2, 3, 4


def new_folder(parent: str) -> Path:
    """Make the next numbered folder `step0`, `step1`, ... below `parent`."""
    root = Path(parent)
    root.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        folder = root / f"step{number}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def layout_text(source: Source) -> str:
    """Return the launch layout as lines: slots, scalars and lane values of each
    variant.
    """
    lines = [f"target {source.target}, entry {source.entry}"]
    for number, v in enumerate(source.layout):
        lines.append(
            f"variant {number}: {v.scalars} scalars, {v.lane_values} lane values"
        )
        lines += [f"  slot {k}: {slot}" for k, slot in enumerate(v.slots)]
    return "\n".join(lines) + "\n"


def write(
    folder: Path,
    level: int,
    report: Report,
    graph: Graph,
    plan: Schedule,
    sources: Mapping[str, tuple[Source, str]],
) -> None:
    """Write the files of `level` and those below it.

    `sources`: (source, file suffix) of each kernel by name.
    """
    texts: dict[str, str] = {}
    if level >= PASSES:
        texts["0_captured.txt"] = show_graph(graph)
        texts["1_scheduled.txt"] = show_schedule(graph, plan)
    if level >= REFUSALS:
        texts["not_fused.txt"] = show_refusals(plan)
    if level >= SOURCES:
        for name, (source, suffix) in sources.items():
            texts[f"{name}{suffix}"] = source.text
            texts[f"{name}.layout.txt"] = layout_text(source)
    texts["report.txt"] = f"{report}\n"
    for name, text in texts.items():
        write_text(folder / name, text)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8, independent of the locale.

    File names in the text may have bytes that are no UTF-8; these are kept.
    """
    path.write_text(text, encoding="utf-8", errors="surrogateescape")

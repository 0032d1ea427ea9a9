"""Reports: fused kernels, refusals to fuse with reasons, and costs.

`Report` describes one graph. fuseopt.reports() lists those of this process, and
fuseopt.explain(opt.step) makes one without running the step.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import compat
from ..ir.expressions import formulas
from ..ir.geometry import numel
from ..ir.graph import (
    Alone,
    Extern,
    Graph,
    Kernel,
    Refusal,
    Run,
    Schedule,
    Variant,
    symbols,
)
from ..ir.products import COPIED, TIMES
from ..ir.traffic import bytes_per_element, least_bytes, traffic
from .text import rich_console, wrapped

#: The largest number of formulas in a Report.
FORMULAS = 8
#: The width of a Report as a string, in characters.
LINE = 88
#: The columns of the table of kernels.
COLUMNS = ("kernel", "target", "lanes", "variants", "elements", "B/element")


@dataclass(frozen=True)
class VariantReport:
    """One fused body of a kernel, and the number of its lanes.

    `nodes`: the fused calls. `elements`: of all lanes; `bytes_per_element`: read and
    written. `slots`: the tensors that each lane reads and writes, such as "f32
    read+write x 3". `finishes`: it runs after all other variants of the kernel.
    `begins`: it runs before all others.
    """

    nodes: str
    lanes: int
    elements: int
    bytes_per_element: int
    slots: tuple[str, ...]
    finishes: bool = False
    begins: bool = False


@dataclass(frozen=True)
class KernelReport:
    """One generated kernel.

    `name`, `target` ("cpp" or "triton") and `source`, its text. `variants`: the number
    of bodies, each fused for lanes of one kind; `bodies`: a report of each. `elements`:
    of all lanes; `bytes`: read and written in a step. `lanes`: parameters that it
    updates; a counter that nothing else reads does not count. `bytes_per_element`:
    `bytes` divided by `elements`. `path`: the file of the dumped source, or None.
    """

    name: str
    target: str
    source: str
    lanes: int
    variants: int
    elements: int
    bytes: int
    bytes_per_element: float
    path: str | None = None
    bodies: tuple[VariantReport, ...] = ()

    def at(self, path: str) -> KernelReport:
        """Return a copy with the file of its source."""
        return replace(self, path=path)


@dataclass(frozen=True)
class BatchReport:
    """Products of matrices, or other calls on them, that one call computes.

    `op`, `dtype`, `matrices`: the op of the single calls, and the shapes of its last
    two operands. `rows`: the matrices of one call; `calls` in a step; `flops` of one
    call, 0 if it is no product. `copied`: operands that are copied together at each
    call. `way`: "dense", or "padded" if there is padding between the rows of the
    result.
    """

    op: str
    dtype: str
    matrices: str
    rows: int
    calls: int
    flops: int
    copied: int
    way: str

    def __str__(self) -> str:
        copied = f", {self.copied} operands copied" * bool(self.copied)
        flops = f" of {self.flops / 1e6:,.2f} Mflop" if self.flops else ""
        return (
            f"batch {self.op} {self.dtype} {self.matrices}: {self.rows} in one call, "
            f"{self.calls} calls a step{flops}{copied}"
        )


@dataclass(frozen=True)
class PartReport:
    """Place where a part of a graph runs.

    `what`: "before" or "after" the update, the "update" itself or "all". `where`:
    "fuseopt", "inductor" or "eager". `why`: the reason.
    """

    what: str
    where: str
    why: str


@dataclass
class Report:
    """Result of compiling one graph of Dynamo's.

    launches: kernel launches per step.
    kernels: a KernelReport of each launched kernel.
    externs: the name of each ATen call that runs unfused, with the reason.
    batches: products of matrices that one call computes for several lanes.
    alone: products with a call each: a description, their number, and the reason.
    algorithms: what `numerics="fast"` computes in another way than the user wrote.
    branches: for each series of a device's ATen calls, how many run at one time.
    not_fused: a `Refusal` for each pair of calls (producer, consumer, code, detail,
        list index, line).
    build_seconds: seconds for compiling the kernels.
    backend_seconds: seconds between Dynamo's call and the ready step, with the build.
    builds: compiler runs; 0 if the cache had the kernels.
    seconds: seconds of each pass, in order; they sum to backend_seconds.
    fallback: "", or what runs the graph instead, and why.
    parts: a PartReport for each part of a split graph, in running order; empty if the
        graph is one update.
    traced: how many of the lanes Dynamo traced, or why it traced them all; empty if
        lanes are not considered.
    cudagraph: "captured", what a capture waits for, or "off: " and the reason.
    blocks: runs of CPU kernels that go block by block: the kernels' names, and the
        number of blocks. A block is some lanes of each kernel. All kernels of a run
        work on a block before the next block begins. `launches` counts a kernel once.
    order: the names of kernels and externs, in running order.
    least_bytes: the least bytes that a step can move; see `ir/traffic.py`.
    cuts: for an explained function, the lines at which Dynamo breaks the graph, as far
        as Dynamo traced.
    instead: the call that runs such a function as one graph.
    numbers: formulas of the numbers that the host computes at each call.
    dump_dir: the folder of the dump, or None.
    lacks: capabilities that torch lacks or the user switched off, and what a step
        loses.
    """

    launches: int = 0
    kernels: list[KernelReport] = field(default_factory=list)
    externs: list[tuple[str, str]] = field(default_factory=list)
    batches: list[BatchReport] = field(default_factory=list)
    alone: list[Alone] = field(default_factory=list)
    algorithms: list[str] = field(default_factory=list)
    branches: list[int] = field(default_factory=list)
    not_fused: list[Refusal] = field(default_factory=list)
    build_seconds: float = 0.0
    backend_seconds: float = 0.0
    builds: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    fallback: str = ""
    parts: list[PartReport] = field(default_factory=list)
    dump_dir: str | None = None
    traced: str = ""
    cudagraph: str = ""
    blocks: dict[str, int] = field(default_factory=dict)
    numbers: list[str] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    least_bytes: int = 0
    cuts: list[str] = field(default_factory=list)
    instead: str = ""
    lacks: list[str] = field(default_factory=compat.lacks)

    def follow(self, first: Report) -> None:
        """Add the Report of a graph that runs right before this one."""
        self.launches += first.launches
        self.least_bytes += first.least_bytes
        self.build_seconds += first.build_seconds
        self.backend_seconds += first.backend_seconds
        self.builds += first.builds
        for name, seconds in first.seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        parts = ("kernels", "externs", "batches", "alone", "not_fused", "numbers")
        for name in (*parts, "order", "algorithms"):
            getattr(self, name)[:0] = getattr(first, name)
        self.blocks = {**first.blocks, **self.blocks}

    @property
    def lanes(self) -> int:
        """Number of parameters that the kernels update."""
        return sum(k.lanes for k in self.kernels)

    @property
    def bytes(self) -> int:
        """Bytes that one step reads and writes."""
        return sum(k.bytes for k in self.kernels)

    def __str__(self) -> str:
        out = io.StringIO()
        console = rich_console(file=out, width=LINE, no_color=True)
        if console is None:
            return self.plain(LINE)
        console.print(self)
        return "\n".join(x.rstrip() for x in out.getvalue().rstrip().splitlines())

    def plain(self, width: int) -> str:
        """Return the text that is shown if rich is not installed.

        `width`: in characters.
        """
        texts = [self._title()]
        if not self.fallback:
            texts += [_line(cells) for cells in _rows(self.kernels)]
        texts += self._part_sentences()
        if self.seconds and not self.fallback:
            texts.append(self._laps())
        return "\n".join(line for text in texts for line in wrapped(text, width))

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write a self-contained HTML page to `path`.

        Raises OSError if the file cannot be written.
        """
        from .page import page

        # names of files may have bytes that are no UTF-8
        text = page(self)
        Path(path).write_text(text, encoding="utf-8", errors="surrogateescape")

    def _repr_html_(self) -> str:
        """Return the page for a notebook, without the source of kernels."""
        from .page import cell

        return cell(self)

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        sentences = self._part_sentences()
        if self.fallback:
            yield Text("\n".join([self._title(), *sentences]))
            return
        yield Text(self._title(), style="italic")
        if self.kernels:
            yield from _kernels(self.kernels, options.max_width)
        for text in sentences:
            yield Text(text)
        if self.seconds:
            yield Text(self._laps(), style="italic dim")

    def _title(self) -> str:
        if self.fallback:
            return f"fuseopt: not compiled. {self.fallback}"
        return (
            f"fuseopt: {self.launches} launch{'' if self.launches == 1 else 'es'} "
            f"a step, {self.lanes} lanes, {self.bytes / 1e6:.2f} MB moved; backend "
            f"{self.backend_seconds:.2f} s, of it build {self.build_seconds:.2f} s"
        )

    def _laps(self) -> str:
        laps = ", ".join(f"{name} {s:.3f}" for name, s in self.seconds.items())
        return f"seconds: {laps}"

    def _part_sentences(self) -> list[str]:
        """Return lines of text on everything except the kernels."""
        sentences = [f"{p.what}: {p.where} ({p.why})" for p in self.parts]
        sentences += [f"the graph ends at {line}" for line in self.cuts]
        if self.instead:
            sentences.append(f"in one graph: {self.instead}")
        sentences += self.lacks
        if self.fallback:
            return sentences
        if self.cudagraph:
            sentences.append(f"graph of the launches: {self.cudagraph}")
        for names, n in self.blocks.items():
            sentences.append(f"{n} block{'s' * (n > 1)} of lanes, each through {names}")
        if self.numbers:
            sentences.append(f"numbers of each call: {'; '.join(self.numbers)}")
        if self.traced:
            sentences.append(f"traced: {self.traced}")
        sentences += [*self.algorithms, *map(str, self.batches)]
        sentences += [
            f"alone: {what}, {count} calls: {why}" for what, count, why in self.alone
        ]
        sentences += [
            f"calls of ATen: {n} branches, which run at one time in a graph"
            for n in self.branches
        ]
        sentences += [
            f"extern {name} (aten): {reason}" for name, reason in self.externs
        ]
        for r in self.not_fused:
            sentences.append(
                f"not fused: {r.producer} -> {r.consumer}: {r.code} ({r.seen})"
            )
        return sentences


def _rows(kernels: Sequence[KernelReport]) -> list[tuple[str, ...]]:
    """Return the cells of each kernel, in the order of COLUMNS."""
    return [
        (
            *(k.path or k.name, k.target, str(k.lanes), str(k.variants)),
            *(f"{k.elements:,}", f"{k.bytes_per_element:g}"),
        )
        for k in kernels
    ]


def _line(cells: Sequence[str]) -> str:
    """Return a kernel as a line of text."""
    named = zip(COLUMNS[1:], cells[1:], strict=True)
    return f"{cells[0]}: {', '.join(f'{name} {cell}' for name, cell in named)}"


def _kernels(kernels: Sequence[KernelReport], width: int) -> Iterator[Any]:
    """Yield a table of kernels, or their lines if the table is wider than `width`."""
    from rich.table import Table
    from rich.text import Text

    rows = _rows(kernels)
    longest = [max(map(len, x)) for x in zip(*[COLUMNS, *rows], strict=True)]
    # a path is folded in its column; other columns are not
    least = min(longest[0], 2 * len(COLUMNS[0]))
    if least + sum(longest[1:]) + 3 * len(COLUMNS) + 1 > width:
        yield from map(Text, map(_line, rows))
        return
    table = Table()
    table.add_column(COLUMNS[0], overflow="fold")
    for name in COLUMNS[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    yield table


def kernel_report(
    graph: Graph, kernel: Kernel, target: str, source: str
) -> KernelReport:
    """Describe one kernel of a graph, with the bytes that it moves."""
    moved = traffic(graph, kernel)
    return KernelReport(
        kernel.name,
        target,
        source,
        moved.lanes,
        len(kernel.every),
        moved.elements,
        moved.bytes,
        round(moved.bytes / moved.elements, 3) if moved.elements else 0.0,
        bodies=(
            *map(_body, kernel.variants),
            *(replace(_body(v), finishes=True) for v in kernel.finish),
            *(replace(_body(v), begins=True) for v in kernel.first),
        ),
    )


def _body(v: Variant) -> VariantReport:
    kinds: dict[str, int] = {}
    for slot in v.slots:
        ways = "+".join(("read",) * slot.read + ("write",) * slot.write)
        per = "" if slot.domain == "element" else f" once per {slot.domain}"
        kind = f"{slot.dtype} {ways}{per}"
        kinds[kind] = kinds.get(kind, 0) + 1
    return VariantReport(
        ", ".join(v.nodes),
        v.lanes,
        sum(map(numel, v.shapes)),
        bytes_per_element(v),
        tuple([f"{kind} x {n}" for kind, n in kinds.items()]),
    )


def _batches(schedule: Schedule) -> list[BatchReport]:
    """Return a report of each kind of batch."""
    kinds: dict[BatchReport, int] = {}
    for batch in schedule.batches:
        shapes = [str(list(shape)) for shape, _, _ in batch.trial.layouts[-2:]]
        between = " @ " if batch.op in TIMES else ", "
        kind = BatchReport(
            *(batch.op, batch.trial.dtype, between.join(shapes)),
            *(len(batch.externs), 0, batch.flops),
            sum(x.stack == COPIED for x in batch.operands),
            batch.way,
        )
        kinds[kind] = kinds.get(kind, 0) + 1
    return [replace(kind, calls=n) for kind, n in kinds.items()]


def fill(report: Report, graph: Graph, schedule: Schedule) -> None:
    """Add a schedule's steps in order, its numbers and its refusals to a report."""
    report.least_bytes = least_bytes(graph)
    steps = schedule.steps
    for step in steps:
        kernels = step.kernels if isinstance(step, Run) else (step,)
        report.order += [x.name for x in kernels]
    variants = [v for kernel in schedule.kernels for v in kernel.every]
    read = symbols(ref for v in variants for refs in v.scalars for ref in refs)
    texts = formulas(graph.numbers, read[:FORMULAS]).values()
    report.numbers = list(dict.fromkeys(texts))
    report.externs = [(x.name, x.reason) for x in steps if isinstance(x, Extern)]
    report.batches = _batches(schedule)
    report.alone = list(schedule.alone)
    report.branches = [len(x) for x in schedule.branches.values()]
    report.blocks = {
        s.name: len(s.blocks) for s in schedule.steps if isinstance(s, Run)
    }
    report.not_fused = list(schedule.refusals)

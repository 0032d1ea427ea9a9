"""The page of what a GPU measured: docs/gpu.md, from the files in bench/results.

python -m bench.gpu.page
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.gpu.reading import outcome, rivals
from bench.results import FOLDER

PAGE = Path(__file__).parent.parent.parent / "docs" / "gpu.md"
HEAD = """\
# On a GPU

What did a GPU measure? `make gpu` compares steps with eager bit by bit, and measures
them beside their rivals. `python -m bench.gpu.page` makes this page from the files
`gpu-*.json` in [bench/results](../bench/results).

"call" is the median of whole calls in turns, until the device is done. "host" is the
median until the call returns. "kernels" is what the device ran; figures of the H200
and of 2026-11-26 count torch's mark of the step as one. A case that the device's memory
had no room for is not in the tables: many processes share it.
"""
#: (section, title of its table, beginning of its cases)
TABLES = (
    ("large", "Large models: AdamW", "large/"),
    ("steps", "Models: AdamW in float32", "profile/"),
    ("steps", "Gradients at odd addresses, and state that is 0", ("odd/", "zero/")),
    ("steps", "Optimizers written as a loop", "loop/"),
    ("tails", "Tails: unscale, clip, AdamW, average, clear", "tail/"),
    ("large", "The tail of a large model", "tail/"),
    ("tails", "DTensors on a mesh of one device", "DTensors/"),
    ("tails", "A backward and AdamW: after it, and within it", "backward/"),
    ("extras", "Muon", "muon/"),
    ("extras", "A third of 300 gradients missing, another in each call", "missing/"),
    ("large", "AdamW with packed state", "storage/"),
)


def files() -> list[Path]:
    """Results of GPUs that compared bits or measured steps, by name."""
    found = sorted(FOLDER.glob("gpu-*.json"))
    return [path for path in found if {"correctness", "steps"} & {*_sections(path)}]


def _sections(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())["sections"]
    return found


def page() -> str:
    """The text of docs/gpu.md."""
    parts = [HEAD]
    for path in files():
        parts += _of(path)
    return "\n".join(parts)


def _of(path: Path) -> Iterator[str]:
    sections = _sections(path)
    found = sections["machine"]["cases"]["environment"]
    yield f"## {found['gpu']}\n"
    yield f"torch {found['torch']}, triton {found['triton']}, CUDA {found['cuda']},"
    yield f"Python {found['python']}; results: {path.name}\n"
    if "correctness" in sections:
        yield _bits(sections["correctness"]["cases"])
    for section, title, begins in TABLES:
        cases = {
            name: f
            for name, f in sections.get(section, {}).get("cases", {}).items()
            if name.startswith(begins) and "contenders" in f
        }
        if cases:
            date = sections[section].get("date")
            yield _table(f"{title} (code of {date[:10]})" if date else title, cases)
    if kernels := sections.get("kernels"):
        yield _kernels(kernels)
    if lines := _host(sections.get("host", {}).get("cases", {})):
        yield "\n".join(lines)


def _bits(cases: dict[str, Any]) -> str:
    differ, known, missing, exact = outcome(cases)
    text = (
        f"**Bits.** {exact} of {len(cases)} cases have eager's bits after each step. "
        f"{len(differ)} differ without a reason in [numerics](numerics.md). "
        f"{len(known)} add in another order, and are up to "
        f"{max(known.values(), default=0):.1f} ulp off. {len(missing)} did not run:"
    )
    lines = [textwrap.fill(text, 88), ""]
    for name, why in missing.items():
        text = f"- {name}: {why.split(' (options=')[0]}"
        lines.append(textwrap.fill(text, 88, subsequent_indent="  "))
    return "\n".join(lines) + "\n"


def _table(title: str, cases: dict[str, Any]) -> str:
    rows = [
        "| case | fuseopt: call us, host us, kernels | the others: call us, host us, "
        "kernels | faster than the best |",
        "|---|---|---|---|",
    ]
    for name, f in sorted(cases.items()):
        each = f["contenders"]
        theirs = rivals(each)
        others = ", ".join(f"{n} {_cell(c)}" for n, c in theirs.items())
        best = min((c["p50"] for c in theirs.values()), default=None)
        own = each.get("fuseopt")
        ratio = f"{best / own['p50']:.2f}" if best and own else ""
        rows.append(f"| {name} | {_cell(own) if own else ''} | {others} | {ratio} |")
    return f"### {title}\n\n" + "\n".join(rows) + "\n"


def _kernels(section: dict[str, Any]) -> str:
    """The table of steps before and after a change of their kernels."""
    rows = ["| step | before | after |", "|---|---|---|"]
    for name, f in section["cases"].items():
        before = f"{f['before']:.2f}" if f["before"] else ""
        rows.append(f"| {name} | {before} | {f['after']:.2f} |")
    title = "### Kernels before and after a change\n"
    return "\n".join([title, f"{section['unit']}.\n", *rows, ""])


def _host(cases: dict[str, Any]) -> list[str]:
    """Lines about calls that nobody waits for, and about the first step."""
    lines = []
    for name, f in cases.items():
        kind, _, n = name.partition(" ")
        if kind == "call" and "fuseopt us" in f:
            ways = ("fuseopt", "fused", "foreach")
            each = ", ".join(f"{way} {f[f'{way} us']:,.0f}" for way in ways)
            lines.append(f"- a call of {n} that nobody waits for, us: {each}")
        elif kind == "compile" and "first_step_seconds" in f:
            lines.append(f"- the first step of {n}: {f['first_step_seconds']:.1f} s")
    return ["### The host, by the number of parameters\n", *lines, ""] if lines else []


def _cell(c: dict[str, Any]) -> str:
    kernels = f"; {c['kernels']}" if c.get("kernels") else ""
    return f"{1e6 * c['p50']:,.0f}; {1e6 * c['host_p50']:,.0f}{kernels}"


if __name__ == "__main__":
    PAGE.write_text(page())

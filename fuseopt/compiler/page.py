"""Render a Report (`report.py`) as a self-contained HTML page, or for a notebook.

The page has the launches in order, and the bytes moved beside the least possible. It
lists the pairs of calls that were not fused, with reasons and advice, and the source of
the kernels. Without jinja2, the Report's text replaces the drawing. Without pygments,
the sources have no colours.
"""

from __future__ import annotations

import html
import itertools
from dataclasses import dataclass
from typing import Any

from .text import WIDTH

#: Keyed by the code of a rule: its meaning, and advice or "".
ADVICE = {
    "device": (
        "The two calls run on different devices.",
        "Keep the state of a parameter on its device.",
    ),
    "overlap": (
        "Two tensors overlap in memory, so the order of the calls matters.",
        "Copy one of them (`clone`), unless the step needs the overlap.",
    ),
    "shared_scalar": (
        "The step computes a number that many parameters read, such as a total norm. "
        "It must be complete before they read it.",
        "That takes at least one more launch. To clip by the total norm use "
        "`fuseopt.tail`, which finishes the norm in the launch that computes it.",
    ),
    "index_space": (
        "The two calls loop over different shapes, such as a matrix and its rows.",
        "Second moments by rows and columns need that. If both shapes have the same "
        "elements, reshape one of them before the arithmetic.",
    ),
    "broadcast": (
        "A call reads elements that the other call writes at a different index.",
        "Compute values that many elements read in an earlier call.",
    ),
    "reduction": (
        "A norm, a sum or a mean must be complete before another call uses it, or two "
        "of them reduce different elements.",
        "Each level of such results is a launch. Two norms of one tensor at the same "
        "point share a launch; a norm of a tensor that another norm scales cannot.",
    ),
    "extern": (
        "fuseopt has no rule for this call, so ATen runs it, with a launch before it "
        "and one after it.",
        "docs/ops.md lists the calls that fuse. The same arithmetic with these calls "
        "is one kernel.",
    ),
}
UNKNOWN = ("The two calls do not fuse.", "")
#: Memory bandwidths, in bytes a second, for which times are estimated.
BANDWIDTHS = (
    ("a laptop", 40e9),
    ("a server's socket", 300e9),
    ("A100", 2.0e12),
    ("H100", 3.35e12),
    ("H200", 4.8e12),
)


@dataclass(frozen=True)
class Launch:
    """One kernel with its KernelReport, or `times` consecutive ATen calls of one name.

    `kernel` is None for ATen calls.
    """

    name: str
    kernel: Any
    times: int = 1
    reason: str = ""


@dataclass(frozen=True)
class RefusedFusion:
    """Describes two calls that were not fused."""

    producer: str
    consumer: str
    code: str
    seen: str
    line: str
    why: str
    advice: str


def page(report: Any) -> str:
    """Return the whole page."""
    return _rendered(report, whole=True)


def cell(report: Any) -> str:
    """Return the page for a cell of a notebook, without sources."""
    return _rendered(report, whole=False)


def _rendered(report: Any, whole: bool) -> str:
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError:
        return _plain(report, whole)
    environment = Environment(
        loader=PackageLoader("fuseopt.compiler"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("page.html" if whole else "cell.html")
    # with several launches, no kernel has the number of elements of the step
    elements = report.kernels[0].elements if len(report.kernels) == 1 else 0
    moved, least = report.bytes, report.least_bytes
    return template.render(
        report=report,
        launches=_launches(report),
        refused=_refused(report),
        widest=max((k.lanes for k in report.kernels), default=1) or 1,
        moved=_amount(moved),
        least=_amount(least),
        share=f"{moved / least:.2f}" if least else "",
        per_element=f"{moved / elements:.1f}" if elements else "",
        least_per_element=f"{least / elements:.1f}" if elements else "",
        times=[(name, _amount(rate, "B/s"), moved / rate) for name, rate in BANDWIDTHS],
        sources=_sources(report) if whole else [],
        colours=_colours() if whole else "",
        seconds=_seconds,
        count=lambda n: f"{n:,}",
    )


def _plain(report: Any, whole: bool) -> str:
    """Return the text of a Report as HTML, if jinja2 is not installed."""
    text = f"<pre>{html.escape(report.plain(WIDTH))}</pre>"
    if not whole:
        return text
    sources = "".join(
        f"<h2>{html.escape(k.name)}</h2><pre>{html.escape(k.source)}</pre>"
        for k in report.kernels
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>fuseopt: {report.launches} launches a step</title></head>"
        f"<body>{text}{sources}</body></html>"
    )


def _launches(report: Any) -> list[Launch]:
    """Return the launches in order; consecutive calls of one name are one entry."""
    kernels = {k.name: k for k in report.kernels}
    reasons = dict(report.externs)
    launches = []
    for name, run in itertools.groupby(report.order):
        kernel = kernels.get(name)
        launches.append(Launch(name, kernel, len([*run]), reasons.get(name, "")))
    return launches


def _refused(report: Any) -> list[RefusedFusion]:
    refused = []
    for r in report.not_fused:
        why, advice = ADVICE.get(r.code, UNKNOWN)
        row = r.producer, r.consumer, r.code, r.seen, r.line, why, advice
        refused.append(RefusedFusion(*row))
    return refused


def _sources(report: Any) -> list[tuple[str, Any]]:
    """Return the name of each kernel and its text as markup, already escaped.

    pygments colours the text if it is installed.
    """
    from markupsafe import Markup

    try:
        from pygments import highlight
        from pygments.formatters.html import HtmlFormatter
        from pygments.lexers import CppLexer, PythonLexer
    except ImportError:
        return [
            (k.name, Markup("<pre>{}</pre>").format(k.source)) for k in report.kernels
        ]
    sources = []
    for kernel in report.kernels:
        lexer: Any = CppLexer() if kernel.target == "cpp" else PythonLexer()
        text = highlight(kernel.source, lexer, HtmlFormatter())
        sources.append((kernel.name, Markup(text)))
    return sources


def _colours() -> Any:
    """Return the style sheet of coloured sources."""
    from markupsafe import Markup

    try:
        from pygments.formatters.html import HtmlFormatter
    except ImportError:
        return ""
    return Markup(HtmlFormatter().get_style_defs(".highlight"))


def _amount(n: float, unit: str = "B") -> str:
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {prefix}{unit}"
    return f"{n:.0f} {unit}"


def _seconds(s: float) -> str:
    return f"{s * 1e3:.2f} ms" if s >= 1e-3 else f"{s * 1e6:.1f} µs"

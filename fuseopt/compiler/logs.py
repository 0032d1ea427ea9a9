"""Log what was compiled, for `TORCH_LOGS` and `TORCH_TRACE`: a logger for each room.

`TORCH_LOGS="fuseopt"` logs each compiled step, and `"+fuseopt"` all levels below.
`"+fuseopt.capture"` logs the recorded graph, `"+fuseopt.scheduler"` the schedule and
the refusals to fuse, `"+fuseopt.codegen"` the source. Torch parses the variable at
import, and accepts these names because they are names of packages.

`TORCH_TRACE` gets the same as artifacts, which tlparse shows beside torch's own:
`fuseopt_report`, `fuseopt_graph`, `fuseopt_fusion`, `fuseopt_code`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from .. import compat
from ..codegen import Source
from ..ir.graph import Graph, Schedule
from ..ir.printer import show_graph, show_refusals, show_schedule
from .report import Report

STEPS = logging.getLogger("fuseopt")
GRAPHS = logging.getLogger("fuseopt.capture")
SCHEDULES = logging.getLogger("fuseopt.scheduler")
CODE = logging.getLogger("fuseopt.codegen")


def log(
    report: Report, graph: Graph, plan: Schedule, sources: Mapping[str, Source]
) -> None:
    """Log the compilation of a graph; texts are made only where a logger is enabled."""
    if STEPS.isEnabledFor(logging.INFO):
        STEPS.info("%s", report)
    if GRAPHS.isEnabledFor(logging.DEBUG):
        GRAPHS.debug("captured:\n%s", show_graph(graph))
    if SCHEDULES.isEnabledFor(logging.DEBUG):
        SCHEDULES.debug("scheduled:\n%s", show_schedule(graph, plan))
        SCHEDULES.debug("not fused:\n%s", show_refusals(plan))
    if CODE.isEnabledFor(logging.DEBUG):
        for name, source in sources.items():
            CODE.debug("%s, %s:\n%s", name, source.target, source.text)
    compat.trace_artifact("fuseopt_report", lambda: str(report))
    compat.trace_artifact("fuseopt_graph", lambda: show_graph(graph))
    compat.trace_artifact(
        "fuseopt_fusion", lambda: f"{show_schedule(graph, plan)}\n{show_refusals(plan)}"
    )
    compat.trace_artifact(
        "fuseopt_code", lambda: "\n".join(source.text for source in sources.values())
    )

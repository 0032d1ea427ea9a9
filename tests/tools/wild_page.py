"""The table of docs/wild.md: `python -m tests.tools.wild_page` measures and writes it.

tests/tools/test_wild_page.py asserts that every training of tests/wild has a row, and
that lines and launches are those that the tests assert. What is not installed keeps the
row that it has.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import textwrap
import warnings
from typing import Any

import torch

from bench.environment import environment, today
from fuseopt.compiler.session import session
from tests import ROOT
from tests.wild.launched import launched
from tests.wild.trained import STEPS
from tests.wild.trainings import TRAININGS, Training
from tests.wild.watch import Watch

PAGE = ROOT / "docs" / "wild.md"
BLOCK = re.compile("<!-- wild:begin -->.*?<!-- wild:end -->", re.DOTALL)
#: Each training is run so often, in eager and compiled in turn.
RUNS = 3
COLUMNS = (
    "training",
    "package",
    "lines changed",
    "ATen calls of a step in eager",
    "launches of a step",
    "the step's share of eager's time",
    "step in eager",
    "step compiled",
)


def in_eager(given: Any) -> Any:
    """A training that is not changed."""
    return given


def run(training: Training, change: Any, counting: bool = False) -> Watch:
    """Train once, and watch it."""
    torch._dynamo.reset()
    session.reset()
    gc.collect()
    with launched() as counted, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        watch = Watch(change, counted, counting)
        training.train(watch)
    return watch


def row(training: Training) -> str:
    """The cells of a training, measured now."""
    counts = run(training, in_eager, counting=True)
    aten = sum(call.aten for call in counts.settled()) / counts.iterations()
    eager, compiled = [], []
    for _ in range(RUNS):
        eager.append(run(training, in_eager))
        compiled.append(run(training, training.line()))
    launches = sum(call.launches for call in compiled[0].settled())
    cells = [
        training.name,
        f"{training.installed_as} {training.version}".strip() or "–",
        training.lines,
        round(aten),
        round(launches / compiled[0].iterations()),
        f"{100 * min(watch.share() for watch in eager):.0f}%",
        f"{1e3 * min(watch.step_seconds() for watch in eager):.2f} ms",
        f"{1e3 * min(watch.step_seconds() for watch in compiled):.2f} ms",
    ]
    return line(cells)


def line(cells: Any) -> str:
    """A row of a table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def rows(text: str) -> dict[str, list[str]]:
    """The cells of each training that a page has, by its name."""
    block = BLOCK.search(text)
    lines = block[0].split("\n") if block else []
    found = [x.strip("| ").split(" | ") for x in lines if x.startswith("| ")]
    return {cells[0]: cells for cells in found[1:]}


def filled(text: str, only: str = "") -> str:
    """The page with its table measured anew; `only`: of trainings with this name."""
    known = rows(text)
    made = []
    for training in TRAININGS:
        if training.missing or only not in training.name:
            print(f"{training.name}: {training.missing or 'left'}", file=sys.stderr)
            if training.name in known:
                made.append(line(known[training.name]))
            continue
        made.append(row(training))
        print(made[-1], file=sys.stderr, flush=True)
    own = environment()
    table = [line(COLUMNS), "|---|---|" + "---:|" * (len(COLUMNS) - 2), *made]
    told = (
        f"{own['processor']}, one thread; torch {own['torch']}, Python "
        f"{own['python']}; {today()}. Times are the least of {RUNS} runs of "
        f"{STEPS // 2} steps, on a machine that others use."
    )
    told = textwrap.fill(told, 88)
    block = "\n".join(["<!-- wild:begin -->", *table, "", told, "<!-- wild:end -->"])
    return BLOCK.sub(lambda _: block, text)


if __name__ == "__main__":
    os.environ["FUSEOPT_EAGER_IF_FASTER"] = "0"
    torch.set_num_threads(1)
    PAGE.write_text(
        filled(PAGE.read_text(encoding="utf-8"), *sys.argv[1:]), encoding="utf-8"
    )

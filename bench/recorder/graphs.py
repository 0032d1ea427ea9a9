"""The Graph of a recording beside that of Dynamo's trace, as text."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import warnings
from typing import Any

import torch

import fuseopt
from fuseopt.compiler import pipeline
from fuseopt.ir import printer
from tests.steps import make_params, set_grads

from .coverage import SHAPES, optimizers
from .way import recorded


def texts(make: Any, lanes: int, record: bool) -> list[str]:
    """The Graphs that three steps make."""
    torch._dynamo.reset()
    found: list[str] = []
    schedule = pipeline.schedule

    def noting(graph: Any, *args: Any) -> Any:
        found.append(printer.show_graph(graph, 64))
        return schedule(graph, *args)

    params = make_params([SHAPES[i % len(SHAPES)] for i in range(lanes)])
    optimizer = make(params)
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    pipeline.schedule = noting
    try:
        with recorded() as every:
            fuseopt.compile(optimizer)
            if not record:
                every[-1].recorder.why = "compared"
            for turn in range(3):
                set_grads(params, params, turn)
                optimizer.step()
            return found if not (record and every[-1].recorder.why) else []
    finally:
        pipeline.schedule = schedule


def calls(text: str) -> list[str]:
    """What a Graph does to tensors: bodies and lanes, in order, without numbers."""
    found = []
    for lanes, line in re.findall(r"^call \d+: (\d+) lanes?.*\n(.*)$", text, re.M):
        body = re.search(r"= ([a-z_0-9]+)\.\d+\(", line)
        name = body.group(1) if body else line.strip().split("=")[-1][:40]
        if not name.startswith("number_"):
            found.append(f"{name} x{lanes}")
    return found


def main() -> None:
    """Print for each optimizer whether texts are equal, or the first difference."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--show", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    for name, make in optimizers():
        if given.only not in name:
            continue
        mine, theirs = texts(make, 4, True), texts(make, 4, False)
        if given.show:
            print("\n".join(mine[-1:]), "\n=====\n", "\n".join(theirs[-1:]))
        a, b = (calls(x[-1]) if x else [] for x in (mine, theirs))
        lines = list(difflib.unified_diff(b, a, "", "", n=0, lineterm=""))[2:]
        lines = [x for x in lines if not x.startswith("@")]
        same = "refused" if not mine else "same" if a == b else "differs"
        nodes = [
            re.findall(r"graph: (\d+) nodes", x[-1])[0] for x in (mine, theirs) if x
        ]
        print(json.dumps([name, same, nodes, lines[:8]]), flush=True)


if __name__ == "__main__":
    main()

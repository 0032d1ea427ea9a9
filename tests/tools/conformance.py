"""docs/conformance.json and docs/conformance.md: `python -m tests.tools.conformance`.

Every optimizer of torch and of the packages that are installed, found by looking
through each package, goes through `fuseopt.conformance`: a process for each package,
and all that was compiled is forgotten between two optimizers. What is not installed
keeps the rows that it has.

    python -m tests.tools.conformance                      # all that is installed
    python -m tests.tools.conformance --packages torch.optim --dtypes float32
    python -m tests.tools.conformance --page               # the page alone
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from typing import Any

from tests import ROOT
from tests.tools.conformance_aarch64 import section

RECORD = ROOT / "docs" / "conformance.json"
PAGE = ROOT / "docs" / "conformance.md"
#: The modules that are looked through, by the name of the package that brings them.
MODULES = {
    "torch.optim": "torch",
    "pytorch_optimizer": "pytorch_optimizer",
    "torch_optimizer": "torch-optimizer",
    "timm.optim": "timm",
    "optimi": "torch-optimi",
    "heavyball": "heavyball",
    "schedulefree": "schedulefree",
    "lion_pytorch": "lion-pytorch",
    "adabelief_pytorch": "adabelief-pytorch",
    "adam_mini": "adam-mini",
    "adamp": "adamp",
    "adan_pytorch": "adan-pytorch",
    "came_pytorch": "came-pytorch",
    "dadaptation": "dadaptation",
    "grokadamw": "grokadamw",
    "kron_torch": "kron-torch",
    "madgrad": "madgrad",
    "prodigyopt": "prodigyopt",
    "prodigyplus": "prodigy-plus-schedule-free",
}
DTYPES = ("float32", "bfloat16")
#: What a constructor is given that does not work without.
NEEDED = {"lr": 1e-3, "num_iterations": 100, "total_steps": 100, "warmup_steps": 2}
#: Seconds for one optimizer in one dtype.
LIMIT = 240
#: What is said of an outcome, in the order of the page.
OUTCOMES = {
    "equal": "equal bits",
    "differs": "other bits",
    "eager": "runs in eager, with a warning",
    "refused": "refused",
    "raises": "raises",
    "proves nothing": "proved nothing",
    "not run": "not run",
}


def imported(module: str) -> Any:
    """A module of a package, timm's where torchvision cannot be loaded as well."""
    if module.startswith("timm"):
        from tests.wild.without_torchvision import stand_ins

        with stand_ins():
            return importlib.import_module(module)
    return importlib.import_module(module)


def classes(module: str) -> list[str]:
    """The names of the optimizers that a module has, each class once."""
    from torch.optim import Optimizer

    home = imported(module)
    found: dict[Any, str] = {}
    for name in sorted(dir(home)):
        value = getattr(home, name)
        if (
            inspect.isclass(value)
            and issubclass(value, Optimizer)
            and value.__module__.split(".")[0] == module.split(".")[0]
            and not inspect.isabstract(value)
            and name not in ("Optimizer", "BaseOptimizer")
        ):
            known = found.get(value)
            if known is None or name == value.__name__:
                found[value] = name
    return sorted(found.values())


def options(made: Any) -> dict[str, Any]:
    """What a constructor needs beside parameters."""
    known = [*inspect.signature(made).parameters.values()][1:]
    needed = [
        x.name
        for x in known
        if x.kind is x.POSITIONAL_OR_KEYWORD
        and (x.default is x.empty or type(x.default).__module__ != "builtins")
    ]
    return {name: NEEDED[name] for name in needed if name in NEEDED}


def nowhere(text: str) -> str:
    """A text without the folders of the machine that it is from."""
    return re.sub(r"(?<![\w.])/[\w./+-]*/(?=[\w.-]+)", "", text)


def work(module: str, name: str, dtype: str) -> dict[str, Any]:
    """One run, in this process."""
    import torch

    from fuseopt.compiler.session import session
    from fuseopt.conformance.subject import Subject
    from fuseopt.conformance.verify import verify

    made = getattr(imported(module), name)
    torch._dynamo.reset()
    session.reset()
    given = options(made)
    subject = Subject(f"{module}:{name}", made, given, getattr(torch, dtype))
    row = dataclasses.asdict(verify(subject))
    row["warnings"] = [textwrap.shorten(nowhere(x), 300) for x in row["warnings"]]
    row["reason"] = nowhere(row["reason"])
    row["options"] = {k: repr(v) for k, v in given.items()}
    return row


def worker(module: str, dtypes: Iterable[str], skip: Iterable[str]) -> None:
    """Every run of a module; a line of JSON on stdout for each."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print is none
    done = {*skip}
    for name in classes(module):
        for dtype in dtypes:
            if f"{name}:{dtype}" in done:
                continue
            print(json.dumps({"begins": f"{name}:{dtype}"}), file=out, flush=True)
            try:
                row = work(module, name, dtype)
            except Exception as error:
                row = {
                    "target": f"{module}:{name}",
                    "dtype": dtype,
                    "outcome": "not run",
                    "reason": f"{type(error).__name__}: {error}".splitlines()[0],
                }
            print(json.dumps(row), file=out, flush=True)


def run(module: str, dtypes: list[str], skip: list[str]) -> Iterator[dict[str, Any]]:
    """The rows of a module, from processes: one that hangs or dies is named."""
    import threading

    done = [*skip]
    while True:
        command = [sys.executable, "-m", "tests.tools.conformance", "--worker", module]
        child = subprocess.Popen(
            [*command, "--dtypes", *dtypes, "--skip", *done],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "KINETO_LOG_LEVEL": "6", "OMP_NUM_THREADS": "1"},
        )
        assert child.stdout is not None
        begun = ""
        timer = threading.Timer(LIMIT, child.kill)
        for line in child.stdout:
            timer.cancel()
            timer = threading.Timer(LIMIT, child.kill)
            timer.start()
            row = json.loads(line)
            if "begins" in row:
                begun = row["begins"]
                continue
            done.append(begun)
            begun = ""
            yield row
        timer.cancel()
        child.wait()
        if not begun:
            return
        name, _, dtype = begun.partition(":")
        done.append(begun)
        why = f"the process ended with {child.returncode}, or took over {LIMIT} s"
        yield {
            "target": f"{module}:{name}",
            "dtype": dtype,
            "outcome": "not run",
            "reason": why,
        }


def read() -> dict[str, Any]:
    """The record as it is."""
    if not RECORD.exists():
        return {"rows": []}
    return json.loads(RECORD.read_text(encoding="utf-8"))


def key(row: dict[str, Any]) -> tuple[int, str, int]:
    """Where a row stands."""
    module, _, name = row["target"].partition(":")
    return [*MODULES].index(module), name.lower(), DTYPES.index(row["dtype"])


def write(rows: Iterable[dict[str, Any]]) -> None:
    """Write the record and the page; what is in the record of others stays."""
    import platform

    import torch

    import fuseopt
    from bench.environment import environment

    known = {(x["target"], x["dtype"]): x for x in read()["rows"]}
    known |= {(x["target"], x["dtype"]): x for x in rows}
    record = {
        "fuseopt": fuseopt.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": environment()["processor"],
        "device": "cpu",
        "packages": read().get("packages", {}) | versions(),
        "rows": sorted(known.values(), key=key),
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(record), encoding="utf-8")


def versions() -> dict[str, str]:
    """The versions of the packages that are installed."""
    found = {}
    for package in MODULES.values():
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


HEAD = """# Conformance

Does a compiled step have the bits of the plain optimizer? Anybody can repeat the run:

    python -m fuseopt verify torch.optim:AdamW --set lr=0.01 --dtype float32 bfloat16
    python -m fuseopt verify my/train.py:make --json

`verify` takes a class of optimizers, to which it gives parameters of awkward shapes. It
also takes a function that makes an optimizer. It makes two optimizers, compiles one,
and does twelve steps with both:

- Each step has fresh gradients, and in two steps some parameters have none.
- From the third step on the rates move.
- Half way it saves the state, as `torch.save` does, and loads it into a new optimizer.
- After each step it compares all parameters, all state and all options of groups, bit
  for bit.

`verify` leaves out inputs that eager itself does not accept, and names them.

A run that finds nothing must be able to find something. So at the end `verify` moves
one tensor of the compiled optimizer by one ulp, and does one more step with both. If
the comparison misses that, the outcome is `proves nothing`. A step that ran in eager
has the outcome `eager`, because nothing was compared. The exit status is 0 if every
outcome is `equal`.

The tables below cover all optimizers of the packages. `python -m
tests.tools.conformance` finds them, runs them and writes this page.
[conformance.json](conformance.json) has every row in full: shapes, events, launches,
differences, the control, warnings.

"""


def page(record: dict[str, Any]) -> str:
    """The text of docs/conformance.md."""
    rows = record["rows"]
    parts = [HEAD, *summary(record), "\n"]
    parts += ["\n".join(listed(rows)), "\n"]
    parts += [*others(rows), section()]
    return "".join(parts).rstrip() + "\n"


def summary(record: dict[str, Any]) -> Iterator[str]:
    """What was run, and how it came out, in figures."""
    rows = record["rows"]
    used = {MODULES[x["target"].partition(":")[0]] for x in rows} - {"torch"}
    packages = [f"{k} {v}" for k, v in record["packages"].items() if k in used]
    told = (
        f"fuseopt {record['fuseopt']}, torch {record['torch']}, Python "
        f"{record['python']}, {record['processor']}, one thread, on a CPU. Packages: "
        f"{', '.join(packages)}."
    )
    told = textwrap.fill(told, 88, break_on_hyphens=False)
    yield told + "\n\n"
    yield (
        "| outcome | " + " | ".join(DTYPES) + " |\n|---|" + "---:|" * len(DTYPES) + "\n"
    )
    for outcome, words in OUTCOMES.items():
        counts = [
            sum((x["outcome"], x["dtype"]) == (outcome, d) for x in rows)
            for d in DTYPES
        ]
        if any(counts):
            yield f"| {words} | " + " | ".join(map(str, counts)) + " |\n"
    control = [x for x in rows if x["outcome"] == "equal"]
    yield "\n" + textwrap.fill(
        f"In each of the {len(control)} runs with equal bits, the comparison saw the "
        "tensor that was moved by one ulp.",
        88,
    )
    yield "\n"


def listed(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The optimizers with equal bits in every dtype that was run, by their launches."""
    yield "## Equal bits\n"
    yield "In brackets: the launches of a step, if there are several. A `+` means that"
    yield "ATen calls run beside them.\n"
    yield "| package | dtype | optimizers |"
    yield "|---|---|---|"
    for module in MODULES:
        for dtype in DTYPES:
            names = [
                _named(x)
                for x in rows
                if x["target"].startswith(f"{module}:")
                and (x["dtype"], x["outcome"]) == (dtype, "equal")
            ]
            if names:
                yield f"| {module} | {dtype} | {', '.join(names)} |"


def _named(row: dict[str, Any]) -> str:
    name = row["target"].rpartition(":")[2]
    more = "" if row["launches"] == 1 else str(row["launches"])
    more += "+" if row["externs"] else ""
    return name + (f" ({more})" if more else "")


def others(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Everything else, and why."""
    for outcome, words in [*OUTCOMES.items()][1:]:
        these = [x for x in rows if x["outcome"] == outcome]
        if not these:
            continue
        yield f"\n## {words[0].upper()}{words[1:]}\n\n"
        if outcome == "differs":
            yield (
                "[Numerics](numerics.md#what-is-not-bit-for-bit) names what is not bit "
                "for bit,\nsuch as `dot`, which Prodigy and SWATS call.\n\n"
            )
        yield "| optimizer | dtype | reason |\n|---|---|---|\n"
        for x in these:
            yield f"| {x['target']} | {x['dtype']} | {_reason(x)} |\n"


def _reason(row: dict[str, Any]) -> str:
    first = row.get("differences") or [""]
    text = "; ".join(filter(None, (row["reason"], first[0])))
    return textwrap.shorten(text, 200).replace("|", "\\|")


def main() -> None:
    """Run what was asked for, and write the record and the page after each row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--packages", nargs="+", default=[*MODULES], metavar="MODULE")
    parser.add_argument("--dtypes", nargs="+", default=[*DTYPES], choices=DTYPES)
    parser.add_argument(
        "--missing", action="store_true", help="leave what the record has"
    )
    parser.add_argument("--page", action="store_true", help="from the record alone")
    parser.add_argument("--worker", metavar="MODULE", help=argparse.SUPPRESS)
    parser.add_argument("--skip", nargs="*", default=[], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(given.worker, given.dtypes, given.skip)
        return
    if given.page:
        PAGE.write_text(page(read()), encoding="utf-8")
        return
    for module in given.packages:
        try:
            imported(module)
        except ImportError as error:
            print(f"{module}: {error}", file=sys.stderr)
            continue
        rows = []
        begun = time.monotonic()
        known = [
            x["target"].partition(":")[2] + ":" + x["dtype"]
            for x in read()["rows"]
            if given.missing and x["target"].partition(":")[0] == module
        ]
        for row in run(module, given.dtypes, known):
            rows.append(row)
            took, begun = time.monotonic() - begun, time.monotonic()
            told = (row["target"], row["dtype"], row["outcome"], row["reason"][:100])
            print(f"{took:5.1f} s", *told, file=sys.stderr, flush=True)
            write(rows)  # a run that is ended keeps what it has


if __name__ == "__main__":
    main()

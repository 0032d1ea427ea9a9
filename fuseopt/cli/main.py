"""Parse and run the commands of `python -m fuseopt`: doctor, explain, verify, cache.

Text is plain if stdout is a pipe; `--json` prints one JSON object instead. Exit status:
0 for success, 1 for a failure, 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import os
import sys
import time
from collections.abc import Sequence

from .printed import print_json, print_report, print_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    given = _parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a character that the stream cannot encode must not end the command
            stream.reconfigure(errors="backslashreplace")
    try:
        status: int = given.run(given)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fuseopt", description="Inspect fuseopt and its steps."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor = commands.add_parser(
        "doctor", help="what works here, and how to install the rest"
    )
    doctor.add_argument("--verbose", action="store_true", help="list every check")
    doctor.set_defaults(run=_doctor)
    explain = commands.add_parser("explain", help="plan the step of an optimizer")
    explain.add_argument(
        "target",
        metavar="TARGET",
        help="FILE.py:OBJECT or MODULE:OBJECT, an optimizer, or a function that "
        "makes one",
    )
    explain.add_argument("--html", metavar="PAGE", help="also write an HTML page")
    explain.set_defaults(run=_explain)
    cache = commands.add_parser("cache", help="built kernels")
    cache.add_argument("what", choices=["ls", "clear", "path"])
    cache.set_defaults(run=_cache)
    verify = commands.add_parser(
        "verify", help="compare a compiled step with the plain one, bit for bit"
    )
    verify.add_argument(
        "targets",
        nargs="+",
        metavar="TARGET",
        help="FILE.py:OBJECT or MODULE:OBJECT, a class of optimizers, or a function "
        "that makes one, with parameters or of parameters that it is given",
    )
    verify.add_argument("--steps", type=int, default=12, help="at least 6")
    verify.add_argument(
        "--dtype", nargs="+", default=["float32"], help="of the parameters"
    )
    verify.add_argument("--device", default="cpu", help="of the parameters")
    verify.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="arguments that the target is called with, such as lr=0.1",
    )
    verify.set_defaults(run=_verify)
    for command in (doctor, explain, cache, verify):
        command.add_argument("--json", action="store_true", help="one JSON object")
    return parser


def _doctor(given: argparse.Namespace) -> int:
    from .checks import all_checks

    findings = []
    for check in all_checks():
        if given.verbose:
            print(f"asking: {getattr(check, '__name__', 'step')}", file=sys.stderr)
        findings.append(check())
    failed = any(finding.state == "fail" for finding in findings)
    if given.json:
        print_json({"findings": [dataclasses.asdict(x) for x in findings]})
        return int(failed)
    rows = []
    for finding in findings:
        mended = f"\n-> {finding.remedy}" if finding.remedy else ""
        rows.append((finding.state, finding.name, finding.text + mended))
    print_table((), rows)
    return int(failed)


def _explain(given: argparse.Namespace) -> int:
    from ..errors import FuseoptError
    from ..explanation import explain
    from .target import NoTarget, optimizer_of

    try:
        report = explain(optimizer_of(given.target))
        if given.html:
            report.save_html(given.html)
    except (NoTarget, FuseoptError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    if given.json:
        print_json(dataclasses.asdict(report))
    else:
        print_report(report)
    return int(bool(report.fallback))


def _verify(given: argparse.Namespace) -> int:
    from .verify import run

    return run(given)


def _cache(given: argparse.Namespace) -> int:
    from ..config import resolve
    from ..runtime.folders import chosen
    from .cache import clear, entries, megabytes

    path = chosen(resolve(None, None).cache_dir)
    if given.what == "path":
        print_json({"path": path}) if given.json else print(path)
        return 0
    try:
        if given.what == "clear":
            kernels, size = clear(path)
            if given.json:
                print_json({"path": path, "removed": kernels, "bytes": size})
            else:
                print(f"{kernels:,} kernels, {megabytes(size)} removed from {path}")
            return 0
        every = list(entries(path))
    except FileNotFoundError:
        every = []
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    if given.what == "ls" and not given.json:
        rows = []
        for entry in every:
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.built))
            rows.append((entry.key, when, f"{entry.bytes:,}"))
        print_table(("kernel", "built", "bytes"), rows)
        print(f"{len(every):,} kernels in {path}")
        return 0
    listed = [dataclasses.asdict(entry) for entry in every]
    print_json({"path": path, "kernels": listed})
    return 0

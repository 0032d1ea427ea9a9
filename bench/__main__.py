"""Measure, write pages, compare.

python -m bench run [--device cuda] [--suite full] [--again] [-k steps] ...
python -m bench report
python -m bench compare OLD.json NEW.json
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run", help="measure; what follows goes to pytest")
    commands.add_parser("report", help="write docs/benchmarks.md and README's table")
    two = commands.add_parser("compare", help="two results files; 1 if counts differ")
    two.add_argument("old", type=Path)
    two.add_argument("new", type=Path)
    options, rest = parser.parse_known_args(arguments)
    if options.command == "run":
        return run(rest)
    if rest:
        parser.error(f"unknown: {' '.join(rest)}")
    if options.command == "report":
        from bench.report import write

        print(*write(), sep="\n")
        return 0
    return compare_files(options.old, options.new)


def run(rest: list[str]) -> int:
    """Run the benchmarks; pytest's own time limit would end what compiles for long."""
    quiet = ["-q", "--no-header", "--benchmark-only", "--benchmark-quiet"]
    command = [sys.executable, "-m", "pytest", str(HERE), *quiet, "--timeout", "0"]
    return subprocess.run([*command, *rest], cwd=HERE.parent).returncode


def compare_files(old: Path, new: Path) -> int:
    """Print what differs; 1 where exact counts do."""
    from bench.compare import compare
    from bench.results import read

    found = compare(read(old), read(new))
    for line in found.warnings:
        print(f"warning: {line}")
    for line in found.failures:
        print(f"FAILED: {line}")
    print(f"{found.cases} cases; {len(found.failures)} counts differ")
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())

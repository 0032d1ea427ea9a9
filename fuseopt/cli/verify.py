"""Compare a compiled step with the plain one: `python -m fuseopt verify`."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import os
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from .printed import print_json, print_table

if TYPE_CHECKING:
    from ..conformance.verify import Result

#: Names of the dtypes that parameters may have.
DTYPES = ("float32", "float64", "bfloat16", "float16", "complex64")
COLUMNS = ("target", "dtype", "outcome", "launches", "reason")


def run(given: argparse.Namespace) -> int:
    """Verify each target in each dtype; return 0 if all results are equal, else 1."""
    # a profiler counts launches; torch's profiler prints a line to stderr at its start
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    import torch

    from ..conformance.subject import NotRepeatable, Subject
    from ..conformance.verify import verify
    from .target import NoTarget, found

    results = []
    try:
        options = dict(map(option, given.set))
        for target in given.targets:
            made = found(target)
            if not callable(made):
                raise NoTarget(
                    f"{target} is a {type(made).__name__}, which cannot be made twice: "
                    "name a class of optimizers, or a function that makes one"
                )
            for name in given.dtype:
                if name not in DTYPES:
                    raise NoTarget(f"--dtype {name}: known are {', '.join(DTYPES)}")
                dtype = getattr(torch, name)
                subject = Subject(target, made, options, dtype, given.device)
                results.append(verify(subject, given.steps))
    except (NoTarget, NotRepeatable) as error:
        print(error, file=sys.stderr)
        return 1
    if given.json:
        print_json({"results": [dataclasses.asdict(x) for x in results]})
    else:
        print_table(COLUMNS, [*map(row, results)])
        print()
        print(*(line for x in results for line in lines_of(x)), sep="\n")
    return int(any(x.outcome != "equal" for x in results))


def option(text: str) -> tuple[str, Any]:
    """Parse `lr=0.1` into a name and a value: a Python literal, or else the text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        from .target import NoTarget

        raise NoTarget(f"--set {text!r} is not of the form NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def row(result: Result) -> tuple[str, ...]:
    """Return the cells of a result."""
    launches = "–" if result.launches is None else str(result.launches)
    return (result.target, result.dtype, result.outcome, launches, result.reason)


def lines_of(result: Result) -> Iterator[str]:
    """Yield lines of text that describe a result."""
    if not result.elements:
        return
    name = f"{result.target}, {result.dtype}"
    yield (
        f"{name}: {result.parameters} parameters ({result.shapes} shapes), "
        f"{result.elements:,} elements, {result.steps} steps; {_listed(result.done)}"
    )
    for event, reason in result.left_out:
        yield f"  left out: {event} ({reason})"
    yield from (f"  differs: {x}" for x in result.differences)
    if result.control:
        yield f"  control, by an ulp: {result.control}"
    yield from (f"  {x}" for x in result.warnings)


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words) or "fresh gradients alone"

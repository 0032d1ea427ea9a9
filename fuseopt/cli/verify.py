"""`python -m fuseopt verify`: has a compiled step the bits of the plain one?"""

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

#: Types that parameters can be given in, by the name that torch has for them.
DTYPES = ("float32", "float64", "bfloat16", "float16", "complex64")
COLUMNS = ("target", "dtype", "outcome", "launches", "why")


def run(given: argparse.Namespace) -> int:
    """Verify each target in each dtype; 0 where every one is equal."""
    # a profiler counts launches, and torch's says on stderr when it begins
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
        print(*(line for x in results for line in told(x)), sep="\n")
    return int(any(x.outcome != "equal" for x in results))


def option(text: str) -> tuple[str, Any]:
    """`lr=0.1` -> a name and a value: a literal of Python, or else the text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        from .target import NoTarget

        raise NoTarget(f"--set {text!r} is not of the form NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def row(result: Result) -> tuple[str, ...]:
    """The cells of a result."""
    launches = "–" if result.launches is None else str(result.launches)
    return (result.target, result.dtype, result.outcome, launches, result.why)


def told(result: Result) -> Iterator[str]:
    """What was done, in lines."""
    if not result.elements:
        return
    name = f"{result.target}, {result.dtype}"
    yield (
        f"{name}: {result.parameters} parameters ({result.shapes} shapes), "
        f"{result.elements:,} elements, {result.steps} steps; {_listed(result.done)}"
    )
    for event, why in result.left_out:
        yield f"  left out: {event} ({why})"
    yield from (f"  differs: {x}" for x in result.differences)
    if result.control:
        yield f"  control, by an ulp: {result.control}"
    yield from (f"  {x}" for x in result.told)


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words) or "fresh gradients alone"

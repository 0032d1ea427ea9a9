"""Count what becomes of traps: recorded with the bits of eager, refused, wrong."""

from __future__ import annotations

import collections
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from tests.beside import WAYS, Loud, Silent, apart

from .way import recorded


def uniformity() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The traps of tests/uniformity/traps."""
    from tests.uniformity.test_traps import TRAPS, judge

    for trap in TRAPS:
        yield trap, lambda trap=trap: judge(trap, apart)


def divergence() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Those of tests/uniformity/divergence, and its harmless optimizers."""
    from tests.steps import differences
    from tests.uniformity.divergence import harmless
    from tests.uniformity.test_divergence import TRAPS, run

    def check(kind: Any) -> None:
        want, plain, theirs = run(kind, compiled=False)
        got, opt, mine = run(kind, compiled=True)
        for n, (a, b) in enumerate(zip(want, got, strict=True)):
            if not all(map(torch.equal, a, b)):
                raise Silent(f"step {n}")
        if differences(theirs, plain, mine, opt):
            raise Silent("after the last step")

    for kind in [*TRAPS, *harmless.HARMLESS]:
        yield f"divergence.{kind.__name__}", lambda kind=kind: check(kind)


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The scenarios of tests/cases."""
    from tests.cases import test_scenarios as found

    for case in found.CASES:
        name, lanes, way = case
        yield (
            f"cases.{name}.{lanes}.{way}",
            lambda n=name, k=lanes, w=way: found.judge(n, k, WAYS[w]),
        )


def count(traps: Iterator[tuple[str, Callable[[], Any]]]) -> None:
    """Run traps; print a line of JSON for each, and the counts."""
    from fuseopt.replicate import worth

    counts: collections.Counter[str] = collections.Counter()
    with mock.patch.object(worth, "FEW", 4):
        for name, run in traps:
            with recorded() as every:
                try:
                    run()
                    bits = "right"
                except (Silent, Loud) as error:
                    bits = f"WRONG {type(error).__name__} {error}"
                except Exception as error:
                    bits = f"ERROR {type(error).__name__} {error}"
                mine = [x for x in every if sum(x.steps)] or every
                steps = [x.steps for x in mine]
                whys = [x.recorder.why for x in mine if x.recorder.why]
            by = sum(s[0] for s in steps)
            how = "recorded" if not whys else "in part" if by else "refused"
            if not steps:
                how = "not asked"
            counts[f"{how}: {bits.partition(' ')[0]}"] += 1
            print(json.dumps([name, how, bits[:300], steps, whys[:1]]), flush=True)
    print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    count(globals()[sys.argv[1]]())

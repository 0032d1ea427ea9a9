"""Random optimizers: the bits of eager both ways in, or a refusal that wrote nothing.

Each is a class in a file of its own, stepped four to six times beside a plain eager
twin, while a user changes numbers, tables, attributes and state. After every step all
that either holds must be the same. A few here, always the same ones; each piece alone
in the slow tests; 2,000 in `make fuzz` (tests/tools/fuzz.py), other ones each time. A
failure prints the smallest class that still fails; `python -m
tests.numerics.test_fuzz_optimizers SEED ...` runs those of given seeds, or of ranges.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fuseopt.replicate import worth
from tests.beside import PATHS, WAYS, Loud, Run, Silent, beside, dynamo
from tests.numerics.fuzz_optimizers import FEW_LANES, Drawn, alone, random_optimizer
from tests.numerics.fuzz_pieces import ALL, EVENTS
from tests.numerics.fuzz_process import settle

Way = Callable[[Any], Callable[[], Any]]
#: What a failure may cost to be made small.
TRIALS = 40


def check(drawn: Drawn, way: str | Way, folder: Path) -> str:
    """What became of the step of a random optimizer. Raises Silent, Loud."""
    path = folder / f"optimizer_{drawn.seed}.py"
    path.write_text(drawn.text(), encoding="utf-8")

    def build(module: ModuleType) -> Run:
        ps, opt = module.build()
        return Run(module, ps, opt, lambda turn: module.before(turn, opt, ps))

    how = WAYS[way] if isinstance(way, str) else way
    found = beside(path, build, how, drawn.turns)
    if found == "dynamo" and way is not dynamo:
        if check(drawn, dynamo, folder) != "dynamo":
            raise Loud("it raises what Dynamo alone does not")
    return found


def failure(drawn: Drawn, way: Any, folder: Path) -> Exception | None:
    try:
        check(drawn, way, folder)
    except Exception as error:
        return error
    return None


def smaller(drawn: Drawn) -> Iterator[Drawn]:
    """The same with one thing less, what matters most first."""
    if drawn.turns > 2:
        yield replace(drawn, turns=drawn.turns - 1)
    for n in range(len(drawn.pieces)):
        yield replace(drawn, pieces=drawn.pieces[:n] + drawn.pieces[n + 1 :])
    for n in range(len(drawn.events)):
        yield replace(drawn, events=drawn.events[:n] + drawn.events[n + 1 :])
    if drawn.ends:
        yield replace(drawn, ends=(), rates=drawn.rates[:1])
    if len(drawn.kinds) > 1:
        for n in range(len(drawn.kinds)):
            yield replace(drawn, kinds=drawn.kinds[:n] + drawn.kinds[n + 1 :])
    ordinary = {
        "form": "loop",
        "order": "plain",
        "write": "p.add_(upd, alpha=-rate)",
        "grad_mode": "decorator",
        "kinds": ("((5,), torch.float32)",),
    }
    for name, value in ordinary.items():
        if getattr(drawn, name) != value:
            yield replace(drawn, **{name: value})  # type: ignore[arg-type]


def kind(error: Exception | None) -> tuple[type, str]:
    return type(error), error.kind() if isinstance(error, Silent) else ""


def smallest(drawn: Drawn, way: Any, folder: Path, error: Exception) -> Any:
    """The smallest that still fails in the same way, and how it does."""
    trials = 0
    again = True
    while again:
        again = False
        for other in smaller(drawn):
            trials += 1
            if trials > TRIALS:
                return drawn, error
            found = failure(other, way, folder)
            if kind(found) == kind(error):
                drawn, error, again = other, found, True
                break
    return drawn, error


def judge(drawn: Drawn, folder: Path, ways: Sequence[str] = PATHS) -> dict[str, str]:
    """What became of a step, each way; raises with the smallest that fails."""
    told = {}
    for way in ways:
        try:
            told[way] = check(drawn, way, folder)
        except Exception as error:
            small, last = smallest(drawn, way, folder, error)
            also = failure(small, dynamo, folder)
            whose = "Dynamo alone is right" if also is None else f"Dynamo alone: {also}"
            pieces = ", ".join(name for name, _ in drawn.pieces)
            raise AssertionError(
                f"seed {drawn.seed}, {way}: {type(last).__name__}: {last}\n"
                f"({whose}; drawn: {pieces})\n{small}"
            ) from last
    return told


def judge_seed(seed: int, folder: Path) -> dict[str, str]:
    """Of most seeds an optimizer of few lanes, which are led as many are; and one way
    in, since Dynamo's trace is what a seed costs.
    """
    ways = [*WAYS] if seed % 12 == 0 else [[*WAYS][seed % len(WAYS)]]
    if seed % 10 == 0:
        return judge(random_optimizer(seed), folder, ways)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worth, "FEW", min(FEW_LANES))
        return judge(random_optimizer(seed, FEW_LANES), folder, ways)


class Told:
    """How often each way was led, whole and so on."""

    def __init__(self) -> None:
        self.ways: dict[str, Counter[str]] = {}

    def add(self, found: dict[str, str]) -> None:
        for way, what in found.items():
            self.ways.setdefault(way, Counter())[what.partition(":")[0]] += 1

    def __str__(self) -> str:
        return "; ".join(
            f"{way}: " + ", ".join(f"{n} {what}" for what, n in sorted(count.items()))
            for way, count in self.ways.items()
        )

    def check(self) -> None:
        """Nothing passes by refusing all, or by leaving all to eager. Steps that raise
        in eager too do not count.
        """
        for way, count in self.ways.items():
            total = count.total() - count["raised"]
            compiled = count["led"] + count["whole"]
            assert compiled > total / 2, f"{way}: {count}"
            assert count["refused"] + count["dynamo"] <= total / 8, f"{way}: {count}"
        assert self.ways["compile"]["led"] > 0, str(self)


def test_some_random_optimizers(tmp_path: Path) -> None:
    told = Told()
    for seed in range(6):
        told.add(judge(random_optimizer(seed), tmp_path))
    print(told)
    told.check()


def each_alone() -> Iterator[tuple[str, Drawn]]:
    """Each piece with each of its events, and what users do to any optimizer."""
    for name, sections in ALL.items():
        for n, event in enumerate(sections.get("event", [""])):
            yield f"{name}-{n}", alone([name], event)
    for n, event in enumerate(EVENTS):
        names = ["momentum", "a number of each lane's state"]
        yield f"{event[:40]}-{n}", alone(names, event)


ALONE = dict(each_alone())


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_each_piece_alone(name: str, tmp_path: Path) -> None:
    judge(ALONE[name], tmp_path)


def main(seeds: Sequence[str]) -> int:
    """Run seeds, or ranges such as 0-99; print each that fails, small, and all told."""
    wrong, told = 0, Told()
    settle()
    with tempfile.TemporaryDirectory() as name:
        for text in seeds:
            first, _, last = text.partition("-")
            for seed in range(int(first), int(last or first) + 1):
                try:
                    told.add(judge_seed(seed, Path(name)))
                except AssertionError as error:
                    wrong += 1
                    print(f"{'=' * 80}\n{error}", flush=True)
    print(f"{wrong} wrong; {told}")
    return min(wrong, 99)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Random bodies of a step, which read and write views: the bits of eager, or a Report.

Of each body all that parameters and state hold is compared after each of three steps,
and which of it shares memory. A failure prints the smallest body that still fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from tests.beside import Run, apart, beside
from tests.numerics.fuzz_bodies import Body, random_body
from tests.numerics.fuzz_stores import Stores
from tests.numerics.test_fuzz_programs import fewest, fuzz

TURNS = 3


def check(body: Body | Stores, folder: Path, turns: int = TURNS) -> str:
    """What became of a random step. Raises Silent, Loud."""
    path = folder / f"drawn_{body.seed}.py"
    path.write_text(body.text(), encoding="utf-8")

    def build(module: ModuleType) -> Run:
        ps, opt = module.build()
        return Run(module, ps, opt, lambda turn: None)

    return beside(path, build, apart, turns)


def judge(body: Body | Stores, folder: Path, turns: int = TURNS) -> None:
    """Raise with the smallest step that fails, if this one does."""

    def failure(lines: Sequence[str]) -> Exception | None:
        try:
            if lines:
                check(replace(body, lines=tuple(lines)), folder, turns)
        except Exception as error:
            return error
        return None

    lines, found = fewest(body.lines, failure)
    if found is not None:
        smallest = replace(body, lines=tuple(lines))
        raise AssertionError(f"{found}\n{smallest.text()}") from found


@fuzz(3)
def test_bodies(tmp_path: Path, seed: int) -> None:
    judge(random_body(seed), tmp_path)

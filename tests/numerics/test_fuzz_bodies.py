"""Random bodies of a step, which read and write views: the bits of eager, or a Report.

Of each body all that parameters and state hold is compared after each of three steps,
and which of it shares memory. A failure prints the smallest body that still fails.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

from tests.beside import Run, apart, beside
from tests.numerics.fuzz_bodies import Body, random_body
from tests.numerics.test_fuzz_programs import fuzz

TURNS = 3


def check(body: Body, folder: Path) -> str:
    """What became of the step of a random body. Raises Silent, Loud."""
    path = folder / f"body_{body.seed}.py"
    path.write_text(body.text(), encoding="utf-8")

    def build(module: ModuleType) -> Run:
        ps, opt = module.build()
        return Run(module, ps, opt, lambda turn: None)

    return beside(path, build, apart, TURNS)


def failure(body: Body, folder: Path) -> Exception | None:
    try:
        check(body, folder)
    except Exception as error:
        return error
    return None


def judge(body: Body, folder: Path) -> None:
    """Raise with the smallest body that fails, if this one does."""
    found = failure(body, folder)
    if found is None:
        return
    at = 0
    while at < len(body.lines):
        fewer = replace(body, lines=body.lines[:at] + body.lines[at + 1 :])
        again = failure(fewer, folder) if fewer.lines else None
        if type(again) is type(found):
            body, found = fewer, again
        else:
            at += 1
    raise AssertionError(f"{found}\n{body.text()}") from found


@fuzz(6)
def test_bodies(tmp_path: Path, seed: int) -> None:
    judge(random_body(seed), tmp_path)

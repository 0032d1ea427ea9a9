"""Code of a user's objects is called as often as in eager, and no more.

Neither an analysis of a step, nor a rehearsal, nor what stands for an optimizer, nor a
guard calls a method of an object that the optimizer holds: only the step does. Dynamo
itself asks objects that it takes in for their hashes, whatever the backend.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.beside import WAYS, beside
from tests.sources.dunders import PASSIVE, UNREAD, unread
from tests.sources.test_sources import SourceRun

TURNS = 3
#: Where Dynamo takes in an object, and asks for its hash, though no code reads it.
TAKEN_IN = ("group", "state", "key-of-state", "key-of-states", "key-of-group")


class CountedRun(SourceRun):
    """Only what is called from the outside of the comparison counts."""

    def frozen(self) -> dict[str, Any]:
        module: Any = self.module
        before = module._COUNTS.copy()
        try:
            return super().frozen()
        finally:
            module._COUNTS.clear()
            module._COUNTS.update(before)


def judge(text: str, lanes: int, way: Any, folder: Path) -> str:
    """What became of the step. Raises Silent, Loud."""
    path = folder / "counted.py"
    path.write_text(text)

    def build(module: Any) -> CountedRun:
        ps, opt = module._build(lanes, torch.float32)
        module.LEFT = None
        return CountedRun(module, ps, opt, lambda turn: None)

    return beside(path, build, way, TURNS)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [4, 18])
@pytest.mark.parametrize("way", ["compile"])
@pytest.mark.parametrize("place", [x for x in UNREAD if x not in TAKEN_IN])
def test_an_object_that_nobody_reads(
    place: str, way: str, lanes: int, tmp_path: Path
) -> None:
    judge(unread(place, PASSIVE), lanes, WAYS[way], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [4, 18])
@pytest.mark.parametrize("way", ["compile"])
@pytest.mark.parametrize("place", ["group", "state"])
def test_of_what_dynamo_takes_in_only_hashes_are_asked(
    place: str, way: str, lanes: int, tmp_path: Path
) -> None:
    """docs/limits.md names this exception."""
    others = [x for x in PASSIVE if x not in ("__hash__", "__eq__", "__ne__")]
    judge(unread(place, others), lanes, WAYS[way], tmp_path)

"""Launches and collectives do not grow with the processes, nor with the parameters."""

from __future__ import annotations

import re

import pytest
import torch

from bench import scale
from tests import ROOT


@pytest.mark.parametrize(
    ("copies", "world"), [(1, 8), pytest.param(4, 1024, marks=pytest.mark.slow)]
)
def test_launches_and_collectives(
    copies: int, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale, "ROUNDS", 1)
    shapes = [(4096, 6), (17, 5), (9,)] * copies
    found = scale.measured(shapes, world)
    assert found["launches"] == [1, 2]
    # the norm of each tensor is added up
    assert found["collectives"] == 1
    assert found["collective_bytes"] == 4 * len(shapes)
    # four numbers are read, three written, of what this process has
    assert found["bytes"] == 28 * scale.here(shapes, world)


def test_the_rows_of_the_last_process() -> None:
    for rows in (1, 7, 8, 9, 4096):
        for world in (1, 4, 8, 1024):
            parts = torch.empty(rows, 1).chunk(world)
            last = len(parts[-1]) if len(parts) == world else 0
            assert scale.rows_here(rows, world) == last


def test_the_page_has_all_cases() -> None:
    page = (ROOT / "docs" / "shards.md").read_text(encoding="utf-8")
    (block,) = scale.BLOCK.findall(page)
    rows = re.findall(r"^\| ([\d,]+) \| ([\d,]+) \|", block, re.MULTILINE)
    count = len(scale.model_shapes(scale.MODEL))
    cases = [(f"{count * copies:,}", f"{world:,}") for copies, world in scale.CASES]
    assert rows == cases

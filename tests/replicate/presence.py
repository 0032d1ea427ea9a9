"""Sets of gradients that come and go, and what a step makes anew for them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from fuseopt.compiler import pipeline
from fuseopt.replicate.step import LedStep


class Counts:
    """How often something was extended, or planned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.extended = self.planned = 0
        extended, planned = LedStep._extended, pipeline.plan_graph

        def extend(*args: Any) -> Any:
            self.extended += 1
            return extended(*args)

        def plan(*args: Any, **named: Any) -> Any:
            self.planned += 1
            return planned(*args, **named)

        monkeypatch.setattr(LedStep, "_extended", extend)
        monkeypatch.setattr(pipeline, "plan_graph", plan)

    def both(self) -> tuple[int, int]:
        return self.extended, self.planned


def some(rng: random.Random, n: int, first: int = 0) -> set[int]:
    """The lanes that lack a gradient: a third of those from `first` on, never all."""
    missing = {i for i in range(first, n) if rng.random() < 1 / 3}
    return missing if len(missing) < n else set()

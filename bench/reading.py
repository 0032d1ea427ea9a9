"""In: a results file. Out: what its figures say: ratios, fractions, means.

A ratio is only ever taken between contenders of one case, which took turns in one run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.optimizers import RECIPES
from bench.results import FOLDER, Figures, read

OWN = "fuseopt"
TORCH = ("for-loop", "foreach", "fused", "inductor", "inductor-graphs")
NAMES = {"SGD": "SGD-momentum"}
#: behind the name of a contender whose gradients move at each call
MOVED = ", moved"
#: from so many elements on a model does not fit a cache
LARGE = 20_000_000


@dataclass(frozen=True)
class Step:
    """A step case: its name's parts, and its figures."""

    model: str
    optimizer: str
    dtype: str
    figures: Figures

    def seconds(self, contender: str) -> float | None:
        """Median seconds of a contender; None where it did not run."""
        return self.figures["contenders"].get(contender, {}).get("p50")

    def count(self, contender: str, what: str) -> int | float | None:
        """Any other figure of a contender; None where there is none."""
        return self.figures["contenders"].get(contender, {}).get(what)

    def told(self, contender: str, what: str) -> str | None:
        """What a contender says of itself in words."""
        return self.figures["contenders"].get(contender, {}).get(what)

    def others(self) -> dict[str, float]:
        """Seconds of all that do the step and are not fuseopt."""
        found = {}
        for name in self.figures["contenders"]:
            seconds = self.seconds(name)
            if name not in (OWN, "copy") and seconds is not None:
                found[name] = seconds
        return found

    def times(self, contender: str) -> float | None:
        """How many times fuseopt's seconds a contender takes."""
        own, other = self.seconds(OWN), self.seconds(contender)
        return other / own if own and other else None

    def best_other(self) -> tuple[str, float] | None:
        """The fastest of the others, and how many times fuseopt's seconds it takes."""
        others, own = self.others(), self.seconds(OWN)
        if not others or not own:
            return None
        name = min(others, key=others.__getitem__)
        return name, others[name] / own

    def of_copy(self, contender: str = OWN) -> float | None:
        """The least bytes of the step per second, as a fraction of the copy's."""
        own, copied = self.seconds(contender), self.seconds("copy")
        moved = self.count("copy", "bytes")
        if own is None or copied is None or moved is None:
            return None
        return (self.figures["least_bytes"] / own) / (moved / copied)

    @property
    def large(self) -> bool:
        return self.figures["elements"] > LARGE


class Reading:
    """A results file, by kind of case."""

    def __init__(self, path: Path) -> None:
        content = read(path)
        self.path = path
        self.environment: Figures = content["environment"]
        self.cases: dict[str, Figures] = content["cases"]

    @property
    def codes(self) -> set[str]:
        """The versions of the code that the figures come from."""
        return {case["code"] for case in self.cases.values()}

    @property
    def dates(self) -> list[str]:
        return sorted({case["date"] for case in self.cases.values()})

    def steps(
        self, optimizer: str | None = None, dtype: str | None = None
    ) -> list[Step]:
        """Step cases whose model could be had, small models first."""
        found = [
            Step(model, name, kind, figures)
            for (model, name, kind), figures in self._named("step")
            if "contenders" in figures
            and optimizer in (None, name)
            and dtype in (None, kind)
        ]
        order = list(RECIPES)
        return sorted(
            found,
            key=lambda s: (order.index(s.optimizer), s.dtype, s.figures["elements"]),
        )

    def first(self, way: str, cache: str) -> dict[int, Figures]:
        """First steps over small parameters, by their number."""
        found = {
            int(params): figures[cache]
            for (params, named), figures in self._named("first")
            if params.isdigit() and named == way and cache in figures
        }
        return dict(sorted(found.items()))

    def first_of_models(self) -> dict[str, dict[str, Figures]]:
        """Cold first steps by model, few tensors first, and by way."""
        cases = [case for case in self._named("first") if not case[0][0].isdigit()]
        found: dict[str, dict[str, Figures]] = {}
        for (model, way), figures in sorted(
            cases, key=lambda case: (case[1]["tensors"], case[0])
        ):
            cold = {"tensors": figures["tensors"], **figures["cold"]}
            found.setdefault(model, {})[way] = cold
        return found

    def host(self) -> dict[int, Figures]:
        """Host cases by number of parameters."""
        found = {int(name[0]): figures for name, figures in self._named("host")}
        return dict(sorted(found.items()))

    def training(self) -> dict[str, Figures]:
        """Training cases by model."""
        return {name[0]: figures for name, figures in self._named("training")}

    def tails(self) -> dict[str, Figures]:
        """Tail cases by model."""
        return {name[0]: figures for name, figures in self._named("tail")}

    def shards(self) -> dict[int, Figures]:
        """Cases of DTensors by number of parameters."""
        found = {int(name[0]): figures for name, figures in self._named("shards")}
        return dict(sorted(found.items()))

    def skipped(self) -> dict[str, dict[str, int]]:
        """By contender: each reason for which it did not run, and in how many cases."""
        found: dict[str, dict[str, int]] = {}
        for figures in self.cases.values():
            for name, told in figures.get("contenders", {}).items():
                if "skipped" in told:
                    reasons = found.setdefault(name, {})
                    reasons[told["skipped"]] = reasons.get(told["skipped"], 0) + 1
        for name, case in self.cases.items():
            if "skipped" in case:
                found.setdefault(name, {})[case["skipped"]] = 1
        return found

    def _named(self, kind: str) -> Iterator[tuple[list[str], Figures]]:
        for name, figures in self.cases.items():
            first, *rest = name.split("/")
            if first == kind:
                yield rest, figures


def readings(folder: Path = FOLDER) -> list[Reading]:
    """Return all results files, those of CPUs first, then by name.

    What `make gpu` writes beside them has sections instead of cases, and is left out.
    """
    paths = [path for path in sorted(folder.glob("*.json")) if "cases" in read(path)]
    found = [Reading(path) for path in paths]
    return sorted(found, key=lambda r: r.environment["device"] != "cpu")


def geomean(ratios: Iterable[float | None]) -> float | None:
    """Return the geometric mean of those there are."""
    known = [math.log(ratio) for ratio in ratios if ratio]
    return math.exp(sum(known) / len(known)) if known else None

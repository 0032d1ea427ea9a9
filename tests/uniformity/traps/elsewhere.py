"""What a step changes that the optimizer does not hold, or not alone: a rehearsal has
no double of it, and would change it for good.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from tests.uniformity.traps.base import Trap

TABLE: dict[str, Any] = {"calls": 0, "inner": {"calls": 0}, "rates": []}
RATES: list[float] = []


class Counted(Trap):
    """Each call counts itself in a table, and its rate is what was counted."""

    def count(self) -> float:
        TABLE["calls"] += 1
        return 1.0 + TABLE["calls"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        rate = self.count()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * rate)


class CountedWithin(Counted):
    def count(self):
        TABLE["inner"]["calls"] += 1
        return 1.0 + TABLE["inner"]["calls"]


class CountedByNames(Counted):
    def count(self):
        inner = TABLE["inner"]
        inner["calls"] = inner["calls"] + 1
        return 1.0 + inner["calls"]


class AppendedTo(Counted):
    def count(self):
        RATES.append(self.param_groups[0]["lr"])
        return 1.0 + len(RATES)


class AppendedWithin(Counted):
    def count(self):
        TABLE["rates"].append(2.0)
        return 1.0 + len(TABLE["rates"])


class CountedByTheClass(Counted):
    table: ClassVar[dict[str, int]] = {"calls": 0}

    def count(self):
        self.table["calls"] += 1
        return 1.0 + self.table["calls"]


class CountedByADefault(Counted):
    def count(self, table={"calls": 0}):  # noqa: B006
        table["calls"] += 1
        return 1.0 + table["calls"]


def counting():
    table = {"calls": 0}

    def count():
        table["calls"] += 1
        return 1.0 + table["calls"]

    return count


class CountedByAClosure(Counted):
    counted = staticmethod(counting())

    def count(self):
        return self.counted()


class CountedByAnAttributeOfAFunction(Counted):
    def count(self):
        counting.calls = getattr(counting, "calls", 0) + 1
        return 1.0 + counting.calls


class HeldAndGlobal(Counted):
    """The optimizer holds the table, and the step finds it as a global."""

    def ready(self, ps):
        self.table = TABLE


class HeldAndReadElsewhere(HeldAndGlobal):
    def count(self):
        self.table["calls"] += 1
        return 1.0 + TABLE["calls"]


class HeldAndAppended(Counted):
    """The optimizer's list is also the user's."""

    def ready(self, ps):
        self.rates = RATES

    def count(self):
        self.rates.append(2.0)
        return 1.0 + len(self.rates)


class OfTheGroup(Counted):
    """A group's list is also the user's."""

    def groups(self, ps):
        return [{"params": ps, "rates": RATES}]

    def count(self):
        self.param_groups[0]["rates"].append(2.0)
        return 1.0 + len(self.param_groups[0]["rates"])


class TwiceOfItself(Counted):
    """One list, two attributes."""

    def ready(self, ps):
        self.rates = self.others = [1.0]

    def count(self):
        self.rates.append(2.0)
        return 1.0 + len(self.others)


class WithinItself(Counted):
    def ready(self, ps):
        self.rates = [1.0]
        self.table = {"rates": self.rates}

    def count(self):
        self.table["rates"].append(2.0)
        return 1.0 + len(self.rates)


class CountedByItself(Counted):
    """Harmless: the table is the optimizer's alone."""

    def ready(self, ps):
        self.table = {"calls": 0}

    def count(self):
        self.table["calls"] += 1
        return 1.0 + self.table["calls"]

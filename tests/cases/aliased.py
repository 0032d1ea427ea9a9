"""A group, a state or a table that an optimizer holds in two places."""

from __future__ import annotations

import torch

from tests.cases.base import Once, Scenario


class Halved(Once):
    """A step halves the rate of the first group, which it finds in another place."""

    abstract = True

    def groups(self, ps):
        half = len(ps) // 2
        return [{"params": ps[:half]}, {"params": ps[half:], "lr": 0.2}]

    def first(self):
        raise NotImplementedError

    def once(self):
        self.first()["lr"] *= 0.5
        return 1.0


class GroupInAttribute(Halved):
    def ready(self, ps):
        self.base = self.param_groups[0]

    def first(self):
        return self.base


class GroupInList(Halved):
    def ready(self, ps):
        self.bases = [*self.param_groups]

    def first(self):
        return self.bases[0]


class GroupInTuple(Halved):
    def ready(self, ps):
        self.bases = (self.param_groups[0], 1)

    def first(self):
        return self.bases[0]


class GroupInTable(Halved):
    def ready(self, ps):
        self.bases = {"first": self.param_groups[0]}

    def first(self):
        return self.bases["first"]


class GroupsInAttribute(Halved):
    def ready(self, ps):
        self.bases = self.param_groups

    def first(self):
        return self.bases[0]


class GroupInEarlierGroup(Halved):
    def ready(self, ps):
        self.param_groups[0]["next"] = self.param_groups[1]

    def first(self):
        return self.param_groups[0]["next"]


class GroupInLaterGroup(Halved):
    def ready(self, ps):
        self.param_groups[1]["before"] = self.param_groups[0]

    def first(self):
        return self.param_groups[1]["before"]


class GroupInState(Halved):
    def ready(self, ps):
        self.state[ps[1]] = {"group": self.param_groups[0]}
        self.holder = ps[1]

    def first(self):
        return self.state[self.holder]["group"]


class GroupReadElsewhere(Scenario):
    """A step writes to a group, and reads what it wrote in another place."""

    def ready(self, ps):
        self.base = self.param_groups[0]

    def scale(self, p, group):
        group["k"] = group.get("k", 300) + 1
        return 1 / self.base["k"]


class GroupHeldLater(Halved):
    """The group is hung on the optimizer between two steps."""

    def before(self, turn, ps):
        if turn == 3:
            self.base = self.param_groups[0]

    def first(self):
        return getattr(self, "base", self.param_groups[1])


class StateInAttribute(Scenario):
    """A step counts in the state of one lane, which it finds in another place."""

    def ready(self, ps):
        for p in ps:
            self.state[p] = {"n": 300}
        self.one = self.state[ps[1]]

    @torch.no_grad()
    def step(self, closure=None):
        self.one["n"] += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / self.state[p]["n"])


class StateReadElsewhere(StateInAttribute):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["n"] += 1
                p.add_(p.grad, alpha=-group["lr"] / self.one["n"])


class StateHeldLater(StateReadElsewhere):
    """The state that others read is another one from the fourth step on."""

    def before(self, turn, ps):
        if turn == 3:
            self.one = self.state[ps[2]]


class StatesInAttribute(StateInAttribute):
    def ready(self, ps):
        super().ready(ps)
        self.every = self.state

    @torch.no_grad()
    def step(self, closure=None):
        for state in self.every.values():
            state["n"] += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / self.state[p]["n"])


class TableOfTwoGroups(Scenario):
    def groups(self, ps):
        table = {"k": 300}
        half = len(ps) // 2
        return [{"params": x, "table": table} for x in (ps[:half], ps[half:])]

    def scale(self, p, group):
        group["table"]["k"] += 1
        return 1 / group["table"]["k"]


class OptimizerInClosure(Once):
    """A function that the optimizer holds counts on it."""

    def ready(self, ps):
        itself = self
        self.k = 300

        def count():
            itself.k += 1

        self.count = count

    def once(self):
        self.count()
        return 1 / self.k


class OptimizerReadInClosure(Once):
    def ready(self, ps):
        itself = self
        self.k = 300
        self.count = lambda: itself.k

    def once(self):
        self.k += 1
        return 1 / self.count()


KNOWN = []


class OptimizerInGlobal(Once):
    def ready(self, ps):
        self.k = 300
        KNOWN.append(self)

    def once(self):
        KNOWN[-1].k += 1
        return 1 / self.k


class OptimizerOfParameter(Once):
    def ready(self, ps):
        self.k = 300
        ps[0].owner = self

    def once(self):
        self.param_groups[0]["params"][0].owner.k += 1
        return 1 / self.k


class ListInClosure(Once):
    def ready(self, ps):
        self.numbers = numbers = [300]
        self.first = lambda: numbers[0]

    def once(self):
        self.numbers[0] += 1
        return 1 / self.first()

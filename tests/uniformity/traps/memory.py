"""Memory that lanes share, swap or replace; what happens around a step."""

from __future__ import annotations

import threading
from typing import Any

import torch

from tests.uniformity.traps.base import Momentum, Trap, fill

TABLE = [1.0] * 16


class GradIsTheLeadsOwnMemory(Trap):
    def before(self, turn, ps):
        ps[0].grad = ps[0].detach()


class GradIsALanesOwnMemory(Trap):
    def before(self, turn, ps):
        if turn == 2:
            ps[9].grad = ps[9].detach()


class GradIsAnothersMemory(Trap):
    def before(self, turn, ps):
        if turn == 2:
            ps[9].grad = ps[7].detach()


class GradIsShared(Trap):
    """Two parameters with one gradient object, in some steps."""

    def lane(self, i, p, group):
        p.grad.mul_(0.5)
        p.sub_(p.grad)

    def before(self, turn, ps):
        if turn in (1, 3):
            ps[9].grad = ps[7].grad


class GradIsSharedAtOnce(GradIsShared):
    def before(self, turn, ps):
        if turn in (0, 1):
            ps[9].grad = ps[7].grad


class GradIsTheState(Momentum):
    def before(self, turn, ps):
        if turn == 2:
            ps[9].grad = self.state[ps[9]]["m"]


class GradIsTheLeadsState(Momentum):
    def before(self, turn, ps):
        if turn == 2:
            ps[8].grad = self.state[ps[0]]["m"]


class StateDictIsShared(Momentum):
    def before(self, turn, ps):
        if turn == 2:
            self.state[ps[9]] = self.state[ps[7]]


class StateTensorIsShared(Momentum):
    def before(self, turn, ps):
        if turn == 2:
            self.state[ps[9]]["m"] = self.state[ps[7]]["m"]


class StateIsTheParameter(Momentum):
    def before(self, turn, ps):
        if turn == 2:
            self.state[ps[9]]["m"] = ps[9].detach()


class StateIsOneBlock(Momentum):
    """Views of one flat tensor, two of which overlap."""

    def before(self, turn, ps):
        if turn == 1:
            self.flat = torch.zeros(16 * 12)
            for n, p in enumerate(ps):
                at = 12 * n - 2 * (n == 9)
                part = self.flat[at : at + p.numel()].view(p.shape)
                self.state[p]["m"] = part


class StateIsSwapped(Momentum):
    def before(self, turn, ps):
        if turn == 2:
            a, b = self.state[ps[9]], self.state[ps[11]]
            a["m"], b["m"] = b["m"], a["m"]
        if turn == 3:
            a, b = self.state.pop(ps[9]), self.state.pop(ps[11])
            self.state[ps[9]], self.state[ps[11]] = b, a


class StateIsReplaced(Momentum):
    def before(self, turn, ps):
        if turn == 2:
            self.state[ps[9]]["m"] = fill(ps[9], 1.0)
        if turn == 3:
            self.state[ps[8]] = {"n": 0, "m": fill(ps[8], 2.0)}


class StateIsOfAnotherDtype(Momentum):
    def before(self, turn, ps):
        if turn == 2:
            self.state[ps[9]]["m"] = fill(ps[9], 1.0).double()


class StateHasMore(Momentum):
    def lane(self, i, p, group):
        super().lane(i, p, group)
        for key, value in self.state[p].items():
            if key.startswith("extra"):
                p.sub_(value)

    def before(self, turn, ps):
        if turn == 2:
            self.state[ps[9]]["extra"] = fill(ps[9], 0.5)
        if turn == 3:
            self.state[ps[8]]["extra2"] = fill(ps[8], 0.5)


class StateHasLess(Momentum):
    def before(self, turn, ps):
        if turn == 2:
            self.state.pop(ps[9])
        if turn == 3:
            self.state[ps[8]].clear()


class StateOfAnotherOrder(Momentum):
    """The last of the state's entries, whatever its name."""

    def lane(self, i, p, group):
        super().lane(i, p, group)
        if list(self.state[p])[-1] != "m":
            p.mul_(0.5)

    def before(self, turn, ps):
        if turn == 2:
            own = self.state[ps[9]]
            own["n"] = own.pop("n")


class Inference(Momentum):
    """State that was made under inference mode: an error in eager."""

    def before(self, turn, ps):
        if turn == 2:
            with torch.inference_mode():
                self.state[ps[9]]["m"] = torch.zeros(ps[9].shape)


class ParametersShareMemory(Trap):
    def ready(self, ps):
        ps[9].data = ps[7].data

    def before(self, turn, ps):
        if turn == 3:
            ps[9].data = ps[9].data.clone()


class ParametersComeToShareMemory(Trap):
    def before(self, turn, ps):
        if turn == 2:
            ps[9].data = ps[7].data


class ParametersOverlap(Trap):
    def before(self, turn, ps):
        if turn == 2:
            flat = torch.zeros(9)
            ps[9].data, ps[7].data = flat[:5], flat[4:]


class ParameterOfAnotherDtype(Momentum):
    def before(self, turn, ps):
        if turn >= 2:
            ps[9].data = ps[9].data.double()
            ps[9].grad = None
            ps[9].grad = fill(ps[9], 0.5)


class ParameterOfAnotherDtypeThanItsGradient(Trap):
    def before(self, turn, ps):
        if turn == 2:
            grad = ps[9].grad
            ps[9].grad = None
            ps[9].data = ps[9].data.bfloat16()
            ps[9].grad_dtype = None
            ps[9].grad = grad

    def lane(self, i, p, group):
        p.sub_(p.grad)


class ParameterOfAnotherShape(Momentum):
    def lane(self, i, p, group):
        if self.state[p].get("m", p).shape != p.shape:
            self.state.pop(p)
        super().lane(i, p, group)

    def before(self, turn, ps):
        if turn == 2:
            ps[9].grad = None
            ps[9].data = torch.ones(7)
            ps[9].grad = torch.ones(7)
        elif turn > 2:
            ps[9].grad = torch.ones(7)


class ParameterAppended(Momentum):
    def before(self, turn, ps):
        if turn == 2:
            ps.append(torch.nn.Parameter(torch.ones(5)))
            ps[-1].grad = torch.ones(5)
            self.param_groups[0]["params"].append(ps[-1])


class ParameterReplaced(Momentum):
    def before(self, turn, ps):
        if turn == 2:
            ps[9] = torch.nn.Parameter(torch.ones(5))
            ps[9].grad = torch.ones(5)
            self.param_groups[0]["params"][9] = ps[9]


class ParameterTwice(Momentum):
    def before(self, turn, ps):
        if turn == 2:
            self.param_groups[0]["params"].append(ps[9])


class ParameterGone(Momentum):
    def before(self, turn, ps):
        if turn == 2:
            self.param_groups[0]["params"].pop(9)


class OrderOfParameters(Momentum):
    """In place, between two steps; the place is what a lane goes by."""

    def scale(self, i, p, group):
        return 1.0 + (i == 9)

    def before(self, turn, ps):
        if turn:
            self.param_groups[0]["params"].reverse()


class MovedToAnotherGroup(Momentum):
    def groups(self, ps):
        return [{"params": ps[:10]}, {"params": ps[10:], "rate": 0.5}]

    def scale(self, i, p, group):
        return group.get("rate", 1.0)

    def before(self, turn, ps):
        if turn == 2:
            first, second = self.param_groups
            second["params"].append(first["params"].pop(8))


class PlaceOfParameter(Trap):
    """`index`, by identity."""

    def scale(self, i, p, group):
        at = next(n for n, q in enumerate(group["params"]) if q is p)
        return 1.0 if at < self.last else 2.0

    last = 16

    def before(self, turn, ps):
        if turn == 2:
            type(self).last = 10


class DataIsReplaced(Trap):
    def lane(self, i, p, group):
        p.data = p.data - 0.1 * p.grad


class DataIsReplacedLater(Trap):
    def lane(self, i, p, group):
        if group["lr"] > 0.1:
            p.data = p.data - 0.1 * p.grad
        else:
            p.sub_(p.grad)

    def before(self, turn, ps):
        if turn == 2:
            self.param_groups[0]["lr"] = 0.2


class DataIsTheState(Momentum):
    def lane(self, i, p, group):
        super().lane(i, p, group)
        p.data = self.state[p]["m"]


class DataIsSet(Trap):
    def lane(self, i, p, group):
        p.set_((p - 0.1 * p.grad).detach())


class DataIsACopy(Trap):
    def lane(self, i, p, group):
        x = p.detach().clone()
        x.sub_(p.grad, alpha=0.1)
        p.data = x


class GradDataIsReplaced(Trap):
    def lane(self, i, p, group):
        p.grad.data = p.grad.data * 0.5
        p.sub_(p.grad)


class GradIsReplaced(Trap):
    def lane(self, i, p, group):
        p.grad = p.grad * 0.5
        p.sub_(p.grad)


class GradIsDropped(Trap):
    def lane(self, i, p, group):
        p.sub_(p.grad)
        p.grad = None


class PreHook(Trap):
    """What changes a table is a hook of the step."""

    def ready(self, ps):
        self.calls = 0
        self.register_step_pre_hook(change)

    def scale(self, i, p, group):
        return TABLE[i]


def change(optimizer: Any, args: Any, kwargs: Any) -> None:
    """A hook that makes one lane another, in the third step."""
    optimizer.calls += 1
    if optimizer.calls == 3:
        TABLE[9] = 2.0


class ThreadInAHook(PreHook):
    def ready(self, ps):
        self.calls = 0
        self.register_step_pre_hook(in_a_thread)


def in_a_thread(optimizer: Any, args: Any, kwargs: Any) -> None:
    """The same, done by another thread while the step is under way."""
    thread = threading.Thread(target=change, args=(optimizer, args, kwargs))
    thread.start()
    thread.join()


class PostHook(Trap):
    def ready(self, ps):
        self.odd = -1
        self.register_step_post_hook(odd_one)

    def scale(self, i, p, group):
        return 2.0 if i == self.odd else 1.0


def odd_one(optimizer: Any, args: Any, kwargs: Any) -> None:
    """A hook that makes another lane the odd one after each step."""
    optimizer.odd += 5


class HookOfOneGradient(Trap):
    """A hook that runs in backward changes what the step will see."""

    def ready(self, ps):
        self.odd = {}
        ps[9].register_post_accumulate_grad_hook(
            lambda p: self.odd.update({9: self.odd.get(9, 1.0) / 2})
        )

    def scale(self, i, p, group):
        return self.odd.get(i, 1.0)

    def before(self, turn, ps):
        if turn == 2:
            (ps[9] * ps[9].detach()).sum().backward()

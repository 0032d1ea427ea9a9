"""Branches on what tensors hold: eager's bits, and one graph where that can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import fuseopt
from tests.numerics.test_plain import differences
from tests.numerics.test_schedules import SCHEDULES, STATE, USUAL, compilations
from tests.papers.published import PublishedMARS
from tests.steps import make_params


class Branches(Optimizer):
    """`change(gradient, parameter, state, lr)` says what to subtract."""

    def __init__(self, params: Any, change: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.change = change
        for p in self.param_groups[0]["params"]:
            self.state[p]["last"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                update = self.change(p.grad, p, self.state[p], group["lr"])
                p.sub_(update, alpha=group["lr"])


Change = Callable[[Tensor, Tensor, dict[str, Any], float], Tensor]


def clips(g: Tensor, p: Tensor, state: Any, lr: float) -> Tensor:
    norm = g.norm()
    if norm > 2.0:
        g = g / norm
    return g


def clips_both(g: Tensor, p: Tensor, state: Any, lr: float) -> Tensor:
    norm, scale = g.norm(), 1.0
    if norm > 3.0:
        g, scale = g / norm, 0.5
        if p.norm() > 2.0:
            g = g * 2
    elif norm < 1.0:
        g = g + p
    return g * scale


def asks_all(g: Tensor, p: Tensor, state: Any, lr: float) -> Tensor:
    if (g > -1.0).all():
        g = -g
    if g.sum():
        return g * 3
    return g


def changes_memory(g: Tensor, p: Tensor, state: Any, lr: float) -> Tensor:
    if g.abs().max() > 1.5:
        state["last"].mul_(0.5).add_(g)
    else:
        state["last"].add_(1.0)
    return state["last"] + g


#: What was chosen is written, or what it was chosen from: eager sees it in both.
def writes_the_choice(g: Tensor, p: Tensor, state: Any, lr: float) -> Tensor:
    made = g
    if g.norm() > 2.0:
        made = g * 0.5
    made.add_(1.0)
    return g + made


def writes_a_side(g: Tensor, p: Tensor, state: Any, lr: float) -> Tensor:
    made = g
    if g.norm() > 2.0:
        made = g * 0.5
    g.add_(1.0)
    return g + made


def writes_a_view(g: Tensor, p: Tensor, state: Any, lr: float) -> Tensor:
    made = g
    if g.norm() > 2.0:
        made = g * 0.5
    made.view(-1).add_(1.0)
    return g + made


def keeps_the_choice(g: Tensor, p: Tensor, state: Any, lr: float) -> Tensor:
    made = state["last"]
    if g.norm() > 2.0:
        made = g * 0.5
    state["kept"] = made
    state["last"].add_(1.0)
    return g + made


def shapes_differ(g: Tensor, p: Tensor, state: Any, lr: float) -> Tensor:
    if g.norm() > 2.0:
        g = g.sum()
    return g * torch.ones_like(p)


#: One graph.
WHOLE = [clips, clips_both, asks_all, changes_memory]
#: Dynamo ends its graph there.
APART = [writes_the_choice, writes_a_side, writes_a_view, keeps_the_choice]
APART += [shapes_differ]


def run(change: Change, **options: Any) -> None:
    shapes = [(3,), (2, 2), (40,), (1,)]
    theirs, mine = make_params(shapes), make_params(shapes)
    plain, other = Branches(theirs, change), Branches(mine, change)
    fuseopt.compile(other, **options)
    for number in range(8):
        generator = torch.Generator().manual_seed(number)
        for p, q in zip(theirs, mine, strict=True):
            grad = torch.randn(p.shape, generator=generator) * (number % 3)
            if number == 5:
                grad[..., 0] = float("nan")
            p.grad, q.grad = grad.clone(), grad.clone()
        for opt in (plain, other):
            opt.param_groups[0]["lr"] = 0.1 / (1 + number)
        plain.step()
        other.step()
        assert differences(other, plain) == [], f"step {number}"


@pytest.mark.family(4)
@pytest.mark.parametrize("change", WHOLE, ids=lambda f: f.__name__)
def test_both_ways_are_in_one_graph(change: Change) -> None:
    run(change, fallback="error")
    (report,) = fuseopt.reports()
    assert not report.fallback


@pytest.mark.family(5)
@pytest.mark.filterwarnings("ignore:fuseopt:RuntimeWarning")
@pytest.mark.parametrize("change", APART, ids=lambda f: f.__name__)
def test_a_choice_that_would_be_seen_is_eagers(change: Change) -> None:
    run(change)


@pytest.mark.parametrize("schedule", ["warm-up from 0", "one cycle"])
def test_mars_as_published(schedule: str) -> None:
    """It was compiled fifteen times in six steps."""
    ways = [STATE, USUAL]
    assert compilations(PublishedMARS, SCHEDULES[schedule], 6) == len(ways)


def halves_large(g: Tensor, p: Tensor, seen: list[Tensor] | None) -> Tensor:
    if g.norm() > 2.0:
        if seen is not None:
            seen.append(p)
        g = g * 0.5
    return g


def reports_of_halves(*seen: list[Tensor] | None) -> list[Any]:
    """Of steps of two optimizers, the first of them compiled. Their bits are alike."""
    built = []
    for own in seen:
        params = make_params([(6,), (3, 2)])
        change = lambda g, p, state, lr, own=own: halves_large(g, p, own)  # noqa: E731
        built.append(Branches(params, change))
    mine, theirs = built
    fuseopt.compile(mine)
    for _ in range(3):
        for optimizer in built:
            for k, p in enumerate(optimizer.param_groups[0]["params"]):
                p.grad = torch.full_like(p, 0.3 + k)
            optimizer.step()
        assert differences(mine, theirs) == []
    reports = fuseopt.reports()
    torch._dynamo.reset()
    return reports


@pytest.mark.filterwarnings("ignore:fuseopt")
def test_a_branch_that_one_trace_cannot_follow_is_followed_by_another() -> None:
    """The code is shared; what its ways do depends on the optimizer's objects."""
    assert len(reports_of_halves([], [])) > 1
    (report,) = reports_of_halves(None, None)
    assert report.fallback == ""
